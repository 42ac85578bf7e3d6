"""Tour of OpenAI's Python client, sync and asyncio. Every answer and event is validated strictly."""

import asyncio
import enum
import json
import time
import typing
from typing import Any

import openai
from checks import BASE, EMBEDDING_BASE, MODEL, PROMPT, WEATHER, raises, wait_until_idle
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import BaseModel, Field
from strict import AsyncRecorder, Recorder, Route, StrictChecks

MESSAGES: Any = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": PROMPT}]
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Weather of a city.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
RESPONSE_TOOLS: Any = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


class Unit(enum.Enum):
    """An enumeration inside a schema."""

    C = "C"
    F = "F"


class Place(BaseModel):
    """An object inside a schema."""

    name: str = Field(max_length=8)


class Forecast(BaseModel):
    """Small enough that an answer of the demo model fits."""

    places: list[Place] = Field(max_length=2)
    unit: Unit
    days: int = Field(ge=1, le=9)


class Error(BaseModel):
    """Body of an error."""

    error: ErrorObject


def prepare_completion(document: dict[str, Any], is_event: bool) -> dict[str, Any]:
    """Replace two nulls that OpenAI's server sends too, but the type does not allow.

    They are an event's finish_reason and, with `echo`, the log-probability of the prompt's first token.
    """
    for choice in document["choices"]:
        if is_event:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        elif choice["logprobs"] and choice["logprobs"]["token_logprobs"][0] is None:
            assert choice["logprobs"]["top_logprobs"][0] is None
            choice["logprobs"]["token_logprobs"][0], choice["logprobs"]["top_logprobs"][0] = 0.0, {}
    return document


def prepare_embeddings(document: dict[str, Any], is_event: bool) -> dict[str, Any]:
    """Replace base64, which the client asks for and decodes: the type allows numbers only."""
    for data in document["data"]:
        if isinstance(data["embedding"], str):
            data["embedding"] = [0.0]
    return document


class ModelList(BaseModel):
    """Body of /v1/models."""

    object: typing.Literal["list"]
    data: list[Model]


class Deleted(BaseModel):
    """Body of a deleted response. The client has no type for it."""

    id: str
    object: str
    deleted: typing.Literal[True]


EVENTS = {
    typing.get_args(model.model_fields["type"].annotation)[0]: model
    for model in typing.get_args(typing.get_args(ResponseStreamEvent)[0])
}
ROUTES = [
    Route("GET", "/v1/models", ModelList),
    Route("GET", "/v1/models/.*", Model),
    Route("POST", "/v1/completions", Completion, lambda _: Completion, prepare_completion),
    Route("POST", "/v1/chat/completions", ChatCompletion, lambda _: ChatCompletionChunk),
    Route("POST", "/v1/embeddings", CreateEmbeddingResponse, None, prepare_embeddings),
    Route("POST", "/v1/responses", Response, lambda event: EVENTS[event["type"]]),
    Route("POST", "/v1/responses/[^/]+/cancel", Response),
    Route("GET", "/v1/responses/[^/]+", Response),
    Route("DELETE", "/v1/responses/[^/]+", Deleted),
    Route("GET", "/v1/responses/[^/]+/input_items", ResponseItemList),
]
KNOWN_EXTRAS = {
    *(f"Model.{name}" for name in ("max_model_len", "root", "parent", "permission")),
    *(f"{choice}.stop_reason" for choice in ("CompletionChoice", "Choice")),
    *(f"{answer}.prompt_logprobs" for answer in ("CompletionChoice", "ChatCompletion")),
    *(f"CreateEmbeddingResponse.{name}" for name in ("id", "created")),
    "Usage.completion_tokens",
}


class Tour(StrictChecks):
    """The checks and the clients."""

    def __init__(self) -> None:
        super().__init__(ROUTES, Error, KNOWN_EXTRAS)
        self.options: Any = {"base_url": f"{BASE}/v1", "api_key": "none", "max_retries": 0, "timeout": 60}
        recorded = openai.DefaultHttpxClient(transport=Recorder(self.answers))
        self.client = openai.OpenAI(**self.options, http_client=recorded)
        self.embedder = openai.OpenAI(**self.options | {"base_url": f"{EMBEDDING_BASE}/v1"}, http_client=recorded)


