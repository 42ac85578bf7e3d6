"""Tour of `litellm`'s SDK with its providers `hosted_vllm`, `openai` and `anthropic`."""

import asyncio
import json
from typing import Any

import litellm
from checks import BASE, EMBEDDING_BASE, MODEL, PROMPT, WEATHER, Checks
from pydantic import BaseModel, Field

MESSAGES: Any = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": PROMPT}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
BASES = {"hosted_vllm": f"{BASE}/v1", "openai": f"{BASE}/v1", "anthropic": BASE}


class Forecast(BaseModel):
    """Small enough that an answer of the demo model fits."""

    city: str = Field(max_length=8)
    days: int = Field(ge=1, le=9)


def provider_tour(checks: Checks, provider: str) -> None:
    endpoint: Any = {"model": f"{provider}/{MODEL}", "api_base": BASES[provider], "api_key": "none", "num_retries": 0}
    asked: Any = endpoint | {"messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    forced: Any = asked | {"max_tokens": 200, "temperature": 1, "tools": TOOLS, "tool_choice": NAMED}
    text = ""
    with checks.check(f"{provider}: completion"):
        answer: Any = litellm.completion(**asked)
        text = answer.choices[0].message.content
        assert text
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    with checks.check(f"{provider}: completion, streamed"):
        stream: Any = litellm.completion(**asked, stream=True, stream_options={"include_usage": True})
        assert "".join(part.choices[0].delta.content or "" for part in stream if part.choices) == text
    with checks.check(f"{provider}: acompletion, 6 at once"):

        async def run() -> list[Any]:
            return await asyncio.gather(*(litellm.acompletion(**asked) for _ in range(6)))

        assert {answer.choices[0].message.content for answer in asyncio.run(run())} == {text}
    with checks.check(f"{provider}: a named tool, and its result sent back"):
        answer = litellm.completion(**forced)
        (call,) = answer.choices[0].message.tool_calls
        assert {"city", "unit"} <= set(json.loads(call.function.arguments))  # hosted_vllm drops additionalProperties
        result = {"role": "tool", "tool_call_id": call.id, "content": "4 C"}
        history = [*MESSAGES, answer.choices[0].message.model_dump(), result]
        assert litellm.completion(**forced | {"messages": history, "tool_choice": "auto"})
    with checks.check(f"{provider}: a named tool, streamed"):
        parts = list(litellm.completion(**forced, stream=True))
        built: Any = litellm.stream_chunk_builder(parts)
        assert {"city", "unit"} <= set(json.loads(built.choices[0].message.tool_calls[0].function.arguments))
    with checks.check(f"{provider}: response_format with a pydantic model"):
        answer = litellm.completion(**asked | {"max_tokens": 200, "temperature": 1}, response_format=Forecast)
        Forecast.model_validate_json(answer.choices[0].message.content)
    with checks.check(f"{provider}: errors have their kind"):
        caught: Exception | None = None
        try:
            litellm.completion(**asked | {"temperature": -1})
        except litellm.exceptions.BadRequestError as error:
            caught = error
        assert caught is not None


def main() -> None:
    checks = Checks()
    for provider in BASES:
        provider_tour(checks, provider)
    endpoint: Any = {"api_base": f"{BASE}/v1", "api_key": "none", "num_retries": 0}
    with checks.check("text-completion-openai: text_completion, whole and streamed"):
        asked: Any = endpoint | {
            "model": f"text-completion-openai/{MODEL}", "prompt": PROMPT, "max_tokens": 24, "temperature": 0,
        }  # fmt: skip
        whole: Any = litellm.text_completion(**asked)
        stream: Any = litellm.text_completion(**asked, stream=True)
        assert "".join(part.choices[0].text or "" for part in stream) == whole.choices[0].text != ""
    with checks.check("openai: responses, whole and streamed"):
        asked = endpoint | {"model": f"openai/{MODEL}", "input": PROMPT, "max_output_tokens": 24, "temperature": 0}
        made: Any = litellm.responses(**asked)
        events: Any = list(litellm.responses(**asked, stream=True))
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == made.output[-1].content[0].text
    for provider in ("hosted_vllm", "openai"):
        with checks.check(f"{provider}: embedding"):
            vectors: Any = litellm.embedding(
                model=f"{provider}/{MODEL}", input=[PROMPT, "x"], api_base=f"{EMBEDDING_BASE}/v1", api_key="none"
            )
            assert [len(data["embedding"]) for data in vectors.data] == [256, 256]
    checks.write()


if __name__ == "__main__":
    main()
