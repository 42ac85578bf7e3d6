"""Tour of LlamaIndex's `OpenAILike`: completions, chat, streams, tools, structured output; embeddings and rerankers."""

import asyncio
from typing import Any, Literal

from checks import BASE, EMBEDDING_BASE, ENCODER_BASE, MODEL, PROMPT, RERANKER_BASE, WORDS, Checks, best_first
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from pydantic import BaseModel, Field

ENDPOINT: Any = {"model": MODEL, "api_base": f"{BASE}/v1", "api_key": "none", "max_retries": 0, "context_window": 2048}
TEXTS = ["x = 1", PROMPT, "class Reader:"]  # to embed, and documents to rerank
ASK = [ChatMessage(role="system", content="Write Python."), ChatMessage(role="user", content=PROMPT)]


class Forecast(BaseModel):
    """Weather of the next days."""

    city: str = Field(max_length=8)
    sky: Literal["clear", "rain"]


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Weather of a city."""
    return f"{city}: 4 C"


def main() -> None:
    checks = Checks()
    plain = OpenAILike(**ENDPOINT, temperature=0, max_tokens=24, is_chat_model=False)
    chat = OpenAILike(**ENDPOINT, temperature=0, max_tokens=24, is_chat_model=True)
    with checks.check("completions: complete and stream_complete"):
        assert "".join(part.delta or "" for part in plain.stream_complete(PROMPT)) == plain.complete(PROMPT).text != ""
    with checks.check("chat: chat and stream_chat"):
        whole = chat.chat(ASK).message.content
        assert whole
        assert "".join(part.delta or "" for part in chat.stream_chat(ASK)) == whole
    with checks.check("chat: achat and astream_chat"):

        async def run() -> None:
            stream = await chat.astream_chat(ASK)
            assert "".join([part.delta or "" async for part in stream]) == (await chat.achat(ASK)).message.content

        asyncio.run(run())
    lively = OpenAILike(
        **ENDPOINT, temperature=1, max_tokens=200, is_chat_model=True, is_function_calling_model=True,
        additional_kwargs={"seed": 6}, should_use_structured_outputs=True,
    )  # fmt: skip
    tool = FunctionTool.from_defaults(fn=weather)
    with checks.check("tools: chat_with_tools, and the result sent back"):
        answer = lively.chat_with_tools([tool], chat_history=ASK, tool_required=True)
        (call,) = lively.get_tool_calls_from_response(answer)
        result = str(tool(**call.tool_kwargs))
        back = ChatMessage(role="tool", content=result, additional_kwargs={"tool_call_id": call.tool_id})
        assert lively.chat([*ASK, answer.message, back]).message
    with checks.check("tools: predict_and_call"):
        assert "4 C" in str(lively.predict_and_call([tool], chat_history=ASK, tool_required=True))
    with checks.check("structured output: as_structured_llm"):
        assert isinstance(lively.as_structured_llm(Forecast).chat(ASK).raw, Forecast)
    with checks.check("structured output: by a forced tool"):
        by_tool = OpenAILike(
            **ENDPOINT, temperature=1, max_tokens=200, is_chat_model=True, is_function_calling_model=True,
            additional_kwargs={"seed": 6}, should_use_structured_outputs=False,
        )  # fmt: skip
        assert isinstance(by_tool.as_structured_llm(Forecast).chat(ASK).raw, Forecast)
    with checks.check("embeddings: get_text_embedding_batch and get_query_embedding"):
        embed = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{EMBEDDING_BASE}/v1", api_key="none", max_retries=0)
        vectors = embed.get_text_embedding_batch(TEXTS)
        assert [len(vector) for vector in vectors] == [256] * 3
        assert max(abs(a - b) for a, b in zip(vectors[1], embed.get_query_embedding(PROMPT), strict=True)) < 1e-5
    with checks.check("embeddings of an encoder: get_text_embedding_batch and get_query_embedding"):
        encoder = OpenAILikeEmbedding(
            model_name="encoder", api_base=f"{ENCODER_BASE}/v1", api_key="none", max_retries=0
        )
        vectors = encoder.get_text_embedding_batch(WORDS)
        assert [len(vector) for vector in vectors] == [64] * 3
        assert vectors[1] == encoder.get_query_embedding(WORDS[1])
    for name, of_words in {
        "CohereRerank": CohereRerank(base_url=RERANKER_BASE, api_key="none", model="encoder", top_n=3),
        "JinaRerank": JinaRerank(base_url=f"{RERANKER_BASE}/v1", api_key="none", model="encoder", top_n=3),
    }.items():
        with checks.check(f"rerankers: {name} with a cross-encoder"):
            words = [NodeWithScore(node=TextNode(text=text)) for text in WORDS]
            found = [(each.node.get_content(), each.score) for each in
                     of_words.postprocess_nodes(words, query_str=WORDS[0])]  # fmt: skip
            assert found == best_first(WORDS[0], WORDS)
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    rerankers = {
        "CohereRerank": lambda: CohereRerank(base_url=EMBEDDING_BASE, api_key="none", model=MODEL, top_n=2),
        "JinaRerank": lambda: JinaRerank(base_url=f"{EMBEDDING_BASE}/v1", api_key="none", model=MODEL, top_n=2),
    }
    for name, make in rerankers.items():
        with checks.check(f"rerankers: {name}"):
            ranked = make().postprocess_nodes(nodes, query_str=PROMPT)
            assert ranked[0].node.get_content() == PROMPT
            assert len(ranked) == 2
            assert abs((ranked[0].score or 0) - 1) < 1e-4  # the cosine of a text with itself
    checks.write()


if __name__ == "__main__":
    main()