def call_of(message: Any) -> dict[str, Any]:
    """Arguments of the only tool call of a message, checked against the schema."""
    (call,) = message.tool_calls
    assert call.function.name == "weather"
    return valid(call.function.arguments)


def valid(arguments: str) -> dict[str, Any]:
    """Parse arguments of the tool `weather` and check them."""
    parsed = json.loads(arguments)
    assert set(parsed) == {"city", "unit"}, parsed
    assert len(parsed["city"]) <= 12, parsed
    assert parsed["unit"] in ("C", "F"), parsed
    return parsed


def models(tour: Tour) -> None:
    client = tour.client
    with tour.check("models.list"):
        assert [model.id for model in client.models.list()] == [MODEL]
    with tour.check("models.retrieve"):
        assert client.models.retrieve(MODEL).id == MODEL
    with tour.check("models.retrieve: an unknown name is NotFoundError"):
        raises(openai.NotFoundError, "nobody", client.models.retrieve, model="nobody")


def completions(tour: Tour) -> None:
    """/v1/completions."""
    client = tour.client
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = ""
    with tour.check("completions.create"):
        answer = client.completions.create(**asked)
        whole = answer.choices[0].text
        assert whole
        assert answer.usage
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    with tour.check("completions.create: n, seed, logprobs, stop, several prompts, echo"):
        answer = client.completions.create(
            **asked | {"prompt": [PROMPT, "import "], "temperature": 1}, n=2, seed=4, logprobs=3, stop=["zebra"],
            echo=True,
        )  # fmt: skip
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.choices[0].text.startswith(PROMPT)
        assert answer.choices[3].text.startswith("import ")
        assert answer.choices[0].logprobs
    with tour.check("completions.create: stream"):
        stream = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
        assert chunks[-1].usage
    with tour.check("completions.create: logprobs in a stream"):
        assert all(chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True, logprobs=2))
    with tour.check("completions.create: a wrong field is BadRequestError with its name"):
        error = raises(openai.BadRequestError, "n", client.completions.create, **asked, n=65)
        assert error.param == "n"


def chat(tour: Tour) -> None:
    """/v1/chat/completions without tools."""
    client = tour.client
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 24, "temperature": 0}
    whole = None
    with tour.check("chat.completions.create"):
        answer = client.chat.completions.create(**asked)
        whole = answer.choices[0].message.content
        assert whole
        assert answer.choices[0].message.role == "assistant"
    with tour.check("chat.completions.create: content parts, developer message, the answer sent back"):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        first = client.chat.completions.create(**asked | {"messages": [{"role": "user", "content": parts}]})
        history = [*MESSAGES, first.choices[0].message, {"role": "developer", "content": "short"}, MESSAGES[1]]
        client.chat.completions.create(**asked | {"messages": history})
    with tour.check("chat.completions.create: n, seed, logprobs, penalties, logit_bias, metadata, user"):
        answer = client.chat.completions.create(
            **asked | {"temperature": 1}, n=2, seed=2, logprobs=True, top_logprobs=3, frequency_penalty=0.3,
            presence_penalty=0.1, logit_bias={"7": -100}, metadata={"a": "b"}, user="someone", stop=["zebra"],
        )  # fmt: skip
        assert len(answer.choices) == 2
        assert answer.choices[0].logprobs
        assert answer.choices[0].logprobs.content
        assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
    with tour.check("chat.completions.create: stream with usage"):
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
        assert chunks[-1].usage
    with tour.check("chat.completions.stream: events and final completion"):
        # The helper raises an error if max_tokens ends an answer, so a stop string ends this one.
        line = client.chat.completions.create(**asked, stop=["\n"]).choices[0].message.content
        with client.chat.completions.stream(**asked, logprobs=True, stop=["\n"]) as stream:
            kinds = {event.type for event in stream}
            assert stream.get_final_completion().choices[0].message.content == line
        assert {"chunk", "content.delta", "content.done", "logprobs.content.done"} <= kinds, kinds
    with tour.check("chat.completions: with_raw_response and with_streaming_response"):
        raw: Any = client.chat.completions.with_raw_response.create(**asked)
        assert raw.headers["x-request-id"]
        assert raw.parse().choices[0].message.content == whole
        with client.chat.completions.with_streaming_response.create(**asked) as streamed:
            assert json.loads("".join(streamed.iter_text()))["choices"][0]["message"]["content"] == whole
    with tour.check("chat.completions.create: a stream closed early ends its request"):
        endless = client.chat.completions.create(
            **asked | {"max_completion_tokens": 1500}, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(endless))
        endless.close()
        wait_until_idle()
    with tour.check("chat.completions.create: errors have their kind, field and request id"):
        error = raises(
            openai.BadRequestError, "temperature", client.chat.completions.create, **asked | {"temperature": -1}
        )
        assert (error.param, error.type) == ("temperature", "invalid_request_error"), (error.param, error.type)
        assert error.request_id
        raises(openai.NotFoundError, "nobody", client.chat.completions.create, **asked | {"model": "nobody"})


