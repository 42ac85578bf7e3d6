"""Tour of `langchain-openai`: chat and Responses, streams, tools, structured output, completions, embeddings."""

import asyncio
from typing import Any, Literal

from checks import BASE, EMBEDDING_BASE, MODEL, PROMPT, Checks
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
    checks.write()


if __name__ == "__main__":
    main()
