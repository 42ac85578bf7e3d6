"""Tour of `instructor`: structured answers in its modes, streams of partial objects, and lists."""

import asyncio
from typing import Any, Literal

import instructor
import openai
from checks import BASE, MODEL, PROMPT, Checks
from pydantic import BaseModel, Field


class Place(BaseModel, extra="forbid"):
    """A place."""

    name: str = Field(max_length=8)
    kind: Literal["city", "village"]


class Forecast(BaseModel, extra="forbid"):
    """Weather of the next days. Without extra="forbid" the schema allows any further fields."""

    place: Place
    days: int = Field(ge=1, le=9)


ASK: Any = {
    "model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "temperature": 1, "max_tokens": 200, "seed": 4,
    "max_retries": 0,
}  # fmt: skip
RESPONSES: Any = {name: value for name, value in ASK.items() if name not in ("max_tokens", "seed")} | {
    "max_output_tokens": 200, "extra_body": {"seed": 4},
}  # fmt: skip


def main() -> None:
    checks = Checks()
    endpoint: Any = {"base_url": f"{BASE}/v1", "api_key": "none", "max_retries": 0}
    modes = {"TOOLS": ASK, "TOOLS_STRICT": ASK, "JSON_SCHEMA": ASK, "RESPONSES_TOOLS": RESPONSES}
    for name, asked in modes.items():
        client = instructor.from_openai(openai.OpenAI(**endpoint), mode=getattr(instructor.Mode, name))
        with checks.check(f"{name}: create"):
            assert isinstance(client.chat.completions.create(**asked, response_model=Forecast), Forecast)
    client = instructor.from_openai(openai.OpenAI(**endpoint), mode=instructor.Mode.JSON)
    with checks.limit(
        "JSON: create", "validation error",
        "this mode sends json_object and the schema as text only: the demo model does not follow it; use JSON_SCHEMA",
    ):  # fmt: skip
        client.chat.completions.create(**ASK, response_model=Forecast)
    client = instructor.from_openai(openai.OpenAI(**endpoint), mode=instructor.Mode.JSON_SCHEMA)
    with checks.check("JSON_SCHEMA: create_with_completion"):
        made, raw = client.chat.completions.create_with_completion(**ASK, response_model=Forecast)
        assert isinstance(made, Forecast)
        assert raw.usage.completion_tokens > 0
    with checks.check("JSON_SCHEMA: create_partial"):
        parts = list(client.chat.completions.create_partial(**ASK, response_model=Forecast))
        assert len(parts) > 2
        Forecast.model_validate(parts[-1].model_dump())
    with checks.check("asyncio, TOOLS: create"):
        asynchronous = instructor.from_openai(openai.AsyncOpenAI(**endpoint), mode=instructor.Mode.TOOLS)
        assert isinstance(asyncio.run(asynchronous.chat.completions.create(**ASK, response_model=Forecast)), Forecast)
    checks.write()


if __name__ == "__main__":
    main()