def tools(tour: Tour) -> None:
    """Forced tool calls, custom tools, the older functions, and results sent back."""
    client = tour.client
    asked: Any = {
        "model": MODEL, "messages": MESSAGES, "max_completion_tokens": 120, "temperature": 1, "seed": 3, "tools": TOOLS,
    }  # fmt: skip
    with tour.check("tools: named, and the result sent back"):
        message = client.chat.completions.create(**asked, tool_choice=NAMED).choices[0].message
        call_of(message)
        assert message.tool_calls
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4 C"}
        after = client.chat.completions.create(
            **asked | {"messages": [*MESSAGES, message, result]}, tool_choice="none"
        )
        assert not after.choices[0].message.tool_calls
    with tour.check("tools: required"):
        choice = client.chat.completions.create(
            **asked, tool_choice="required", parallel_tool_calls=False
        ).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls
        assert choice.message.content is None
    with tour.check("tools: auto"):
        assert client.chat.completions.create(**asked, tool_choice="auto").choices[0].finish_reason
    with tour.check("tools: stream equals the whole answer"):
        whole = client.chat.completions.create(**asked, tool_choice=NAMED).choices[0].message
        with client.chat.completions.stream(**asked, tool_choice=NAMED) as stream:
            kinds = {event.type for event in stream}
            streamed = stream.get_final_completion().choices[0].message
        assert call_of(streamed) == call_of(whole)
        assert "tool_calls.function.arguments.done" in kinds, kinds
    with tour.check("tools: allowed_tools"):
        allowed: Any = {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [NAMED]},
        }
        choice = client.chat.completions.create(**asked, tool_choice=allowed, parallel_tool_calls=False).choices[0]
        call_of(choice.message)
    with tour.check("tools: a custom tool with a grammar"):
        grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": r"\d{2}:\d{2}"}}
        custom: Any = {"type": "custom", "custom": {"name": "clock", "format": grammar}}
        named: Any = {"type": "custom", "custom": {"name": "clock"}}
        (call,) = client.chat.completions.create(
            **asked | {"tools": [custom]}, tool_choice=named
        ).choices[0].message.tool_calls or []
        assert call.type == "custom"
        assert len(call.custom.input) == 5
    with tour.check("tools: functions and function_call"):
        older: Any = {key: value for key, value in asked.items() if key != "tools"}
        choice = client.chat.completions.create(
            **older, functions=[TOOLS[0]["function"]], function_call={"name": "weather"}
        ).choices[0]
        assert choice.message.function_call
        valid(choice.message.function_call.arguments)
    with tour.check("tools: parse with a pydantic tool"):
        tool = openai.pydantic_function_tool(Forecast, name="forecast")
        chosen: Any = {"type": "function", "function": {"name": "forecast"}}
        parsed = client.chat.completions.parse(**asked | {"tools": [tool]}, tool_choice=chosen)
        (made,) = parsed.choices[0].message.tool_calls or []
        assert isinstance(made.function.parsed_arguments, Forecast)


def structured(tour: Tour) -> None:
    client = tour.client
    asked: Any = {
        "model": MODEL, "messages": MESSAGES, "max_completion_tokens": 200, "temperature": 1, "seed": 6,
    }  # fmt: skip
    with tour.check("chat.completions.parse: a pydantic model"):
        assert isinstance(
            client.chat.completions.parse(**asked, response_format=Forecast).choices[0].message.parsed, Forecast
        )
    with (
        tour.check("chat.completions.stream: a pydantic model"),
        client.chat.completions.stream(**asked, response_format=Forecast) as stream,
    ):
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Forecast)
    with tour.check("chat.completions.create: json_object"):
        choice = client.chat.completions.create(**asked, response_format={"type": "json_object"}).choices[0]
        assert choice.message.content
        assert choice.message.content.lstrip().startswith("{")
    with tour.check("chat.completions.parse: LengthFinishReasonError when cut off"):
        raises(
            openai.LengthFinishReasonError, "", client.chat.completions.parse,
            **asked | {"max_completion_tokens": 3}, response_format=Forecast,
        )  # fmt: skip


