"""/v1/responses with the official client: every body and event is validated strictly against the client's types."""

import asyncio
import json
import socket
import typing

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent

from jpaged.chat.turn import ChatFormats
from jpaged.serving.application import create_app
from jpaged.serving.responses import routes as routes_responses
from jpaged.serving.server_state import Server
from jpaged.serving.web.auth import RequireKey
from tests.serving.http_client import post, strict, until_stopped, wait_for
from tests.serving.request_bodies import request_bytes
from tests.serving.tool_definitions import TEMPLATES

EVENTS = {
    typing.get_args(model.model_fields["type"].annotation)[0]: model
    for model in typing.get_args(typing.get_args(ResponseStreamEvent)[0])
}
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}}
TOOLS = [{"type": "function", "name": name, "parameters": PARAMETERS, "strict": True} for name in ("find", "sum")]
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "a"}}\n</tool_call>'
FIND = {"type": "function", "name": "find"}


@pytest.fixture
def formats() -> ChatFormats:
    return ChatFormats.named(reasoning_parser="qwen3")


@pytest.fixture
def url(engine, formats, host):
    engine.step_seconds = 0
    engine.tokenizer.chat_template = TEMPLATES["hermes"]
    host[0].app = create_app(Server(engine=engine, model_names=("echo",), chat=formats))
    return host[1]


def create(url: str, **body) -> Response:
    response = post(url, "/v1/responses", {"model": "echo", "input": "hi"} | body)
    assert response.status_code == 200, response.text
    return strict(Response, response.text)


def stream(url: str, **body) -> list:
    """Return the events of a stream. Each has its name, and the numbers have no gaps."""
    return events_of(post(url, "/v1/responses", {"model": "echo", "input": "hi", "stream": True} | body))


def events_of(response: httpx.Response, first: int = 0) -> list:
    """Return the events of a response. first: the number of the first one."""
    assert response.status_code == 200, response.text
    made = []
    for number, block in enumerate(response.text.split("\n\n")[:-1], first):
        name, data = block.split("\n")
        event = strict(EVENTS[json.loads(data[6:])["type"]], data[6:])
        assert name == f"event: {event.type}"
        assert event.sequence_number == number
        made.append(event)
    return made


