"""Tour of `langchain-openai`: chat and Responses, streams, tools, structured output, completions, embeddings.

And of `langchain-cohere`: rerankers.
"""

import asyncio
from typing import Any, Literal

from checks import BASE, EMBEDDING_BASE, ENCODER_BASE, MODEL, PROMPT, RERANKER_BASE, WORDS, Checks, best_first
from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

ENDPOINT: Any = {"base_url": f"{BASE}/v1", "api_key": "none", "model": MODEL, "max_retries": 0}
ASK = [SystemMessage("Write Python."), HumanMessage(PROMPT)]


class Forecast(BaseModel):
    """Weather of the next days."""

    city: str = Field(max_length=8)
    days: int = Field(ge=1, le=9)


@tool
def weather(city: Literal["Oslo", "Rome"], unit: Literal["C", "F"]) -> str:
    """Weather of a city."""
    return f"{city}: 4 {unit}"


def chat_tour(checks: Checks, loop: asyncio.Runner, name: str, settings: dict[str, Any]) -> None:
    """All features of ChatOpenAI. loop: the same for all tours, because all clients share a pool of connections."""
    greedy = ChatOpenAI(**ENDPOINT, temperature=0, max_tokens=24, **settings)
    lively = ChatOpenAI(**ENDPOINT, temperature=1, max_tokens=200, extra_body={"seed": 5}, **settings)
    text = ""
    with checks.check(f"{name}: invoke, with usage"):
        answer = greedy.invoke(ASK)
        text = answer.text
        assert text
        assert answer.usage_metadata
        assert answer.usage_metadata["output_tokens"] <= 24
    with checks.check(f"{name}: stream equals invoke"):
        parts = list(greedy.stream(ASK))
        assert "".join(part.text for part in parts) == text
        assert len(parts) > 2
    with checks.check(f"{name}: batch"):
        assert [answer.text for answer in greedy.batch([ASK, ASK, ASK])] == [text] * 3
    with checks.check(f"{name}: ainvoke and astream"):

        async def run() -> None:
            whole, parts = await asyncio.gather(greedy.ainvoke(ASK), collect(greedy))
            assert whole.text == parts == text

        loop.run(run())
    for choice in ("weather", "required"):
        with checks.check(f"{name}: bind_tools, tool_choice {choice}, and the result sent back"):
            bound = lively.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
            answer: Any = bound.invoke(ASK)
            (call,) = answer.tool_calls
            assert call["name"] == "weather"
            result = weather.invoke(call)
            assert isinstance(result, ToolMessage)
            after = lively.bind_tools([weather], tool_choice="none").invoke([*ASK, answer, result])
            assert isinstance(after, AIMessage)
            assert not after.tool_calls
    with checks.check(f"{name}: bind_tools, streamed"):
        whole: Any = None
        for part in lively.bind_tools([weather], tool_choice="weather").stream(ASK):
            whole = part if whole is None else whole + part
        assert [call["name"] for call in whole.tool_calls] == ["weather"]
        weather.invoke(whole.tool_calls[0])
    for method in ("json_schema", "function_calling"):
        with checks.check(f"{name}: with_structured_output, {method}"):
            assert isinstance(lively.with_structured_output(Forecast, method=method).invoke(ASK), Forecast)


async def collect(model: Any) -> str:
    return "".join([part.text async for part in model.astream(ASK)])


def main() -> None:
    checks = Checks()
    with asyncio.Runner() as loop:
        chat_tour(checks, loop, "chat completions", {"use_responses_api": False})
        chat_tour(checks, loop, "responses", {"use_responses_api": True})
    with checks.check("chat completions: logprobs"):
        answer = ChatOpenAI(**ENDPOINT, temperature=0, max_tokens=8, logprobs=True, top_logprobs=2).invoke(ASK)
        assert len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2
    with checks.check("responses: use_previous_response_id"):
        kept = ChatOpenAI(
            **ENDPOINT, temperature=0, max_tokens=24, use_responses_api=True, use_previous_response_id=True
        )
        first = kept.invoke(ASK)
        assert str(first.response_metadata["id"]).startswith("resp_")
        assert kept.invoke([*ASK, first, HumanMessage("again")]).text
    with checks.check("OpenAI: completions, whole and streamed"):
        completions = OpenAI(**ENDPOINT, temperature=0, max_tokens=24)
        assert "".join(completions.stream(PROMPT)) == completions.invoke(PROMPT) != ""
    embed: Any = ENDPOINT | {"base_url": f"{EMBEDDING_BASE}/v1"}
    # By default the client sends token ids of OpenAI's tokenizer, which no other model knows.
    with checks.check("OpenAIEmbeddings: embed_documents, check_embedding_ctx_length=False"):
        vectors = OpenAIEmbeddings(**embed, check_embedding_ctx_length=False).embed_documents([PROMPT, "x"])
        assert [len(vector) for vector in vectors] == [256, 256]
    with checks.check("OpenAIEmbeddings of an encoder: embed_documents, embed_query and their asyncio versions"):
        encoder = OpenAIEmbeddings(
            **embed | {"base_url": f"{ENCODER_BASE}/v1", "model": "encoder"}, check_embedding_ctx_length=False
        )
        vectors = encoder.embed_documents(WORDS)
        assert [len(vector) for vector in vectors] == [64] * 3
        assert all(abs(sum(x * x for x in vector) - 1) < 1e-5 for vector in vectors)
        assert vectors[1] == encoder.embed_query(WORDS[1]) == asyncio.run(encoder.aembed_query(WORDS[1]))
    documents = [Document(text) for text in WORDS]
    with checks.check("CohereRerank with an encoder: compress_documents"):
        reranker = CohereRerank(base_url=ENCODER_BASE, cohere_api_key="none", model="encoder", top_n=2)
        ranked = reranker.compress_documents(documents, WORDS[1])
        assert ranked[0].page_content == WORDS[1]
        assert abs(ranked[0].metadata["relevance_score"] - 1) < 1e-4  # the cosine of a text with itself
        assert len(ranked) == 2
    with checks.check("CohereRerank with a cross-encoder: compress_documents and rerank"):
        reranker = CohereRerank(base_url=RERANKER_BASE, cohere_api_key="none", model="encoder", top_n=3)
        found = [(each.page_content, each.metadata["relevance_score"])
                 for each in reranker.compress_documents(documents, WORDS[0])]  # fmt: skip
        assert found == best_first(WORDS[0], WORDS)
        assert [WORDS[one["index"]] for one in reranker.rerank(WORDS, WORDS[0], top_n=2)] == [t for t, _ in found[:2]]
    checks.write()


if __name__ == "__main__":
    main()