def responses(tour: Tour) -> None:
    """/v1/responses."""
    client = tour.client
    asked: Any = {"model": MODEL, "input": PROMPT, "max_output_tokens": 60, "temperature": 0}
    first: Any = None
    with tour.check("responses.create, retrieve, input_items.list, previous_response_id, delete"):
        first = client.responses.create(**asked, instructions="Write Python.", metadata={"a": "b"})
        assert first.output_text
        assert client.responses.retrieve(first.id) == first
        second = client.responses.create(**asked | {"input": "again"}, previous_response_id=first.id)
        items = list(client.responses.input_items.list(second.id, order="asc"))
        assert [item.type for item in items] == ["message"] * 3
        client.responses.delete(second.id)
        raises(openai.NotFoundError, second.id, client.responses.retrieve, response_id=second.id)
    with tour.check("responses.create: stream"):
        events = list(client.responses.create(**asked, instructions="Write Python.", stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == first.output_text
    with (
        tour.check("responses.stream: helper and final response"),
        client.responses.stream(**asked, instructions="Write Python.") as stream,
    ):
        kinds = {event.type for event in stream}
        assert "response.output_text.done" in kinds, kinds
        if "response.completed" in kinds:  # for an incomplete response the helper raises an error
            assert stream.get_final_response().output_text == first.output_text
    with tour.check("responses.create: items as input, logprobs, store false"):
        parts = [{"type": "input_text", "text": "x"}]
        items = [{"role": "developer", "content": "short"}, {"role": "user", "content": parts}]
        made = client.responses.create(
            **asked | {"input": items}, include=["message.output_text.logprobs"], top_logprobs=2, store=False
        )
        message: Any = made.output[-1]
        assert len(message.content[0].logprobs[0].top_logprobs) == 2
    with tour.check("responses.create: background, poll, cancel"):
        running = client.responses.create(
            **asked | {"max_output_tokens": 1500}, background=True, extra_body={"ignore_eos": True}
        )
        assert running.status in ("queued", "in_progress")
        while client.responses.retrieve(running.id).status == "queued":
            time.sleep(0.05)
        assert client.responses.cancel(running.id).status == "cancelled"
        assert client.responses.retrieve(running.id).status == "cancelled"
        wait_until_idle()
    with tour.check("responses.create: background to its end"):
        running = client.responses.create(**asked, instructions="Write Python.", background=True)
        while (now := client.responses.retrieve(running.id)).status in ("queued", "in_progress"):
            time.sleep(0.05)
        assert now.output_text == first.output_text
    named: Any = {"type": "function", "name": "weather"}
    calls: Any = asked | {
        "max_output_tokens": 200, "temperature": 1, "tools": RESPONSE_TOOLS, "tool_choice": named,
        "extra_body": {"seed": 3},
    }  # fmt: skip
    with tour.check("responses.create: a named function, and its output sent back"):
        made = client.responses.create(**calls)
        call: Any = made.output[-1]
        valid(call.arguments)
        output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "4 C"}]
        after = client.responses.create(
            **calls | {"input": output, "tool_choice": "none"}, previous_response_id=made.id
        )
        assert after.output_text
    with tour.check("responses.stream: a named function"):
        with client.responses.stream(**calls) as stream:
            kinds = {event.type for event in stream}
            final: Any = stream.get_final_response()
        assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
        valid(final.output[-1].arguments)
    wide: Any = asked | {"max_output_tokens": 300, "temperature": 1, "extra_body": {"seed": 6}}
    with tour.check("responses.parse: a pydantic model"):
        assert isinstance(client.responses.parse(**wide, text_format=Forecast).output_parsed, Forecast)
    with (
        tour.check("responses.stream: a pydantic model"),
        client.responses.stream(**wide, text_format=Forecast) as stream,
    ):
        assert isinstance(stream.get_final_response().output_parsed, Forecast)
    with tour.check("responses.create: errors"):
        error = raises(openai.BadRequestError, "image", client.responses.create, **asked | {
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}]
        })  # fmt: skip
        assert error.param
        raises(openai.NotFoundError, "resp_none", client.responses.retrieve, response_id="resp_none")