def refused(url: str, param: str, status: int = 400, **body) -> str:
    response = post(url, "/v1/responses", {"model": "echo", "input": "hi"} | body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    return error["message"]


def test_text(url, engine, client):
    engine.says = "Hello."
    made = create(
        url, instructions="Be short.", metadata={"a": "b"}, user="u", temperature=0.5, max_output_tokens=50, seed=3
    )
    assert made.output_text == "Hello."
    assert (made.status, made.instructions, made.metadata) == ("completed", "Be short.", {"a": "b"})
    assert made.temperature == 0.5
    assert made.usage.output_tokens == 6
    assert made.usage.input_tokens_details.cached_tokens == 2
    assert engine.seen_params[0].seed == 3
    roles = [(one["role"], one["content"]) for one in engine.tokenizer.seen_messages]
    assert roles == [("system", "Be short."), ("user", "hi")]
    assert client.responses.create(model="echo", input="hi").output_text == "Hello."


def test_the_order_of_events(url, engine):
    engine.says = f"<think>\nWell.\n</think>\n\nHi{CALL}"
    events = stream(url, tools=TOOLS)
    names = [event.type.removeprefix("response.") for event in events]
    short = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    assert short == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert events[0].response.status == "in_progress"
    final = events[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert (final.output[1].content[0].text, final.output[2].name) == ("Hi", "find")
    assert json.loads(final.output[2].arguments) == {"q": "a"}
    assert [event.item for event in events if event.type == "response.output_item.done"] == final.output
    assert final.usage.output_tokens_details.reasoning_tokens > 0
    for i, item in enumerate(final.output):
        deltas = [event.delta for event in events if event.type.endswith(".delta") and event.output_index == i]
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(deltas) == text
    whole = create(url, tools=TOOLS)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    without = create(url, tools=TOOLS, include_reasoning=False)
    assert [item.type for item in without.output] == ["message", "function_call"]


def test_the_clients_stream_helper(client, engine):
    engine.says = "Hello."
    with client.responses.stream(model="echo", input="hi") as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        assert texts[-1] == "Hello."
        assert stream.get_final_response().output_text == "Hello."


def test_incomplete_and_empty(url, engine):
    engine.says = "Hello."
    *_, last = stream(url, max_output_tokens=2)
    assert (last.type, last.response.incomplete_details.reason) == ("response.incomplete", "max_output_tokens")
    assert last.response.output[0].status == "incomplete"
    assert create(url, max_output_tokens=2).status == "incomplete"


def test_logprobs(url, engine):
    engine.says = "<think>a</think>Hi."
    made = create(url, top_logprobs=2)
    assert len(made.output) == 2
    events = stream(url, include=["message.output_text.logprobs"], top_logprobs=2)
    for output in (made.output, events[-1].response.output):
        tokens = output[-1].content[0].logprobs
        assert "".join(token.token for token in tokens) == "Hi."
        assert [len(token.top_logprobs) for token in tokens] == [2, 2, 2]
    seen = [one.token for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert seen == list("Hi.")
    assert create(url).output[-1].content[0].logprobs == []


@pytest.mark.parametrize(("choice", "offered", "forced"), [
    ("none", [], False), ("required", ["find", "sum"], True), (FIND, ["find", "sum"], True),
    ({"type": "allowed_tools", "mode": "auto", "tools": [FIND]}, ["find"], False),
    ({"type": "allowed_tools", "mode": "required", "tools": [FIND]}, ["find"], True),
])  # fmt: skip
def test_tool_choice(url, engine, choice, offered, forced):
    engine.says = CALL
    made = create(url, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    tools = engine.tokenizer.seen_options.get("tools") or []
    assert [tool["function"]["name"] for tool in tools] == offered
    assert (engine.seen_params[-1].structured_outputs is not None) == forced
    assert [tool.name for tool in made.tools] == ["find", "sum"]


def test_structured_output(url, engine, client):
    engine.says = "{}"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    assert create(url, text=text).text.format.schema_ == schema
    assert engine.seen_params[-1].structured_outputs.json == json.dumps(schema, separators=(",", ":"))
    create(url, text={"format": {"type": "json_object"}})
    assert engine.seen_params[-1].structured_outputs.json_object
    assert "1 to 64" in refused(url, "text.format.name", text={"format": {"type": "json_schema", "schema": schema}})
    refused(url, "text.format.extra", text={"format": text["format"] | {"extra": 1}})
    refused(url, "text.format.type", text={"format": {"type": "xml"}})


def test_a_conversation_by_items_and_by_id(url, engine, client):
    engine.says = f"<think>\nHm.\n</think>\n\n{CALL}"
    first = create(url, input=[{"role": "user", "content": [{"type": "input_text", "text": "find a"}]}], tools=TOOLS)
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
    engine.says = "Done."
    create(url, input=[{"role": "user", "content": "find a"}, *(
        item.model_dump(exclude_none=True) for item in first.output), result], tools=TOOLS)  # fmt: skip
    by_items = engine.tokenizer.seen_messages
    second = create(url, input=[result], previous_response_id=first.id, tools=TOOLS)
    assert engine.tokenizer.seen_messages == by_items
    assert [message["role"] for message in by_items] == ["user", "assistant", "tool"]
    assert by_items[1]["reasoning_content"] == "Hm."
    assert by_items[1]["tool_calls"][0]["function"]["name"] == "find"
    third = create(url, input="thanks", previous_response_id=second.id, instructions="New.", tools=TOOLS)
    roles = [message["role"] for message in engine.tokenizer.seen_messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]
    page = httpx.get(f"{url}/v1/responses/{third.id}/input_items?order=asc&limit=3").text
    listed = strict(ResponseItemList, page)
    assert ([item.type for item in listed.data], listed.has_more) == (["message", "reasoning", "function_call"], True)
    items = list(client.responses.input_items.list(third.id, limit=2))
    kinds = ["message", "message", "function_call_output", "function_call", "reasoning", "message"]
    assert [item.type for item in items] == kinds
    assert items[0].content[0].text == "thanks"
    for query, name in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")):
        answer = httpx.get(f"{url}/v1/responses/{third.id}/input_items?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_unknown_fields_of_items_are_ignored(url, engine):
    engine.says = "Hi."
    part = {"type": "output_text", "text": "b", "parsed": {"a": 1}, "extra": None}
    create(url, input=[
        {"role": "user", "content": [{"type": "input_text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"type": "message", "role": "assistant", "content": [part], "provider_data": {"model": "m"}},
        {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}", "parsed_arguments": {}},
        {"type": "function_call_output", "call_id": "c", "output": "x", "name": "find"},
    ])  # fmt: skip
    assert [message["content"] for message in engine.tokenizer.seen_messages] == ["a", "b", "x"]


def test_truncation_drops_the_oldest_turns(url, engine):
    turns = [message for i in range(8) for message in (
        {"role": "user", "content": f"{i}" * 100}, {"role": "assistant", "content": "x"})]  # fmt: skip
    engine.max_model_len, engine.says = 500, "Hi."
    items = [{"role": "system", "content": "s"}, *turns, {"role": "user", "content": "last"}]
    assert "at most" in refused(url, "input", input=items)
    made = create(url, input=items, truncation="auto", max_output_tokens=20)
    kept = "".join(message["content"][0] for message in engine.tokenizer.seen_messages)
    assert kept == "s5x6x7xl"
    assert made.truncation == "auto"
    assert len(engine.seen_prompts[-1]) <= 480
    refused(url, "input", input="y" * 600, truncation="auto")


def test_stored_responses(url, engine, client):
    engine.says = "Hello."
    made = create(url)
    assert strict(Response, httpx.get(f"{url}/v1/responses/{made.id}").text) == made
    streamed = stream(url)[-1].response
    assert client.responses.retrieve(streamed.id).output_text == "Hello."
    client.responses.delete(made.id)
    unstored = create(url, store=False)
    for gone in (made.id, unstored.id, "resp_x"):
        with pytest.raises(openai.NotFoundError, match="no such response"):
            client.responses.retrieve(gone)
    assert refused(url, "previous_response_id", 404, previous_response_id=made.id)
    answer = httpx.get(f"{url}/v1/responses/{streamed.id}?stream=true")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
    with pytest.raises(openai.BadRequestError, match="background=true"):
        client.responses.cancel(streamed.id)


def test_background(url, engine, client):
    engine.says, engine.step_seconds = "Hello.", 0.001
    made = create(url, background=True)
    assert (made.status, made.output) == ("queued", [])
    wait_for(lambda: client.responses.retrieve(made.id).status == "completed")
    assert client.responses.retrieve(made.id).output_text == "Hello."
    assert client.responses.cancel(made.id).status == "completed"
    engine.says, engine.step_seconds = "Hello." * 100, 0.05  # 30 s: a busy machine cancels it in time
    running = create(url, background=True)  # the connection of the request is closed
    wait_for(lambda: engine.steps.get(f"{running.id}-0", 0) >= 1)
    assert "in_progress" in refused(url, "previous_response_id", previous_response_id=running.id)
    assert client.responses.retrieve(running.id).status == "in_progress"
    cancelled = strict(Response, httpx.post(f"{url}/v1/responses/{running.id}/cancel").text)
    assert cancelled.status == "cancelled"
    assert cancelled.output[0].status == "incomplete"
    assert engine.says.startswith(cancelled.output_text)
    assert cancelled.output_text
    assert not engine.running
    deleted = create(url, background=True)
    client.responses.delete(deleted.id)
    wait_for(lambda: not engine.running)


def test_the_stream_of_a_response_in_the_background(url, engine):
    """It goes on without its connection, and can be read again from any event on."""
    engine.says, engine.step_seconds = "Hello.", 0.02
    with httpx.stream("POST", f"{url}/v1/responses", json={"input": "hi", "stream": True, "background": True}) as left:
        lines = left.iter_lines()
        first = next(lines)
        made = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
    assert first == "event: response.created"
    running = events_of(httpx.get(f"{url}/v1/responses/{made}?stream=true"))
    assert [event.type.removeprefix("response.") for event in running[:3]] == ["created", "queued", "in_progress"]
    assert (running[-1].type, running[-1].response.output_text) == ("response.completed", "Hello.")
    again = events_of(httpx.get(f"{url}/v1/responses/{made}?stream=true&starting_after=3"), 4)
    assert again == running[4:]
    last = running[-1].sequence_number
    assert httpx.get(f"{url}/v1/responses/{made}?stream=true&starting_after={last}").text == ""
    for query, name in (("starting_after=1", "starting_after"), ("stream=true&starting_after=-1", "starting_after"),
                        ("stream=1", "stream")):  # fmt: skip
        answer = httpx.get(f"{url}/v1/responses/{made}?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    engine.says = "Hello." * 100
    cancelled = create(url, background=True).id
    with httpx.stream("GET", f"{url}/v1/responses/{cancelled}?stream=true") as running:
        lines = running.iter_lines()
        next(lines)
        httpx.post(f"{url}/v1/responses/{cancelled}/cancel")
        list(lines)  # the stream ends


def test_input_tokens(url, engine, client):
    engine.says = "Hello."
    made = create(url, instructions="Be short.")
    counted = client.responses.input_tokens.count(model="echo", input="hi", instructions="Be short.")
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", made.usage.input_tokens)
    longer = client.responses.input_tokens.count(input="x" * 5000, previous_response_id=made.id)
    assert longer.input_tokens > 5000 > engine.max_model_len
    assert post(url, "/v1/responses/input_tokens", {"input": []}).json()["error"]["param"] == "input"


def test_a_full_queue_refuses_a_response_in_the_background_at_once(url, engine, host):
    engine.says, engine.full = "Hello.", True
    refused = post(url, "/v1/responses", {"input": "hi", "background": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_full")
    assert refused.headers["retry-after"] == "7"
    assert not host[0].app.state.responses.num_responses
    engine.full = False
    assert create(url, background=True).status == "queued"


def test_a_response_in_the_background_does_not_wait_long_for_the_queue(url, engine, monkeypatch):
    """A grammar, or programs, may take longer. Then an error is in the response."""
    monkeypatch.setattr(routes_responses, "ADMITTED_SECONDS", 0.02)
    generate = engine.generate

    async def late(*args, **options):
        await asyncio.sleep(0.2)
        async for output in generate(*args, **options):
            yield output

    engine.generate, engine.says, engine.full = late, "Hello.", True
    made = create(url, background=True)
    assert made.status == "queued"
    wait_for(lambda: httpx.get(f"{url}/v1/responses/{made.id}").json()["status"] == "failed")
    assert httpx.get(f"{url}/v1/responses/{made.id}").json()["error"]["code"] == "rate_limit_exceeded"


def test_failures(url, engine):
    engine.says, engine.fails_at = "Hello.", 3
    events = stream(url)
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    assert (events[-1].response.output_text, events[-1].response.output[0].status) == ("Hel", "incomplete")
    assert "secret" not in events[-1].to_json()
    assert post(url, "/v1/responses", {"input": "hi"}).status_code == 500
    made = create(url, background=True)
    wait_for(lambda: httpx.get(f"{url}/v1/responses/{made.id}").json()["status"] == "failed")
    engine.fails_at = 0
    assert post(url, "/v1/responses", {"input": "hi", "stream": True}).status_code == 500


def test_the_stopping_server_ends_a_stream_with_its_typed_event(engine, formats):
    engine.says = "Hello."
    app = create_app(Server(engine=engine, model_names=("echo",), chat=formats))
    sent = until_stopped(app, "/v1/responses", {"input": "hi", "stream": True}, 4)
    events = b"".join(message["body"] for message in sent[1:]).decode().split("\n\n")
    name, data = events[-2].split("\n")
    event = strict(EVENTS["response.failed"], data.removeprefix("data: "))
    assert (name, event.sequence_number) == ("event: response.failed", len(events) - 2)
    assert "the server is stopping" in event.response.error.message
    assert event.response.output[0].status == "incomplete"
    assert event.response.output_text
    store = app.state.responses
    assert json.loads(store.get(b"", event.response.id).response)["status"] == "failed"


def test_the_stopping_server_ends_the_stream_of_a_response_in_the_background(engine, formats):
    engine.says, engine.step_seconds = "Hello.", 0.05
    app = create_app(Server(engine=engine, model_names=("echo",), chat=formats))
    sent = until_stopped(app, "/v1/responses", {"input": "hi", "stream": True, "background": True}, 2)
    name, data = sent[-1]["body"].decode().strip().split("\n")
    event = strict(EVENTS["error"], data.removeprefix("data: "))
    assert (name, event.code) == ("event: error", "stopping")
    assert event.sequence_number == len(sent) - 2


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_aborts_its_request(url, engine, streamed):
    engine.step_seconds = 0.1
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as raw:
        raw.sendall(request_bytes("/v1/responses", {"input": "never ends", "stream": streamed}))
        wait_for(lambda: engine.steps)
    wait_for(lambda: not engine.running)
    assert max(engine.steps.values()) <= 4


def test_a_response_belongs_to_its_key(engine, formats, host):
    engine.says, engine.step_seconds = "Hi.", 0
    app = create_app(Server(engine=engine, model_names=("echo",), chat=formats))
    host[0].app = RequireKey(app, keys=["one", "two"], guards=lambda path: True, name="API key")
    url, first, second = host[1], {"Authorization": "Bearer one"}, {"x-api-key": "two"}
    made = httpx.post(f"{url}/v1/responses", json={"input": "hi"}, headers=first).json()["id"]
    assert httpx.get(f"{url}/v1/responses/{made}", headers=first).status_code == 200
    for headers, status in ((second, 404), ({}, 401), ({"x-api-key": "three"}, 401)):
        assert httpx.get(f"{url}/v1/responses/{made}", headers=headers).status_code == status
        assert httpx.delete(f"{url}/v1/responses/{made}", headers=headers).status_code == status
    chained = httpx.post(f"{url}/v1/responses", json={"input": "hi", "previous_response_id": made}, headers=second)
    assert chained.status_code == 404


@pytest.mark.parametrize(("param", "body"), [
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[1].type", {"tools": [TOOLS[0], {"type": "file_search", "vector_store_ids": ["v"]}]}),
    ("tools[0].type", {"tools": [{"type": "computer_use_preview"}]}),
    ("tools[0].name", {"tools": [{"type": "function", "name": "a b", "parameters": PARAMETERS}]}),
    ("tools[0].defer_loading", {"tools": [TOOLS[0] | {"defer_loading": True}]}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "web_search_preview"}}),
    ("tool_choice.name", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}),
    ("input", {"input": []}),
    ("input[0].type", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("input[0].content[0].type", {"input": [
        {"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}),
    ("input[0].encrypted_content", {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}),
    ("input[1].call_id", {"input": [
        {"role": "user", "content": "a"}, {"type": "function_call_output", "output": "x"}]}),
    ("include[0]", {"include": ["file_search_call.results"]}),
    ("store", {"store": False, "background": True}),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": True}}),
    ("n", {"n": 2}), ("max_tokens", {"max_tokens": 5}), ("request_id", {"request_id": "mine"}),
    ("top_logprobs", {"top_logprobs": 21}), ("max_output_tokens", {"max_output_tokens": 0}),
    ("temperature", {"temperature": -1}), ("prompt", {"prompt": {"id": "p"}}), ("conversation", {"conversation": "c"}),
    ("reasoning.effort", {"reasoning": {"effort": "most"}}),
    ("reasoning.summary", {"reasoning": {"summary": "concise"}}),
])  # fmt: skip
def test_refused_by_name(url, param, body):
    refused(url, param, **body)


def test_reasoning_effort(url, engine):
    engine.says = "Hi."
    create(url, reasoning={"effort": "none", "summary": "auto"})
    assert engine.tokenizer.seen_options["enable_thinking"] is False


def test_a_large_body_is_checked_in_the_child(url, engine):
    engine.says, engine.max_model_len = "Hi.", 2**20
    create(url, input=[{"role": "user", "content": "y" * 300_000}])
    refused(url, "input[0].type", input=[{"type": "web_search_call", "id": "y" * 300_000}])
    refused(url, "temperature", input="y" * 300_000, temperature="hot")


@pytest.mark.parametrize("formats", [ChatFormats()])
def test_an_answer_in_harmony(url, engine):
    """Analysis is a reasoning item, commentary a message, and a call is a call. Streamed items are the same."""
    engine.tokenizer.chat_template = TEMPLATES["openai"]
    engine.says = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I shall look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"q": "a"}'
    )
    made = create(url, tools=TOOLS)
    last = stream(url, tools=TOOLS)[-1].response
    for response in (made, last):
        reasoning, message, call = response.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm.")
        assert (message.type, message.content[0].text) == ("message", "I shall look.")
        assert (call.type, call.name, call.arguments) == ("function_call", "find", '{"q": "a"}')
    engine.says = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>final"
    for response in (create(url, top_logprobs=1), stream(url, top_logprobs=1)[-1].response):
        assert "".join(token.token for token in response.output[-1].content[0].logprobs) == "final"
    for hosted in ("web_search", "code_interpreter"):
        assert hosted in refused(url, "tools[0].type", tools=[{"type": hosted}])
