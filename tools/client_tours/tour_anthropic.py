"""Tour of Anthropic's Python client, sync and asyncio. Every answer and event is validated strictly."""

import asyncio
import json
import typing
from typing import Any

import anthropic
from anthropic.types import ErrorObject, Message, MessageTokensCount, RawMessageStreamEvent
from checks import BASE, MODEL, PROMPT, WEATHER, Checks, raises, wait_until_idle
from pydantic import BaseModel
from strict import AsyncRecorder, Recorder, Route, StrictChecks

TOOLS: Any = [
    {"name": "weather", "description": "Weather of a city.", "input_schema": WEATHER},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
# Version 2 of the client has no parameters for sampling: extra_body sends them.
ASK: Any = {
    "model": MODEL, "max_tokens": 40, "messages": [{"role": "user", "content": PROMPT}],
    "extra_body": {"temperature": 0},
}  # fmt: skip
LONGER: Any = ASK | {"max_tokens": 200, "extra_body": {"temperature": 1}}
FORCED: Any = LONGER | {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "weather"}}


class Forecast(BaseModel):
    """Small enough that an answer of the demo model fits. `parse` moves limits of lengths to a description."""

    city: typing.Literal["Oslo", "Rome"]
    rain: bool


class Ping(BaseModel, extra="allow"):
    """An event of the API that the client skips. The client has no type for it."""

    type: typing.Literal["ping"]


class ErrorBody(BaseModel):
    """Body of an error."""

    type: typing.Literal["error"]
    error: ErrorObject


EVENTS: dict[str, Any] = {"ping": Ping} | {
    typing.get_args(model.model_fields["type"].annotation)[0]: model
    for model in typing.get_args(typing.get_args(RawMessageStreamEvent)[0])
}
ROUTES = [
    Route("POST", "/v1/messages", Message, lambda event: EVENTS[event["type"]]),
    Route("POST", "/v1/messages/count_tokens", MessageTokensCount),
]


def valid(block: Any) -> dict[str, Any]:
    """Input of a tool_use block, checked against the schema of `weather`."""
    assert (block.type, block.name) == ("tool_use", "weather"), block
    assert set(block.input) == {"city", "unit"}, block.input
    assert block.input["unit"] in ("C", "F"), block.input
    return block.input