def embeddings(tour: Tour) -> None:
    """/v1/embeddings on the server of the pooling model."""
    client = tour.embedder
    with tour.check("embeddings.create: base64 (the default) equals float"):
        plain = client.embeddings.create(model=MODEL, input=[PROMPT, "x"], encoding_format="float")
        coded = client.embeddings.create(model=MODEL, input=[PROMPT, "x"])
        assert [len(data.embedding) for data in plain.data] == [256, 256]
        for one, other in zip(plain.data, coded.data, strict=True):
            assert max(abs(a - b) for a, b in zip(one.embedding, other.embedding, strict=True)) < 1e-6
            assert abs(sum(value * value for value in one.embedding) - 1) < 1e-3
    with tour.check("embeddings.create: token ids"):
        assert client.embeddings.create(model=MODEL, input=[[1, 2, 3]]).usage.prompt_tokens == 3
    with tour.check("embeddings.create: an empty list is BadRequestError"):
        assert raises(openai.BadRequestError, "empty", client.embeddings.create, model=MODEL, input=[]).param == "input"


async def asyncio_tour(tour: Tour) -> None:
    """The main routes with the asyncio client, and requests at the same time."""
    recorded = openai.DefaultAsyncHttpxClient(transport=AsyncRecorder(tour.answers))
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 24, "temperature": 0}
    async with openai.AsyncOpenAI(**tour.options, http_client=recorded) as client:
        with tour.check("async: models.list"):
            assert [model.id async for model in client.models.list()] == [MODEL]
        with tour.check("async: completions, whole and streamed"):
            answer = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0)
            stream = await client.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0, stream=True
            )
            assert "".join([chunk.choices[0].text async for chunk in stream]) == answer.choices[0].text
        with tour.check("async: 12 chats at once give what one gives"):
            answers = await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(12)))
            assert len({answer.choices[0].message.content for answer in answers}) == 1
        with tour.check("async: chat.completions.stream"):
            async with client.chat.completions.stream(**asked, stop=["\n"]) as stream:
                async for _ in stream:
                    pass
                assert (await stream.get_final_completion()).choices[0].message.content
        with tour.check("async: a cancelled task ends its request"):
            task = asyncio.create_task(
                client.chat.completions.create(
                    **asked | {"max_completion_tokens": 1500}, extra_body={"ignore_eos": True}
                )
            )
            await asyncio.sleep(0.5)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(wait_until_idle)
            assert await client.models.retrieve(MODEL)
        with tour.check("async: tools and parse"):
            forced = asked | {"max_completion_tokens": 200, "temperature": 1, "seed": 3}
            call_of((await client.chat.completions.create(**forced, tools=TOOLS, tool_choice=NAMED)).choices[0].message)
            parsed = await client.chat.completions.parse(**forced, response_format=Forecast)
            assert isinstance(parsed.choices[0].message.parsed, Forecast)
        with tour.check("async: responses.create, stream, retrieve, background and cancel"):
            wanted: Any = {"model": MODEL, "input": PROMPT, "max_output_tokens": 30, "temperature": 0}
            made = await client.responses.create(**wanted)
            events = [event async for event in await client.responses.create(**wanted, stream=True)]
            assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == made.output_text
            assert (await client.responses.retrieve(made.id)).output_text == made.output_text
            running = await client.responses.create(
                **wanted | {"max_output_tokens": 1500}, background=True, extra_body={"ignore_eos": True}
            )
            assert (await client.responses.cancel(running.id)).status == "cancelled"
    options = tour.options | {"base_url": f"{EMBEDDING_BASE}/v1"}
    recorded = openai.DefaultAsyncHttpxClient(transport=AsyncRecorder(tour.answers))
    async with openai.AsyncOpenAI(**options, http_client=recorded) as client:
        with tour.check("async: embeddings.create"):
            assert len((await client.embeddings.create(model=MODEL, input="x")).data[0].embedding) == 256


def main() -> None:
    tour = Tour()
    for part in (models, completions, chat, tools, structured, responses, embeddings):
        part(tour)
    asyncio.run(asyncio_tour(tour))
    tour.write()


if __name__ == "__main__":
    main()
