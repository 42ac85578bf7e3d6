"""Tour of `pydantic-ai` with its chat and its Responses model: texts, streams, tools, structured output."""

import asyncio
from typing import Any, Literal

from checks import BASE, MODEL, PROMPT, Checks
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

GREEDY: Any = {"temperature": 0, "max_tokens": 24}
LIVELY: Any = {"temperature": 1, "max_tokens": 200, "extra_body": {"seed": 7}}


class Forecast(BaseModel):
    """Weather of the next days."""

    city: str = Field(max_length=8)
    sky: Literal["clear", "rain"]


async def model_tour(checks: Checks, name: str, model: Any) -> None:
    agent = Agent(model, instructions="Write Python.", model_settings=GREEDY, retries=0)
    text = ""
    with checks.check(f"{name}: run, with usage"):
        done = await agent.run(PROMPT)
        text = done.output
        assert text
        assert done.usage.output_tokens <= 24
    with checks.check(f"{name}: run_stream equals run"):
        async with agent.run_stream(PROMPT) as stream:
            assert "".join([part async for part in stream.stream_text(delta=True)]) == text
    with checks.check(f"{name}: message_history"):
        first = await agent.run(PROMPT)
        assert (await agent.run("again", message_history=first.all_messages())).output
    for kind, output in (("ToolOutput", ToolOutput(Forecast)), ("NativeOutput", NativeOutput(Forecast))):
        with checks.check(f"{name}: {kind}"):
            structured = Agent(model, output_type=output, model_settings=LIVELY, retries=0)
            assert isinstance((await structured.run(PROMPT)).output, Forecast)
        with checks.check(f"{name}: {kind}, streamed"):
            structured = Agent(model, output_type=output, model_settings=LIVELY, retries=0)
            async with structured.run_stream(PROMPT) as stream:
                assert isinstance(await stream.get_output(), Forecast)
    with checks.check(f"{name}: a function tool, its result sent back, then the output tool"):
        called: list[str] = []
        settings = LIVELY | {"parallel_tool_calls": False}
        tooled = Agent(model, output_type=ToolOutput(Forecast), model_settings=settings, retries=0)

        @tooled.tool_plain
        def weather(city: Literal["Oslo", "Rome"]) -> str:
            """Weather of a city."""
            called.append(city)
            return "4 C"

        for seed in range(20):  # the model chooses between the two tools: some seed makes it call both
            own: Any = settings | {"extra_body": {"seed": seed}}
            done = await tooled.run(PROMPT, model_settings=own)
            assert isinstance(done.output, Forecast)
            if called:
                break
        assert called


def main() -> None:
    checks = Checks()
    provider = OpenAIProvider(base_url=f"{BASE}/v1", api_key="none")

    async def run() -> None:
        await model_tour(checks, "OpenAIChatModel", OpenAIChatModel(MODEL, provider=provider))
        await model_tour(checks, "OpenAIResponsesModel", OpenAIResponsesModel(MODEL, provider=provider))

    asyncio.run(run())
    checks.write()


if __name__ == "__main__":
    main()