def sync_tour(checks: Checks, client: Any) -> None:
    whole = ""
    with checks.check("messages.create"):
        message = client.messages.create(**ASK, system="Write Python.", metadata={"user_id": "someone"})
        whole = message.content[0].text
        assert message.stop_reason in ("end_turn", "max_tokens")
        assert message.usage.output_tokens <= 40
    with checks.check("messages.create: blocks, stop_sequences, top_p, top_k, the answer sent back"):
        blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
        first = client.messages.create(
            **ASK | {"messages": [{"role": "user", "content": blocks}]} | {
                "extra_body": {"temperature": 1, "top_p": 0.9, "top_k": 20}
            }, system=blocks, stop_sequences=["zebra"],
        )  # fmt: skip
        history = [ASK["messages"][0], {"role": "assistant", "content": first.content}, ASK["messages"][0]]
        client.messages.create(**ASK | {"messages": history})
    with checks.check("messages.create: stop_sequence"):
        stopped = client.messages.create(**ASK, system="Write Python.", stop_sequences=["\n"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "\n")
    with checks.check("messages.create: stream"):
        events = list(client.messages.create(**ASK, system="Write Python.", stream=True))
        assert events[0].type == "message_start"
        assert events[-1].type == "message_stop"
        assert "".join(e.delta.text for e in events if e.type == "content_block_delta") == whole
    with (
        checks.check("messages.stream: text_stream and final message"),
        client.messages.stream(**ASK, system="Write Python.") as stream,
    ):
        assert "".join(stream.text_stream) == whole
        assert stream.get_final_message().content[0].text == whole
    with checks.check("messages.create: a stream closed early ends its request"):
        with client.messages.create(**ASK | {"max_tokens": 1500}, stream=True) as stream:
            next(iter(stream))
        wait_until_idle()
    with checks.check("tools: a forced tool, and its result sent back"):
        message = client.messages.create(**FORCED)
        valid(message.content[-1])
        assert message.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "4 C"}
        history = [
            *FORCED["messages"], {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ]  # fmt: skip
        after = client.messages.create(**FORCED | {"messages": history, "tool_choice": {"type": "none"}})
        assert all(block.type == "text" for block in after.content)
    with checks.check("tools: any, auto"):
        choice = {"type": "any", "disable_parallel_tool_use": True}
        (block,) = client.messages.create(**FORCED | {"tool_choice": choice}).content
        assert block.name in ("weather", "now")
        client.messages.create(**FORCED | {"tool_choice": {"type": "auto"}})
    with checks.check("tools: stream"), client.messages.stream(**FORCED) as stream:
        partial = "".join(event.partial_json for event in stream if event.type == "input_json")
        assert json.loads(partial) == valid(stream.get_final_message().content[-1])
    with checks.check("messages.create: output_config with a JSON schema"):
        schema = Forecast.model_json_schema() | {"additionalProperties": False}
        message = client.messages.create(
            **LONGER,
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
        Forecast.model_validate_json(message.content[0].text)
    with checks.check("messages.parse: a pydantic model"):
        parsed = client.messages.parse(**LONGER, output_format=Forecast)
        assert isinstance(parsed.parsed_output, Forecast)
    with checks.check("messages.count_tokens"):
        counted = client.messages.count_tokens(model=MODEL, messages=ASK["messages"], system="Write Python.")
        used = client.messages.create(**ASK, system="Write Python.").usage
        cached = (used.cache_read_input_tokens or 0) + (used.cache_creation_input_tokens or 0)
        assert counted.input_tokens == used.input_tokens + cached
        with_tools = client.messages.count_tokens(model=MODEL, messages=ASK["messages"], tools=TOOLS)
        assert with_tools.input_tokens > counted.input_tokens
    with checks.check("errors: bad request, unknown model"):
        cold = ASK | {"extra_body": {"temperature": -1}}
        assert raises(anthropic.BadRequestError, "temperature", client.messages.create, **cold).request_id
        assert raises(anthropic.NotFoundError, "nobody", client.messages.create, **ASK | {"model": "nobody"}).request_id


async def asyncio_tour(checks: Checks, client: Any) -> None:
    """The main calls with the asyncio client, and requests at the same time."""
    with checks.check("async: 8 messages at once give what one gives"):
        made = await asyncio.gather(*(client.messages.create(**ASK) for _ in range(8)))
        assert len({message.content[0].text for message in made}) == 1
    with checks.check("async: messages.stream"):
        async with client.messages.stream(**ASK) as stream:
            text = "".join([part async for part in stream.text_stream])
        assert text == made[0].content[0].text
    with checks.check("async: a forced tool, and count_tokens"):
        valid((await client.messages.create(**FORCED)).content[-1])
        assert (await client.messages.count_tokens(model=MODEL, messages=ASK["messages"])).input_tokens > 0


def main() -> None:
    checks = StrictChecks(ROUTES, ErrorBody, set())
    options: Any = {"base_url": BASE, "api_key": "none", "max_retries": 0, "timeout": 60}
    sync_http = anthropic.DefaultHttpxClient(transport=Recorder(checks.answers))
    with anthropic.Anthropic(**options, http_client=sync_http) as client:
        sync_tour(checks, client)

    async def run() -> None:
        http = anthropic.DefaultAsyncHttpxClient(transport=AsyncRecorder(checks.answers))
        async with anthropic.AsyncAnthropic(**options, http_client=http) as client:
            await asyncio_tour(checks, client)

    asyncio.run(run())
    checks.write()


if __name__ == "__main__":
    main()
