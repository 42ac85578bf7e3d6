"""/v1/messages: the exact frames of Anthropic's API, and its official client if it is installed."""

import json
import socket
from typing import Any

import httpx
import pytest

from jpaged.chat.turn import ChatFormats
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from jpaged.serving.web.auth import RequireKey
from tests.serving.http_client import post, strict, until_stopped, wait_for
from tests.serving.request_bodies import request_bytes
from tests.serving.tool_definitions import TEMPLATES

SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
TOOLS = [{"name": name, "description": "d", "input_schema": SCHEMA} for name in ("find", "sum")]
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "a"}}\n</tool_call>'
ASK: dict[str, Any] = {"model": "echo", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def url(engine, host):
    engine.step_seconds = 0
    engine.tokenizer.chat_template = TEMPLATES["hermes"]
    formats = ChatFormats.named(reasoning_parser="qwen3")
    host[0].app = create_app(Server(engine=engine, model_names=("echo",), chat=formats))
    return host[1]


def test_models_in_anthropics_shape(engine, host):
    """`models.list` of the official client goes through all pages; a client of OpenAI's API gets that shape."""
    anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed: pip install anthropic")
    host[0].app = create_app(Server(engine=engine, model_names=("a", "b/c", "d"), created=1_750_000_000))
    url = host[1]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        first = client.models.list(limit=2)
        assert ([one.id for one in first.data], first.has_more, first.last_id) == (["a", "b/c"], True, "b/c")
        assert [one.id for one in client.models.list(limit=1)] == ["a", "b/c", "d"]
        assert [one.id for one in client.models.list(before_id="d", limit=1).data] == ["b/c"]
        one = client.models.retrieve("b/c")
        assert one == first.data[1]
        assert (one.type, one.display_name, one.created_at.isoformat()) == ("model", "b/c", "2025-06-15T15:06:40+00:00")
        assert one.max_input_tokens == engine.max_model_len - 1
        with pytest.raises(anthropic.NotFoundError) as raised:
            client.models.retrieve("other")
        assert raised.value.body["error"]["type"] == "not_found_error"
        for query, name in (({"limit": 0}, "limit"), ({"after_id": "x"}, "after_id")):
            with pytest.raises(anthropic.BadRequestError, match=name):
                client.models.list(**query)
    assert httpx.get(f"{url}/v1/models").json()["object"] == "list"
    assert httpx.get(f"{url}/v1/models/other").json()["error"]["code"] == "model_not_found"


@pytest.fixture
def anthropic_client(url):
    anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed: pip install anthropic")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def create(url: str, **body) -> dict[str, Any]:
    response = post(url, "/v1/messages", ASK | body)
    assert response.status_code == 200, response.text
    made = response.json()
    usage = made["usage"]
    assert made.keys() == {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
    assert usage.keys() == {
        "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens",
    }  # fmt: skip
    return made


def frames(url: str, **body) -> list[dict[str, Any]]:
    response = post(url, "/v1/messages", ASK | {"stream": True} | body)
    assert response.headers["content-type"].startswith("text/event-stream")
    made = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        made.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {made[-1]['type']}"
    return made


def refused(url: str, said: str, **body) -> str:
    response = post(url, "/v1/messages", ASK | body)
    assert response.status_code == 400, response.text
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert said in error["error"]["message"]


def test_the_frames_of_a_stream(url, engine):
    engine.says = f"<think>\nW\n</think>\n\nHi{CALL}"
    first, *others = frames(url, tools=TOOLS)
    message = first["message"]
    assert first == {"type": "message_start", "message": message}
    assert message == {
        "id": message["id"], "type": "message", "role": "assistant", "model": "echo", "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": message["usage"],
    }  # fmt: skip
    text = "".join(frame["delta"]["partial_json"] for frame in others if frame.get("delta", {}).get("partial_json"))
    assert json.loads(text) == {"q": "a"}
    usage = message["usage"] | {"output_tokens": len(engine.says)}
    call_id = next(one["content_block"]["id"] for one in others if one.get("content_block", {}).get("id"))

    def start(index: int, **block: Any) -> dict[str, Any]:
        return {"type": "content_block_start", "index": index, "content_block": block}

    def delta(index: int, kind: str, **new: Any) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **new}}

    assert [one for one in others if one.get("delta", {}).get("type") != "input_json_delta"] == [
        {"type": "ping"},
        start(0, type="thinking", thinking="", signature=""),
        delta(0, "thinking_delta", thinking="W"),
        delta(0, "signature_delta", signature=""),
        {"type": "content_block_stop", "index": 0},
        start(1, type="text", text=""),
        delta(1, "text_delta", text="H"),
        delta(1, "text_delta", text="i"),
        {"type": "content_block_stop", "index": 1},
        start(2, type="tool_use", id=call_id, name="find", input={}),
        {"type": "content_block_stop", "index": 2},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": usage},
        {"type": "message_stop"},
    ]


def test_a_whole_message(url, engine):
    engine.says = f"<think>\nW\n</think>\n\nHi{CALL}"
    made = create(url, tools=TOOLS, system="Be short.", temperature=0.5, top_k=5, top_p=0.9, metadata={"user_id": "u"})
    thinking, text, call = made["content"]
    assert thinking == {"type": "thinking", "thinking": "W", "signature": ""}
    assert text == {"type": "text", "text": "Hi"}
    assert call == {"type": "tool_use", "id": call["id"], "name": "find", "input": {"q": "a"}}
    assert (made["stop_reason"], made["stop_sequence"]) == ("tool_use", None)
    assert made["usage"]["cache_read_input_tokens"] == 2
    assert made["usage"]["input_tokens"] == len(engine.seen_prompts[-1]) - 2
    params = engine.seen_params[-1]
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 5, 0.9, 100)
    roles = [(one["role"], one["content"]) for one in engine.tokenizer.seen_messages]
    assert roles == [("system", "Be short."), ("user", "hi")]


def test_stop_reasons(url, engine):
    engine.says = "Hello."
    assert create(url)["stop_reason"] == "end_turn"
    assert create(url, max_tokens=2)["stop_reason"] == "max_tokens"
    create(url, stop_sequences=["lo", "x"])
    assert list(engine.seen_params[-1].stop) == ["lo", "x"]
    plain = engine.generate

    async def stopped(*args: Any, **options: Any):
        async for output in plain(*args, **options):
            for one in output.outputs:
                one.stop_reason = "lo" if one.finish_reason == "stop" else None
            yield output

    engine.generate = stopped
    made = create(url, stop_sequences=["lo"])
    assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", "lo")
    assert frames(url)[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "lo"}


def test_a_conversation_of_blocks(url, engine):
    engine.says = "Done."
    create(url, tools=TOOLS, system=[{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}], messages=[
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "x"}, {"type": "thinking", "thinking": "T", "signature": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "call_1", "name": "find", "input": {"q": "a"}},
            {"type": "tool_use", "id": "call_2", "name": "sum", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "found"}]},
            {"type": "tool_result", "tool_use_id": "call_2", "content": "none", "is_error": True},
            {"type": "text", "text": "go on"},
        ]},
    ])  # fmt: skip
    seen = engine.tokenizer.seen_messages
    assert [(one["role"], one.get("content")) for one in seen] == [
        ("system", "S"), ("user", "a\nb"), ("assistant", "I look."), ("tool", "found"), ("tool", "Error: none"),
        ("user", "go on"),
    ]  # fmt: skip
    assert (seen[2]["reasoning_content"], [call["id"] for call in seen[2]["tool_calls"]]) == ("T", ["call_1", "call_2"])
    create(url, messages=[*ASK["messages"], {"role": "assistant", "content": "It is"}])
    assert engine.tokenizer.seen_options["continue_final_message"] is True


@pytest.mark.parametrize(("choice", "offered", "forced"), [
    ({"type": "auto", "disable_parallel_tool_use": True}, 2, False), ({"type": "any"}, 2, True),
    ({"type": "tool", "name": "sum"}, 2, True), ({"type": "none"}, 0, False),
])  # fmt: skip
def test_tool_choice(url, engine, choice, offered, forced):
    engine.says = CALL
    create(url, tools=TOOLS, tool_choice=choice)
    assert len(engine.tokenizer.seen_options.get("tools") or []) == offered
    assert (engine.seen_params[-1].structured_outputs is not None) == forced


def test_thinking(url, engine, host):
    engine.says = "Hi."
    create(url, thinking={"type": "enabled", "budget_tokens": 7})
    assert (engine.seen_params[-1].thinking_token_budget, engine.tokenizer.seen_options["enable_thinking"]) == (7, True)
    create(url, thinking={"type": "disabled"})
    assert engine.tokenizer.seen_options["enable_thinking"] is False
    refused(url, "thinking.budget_tokens", thinking={"type": "enabled"})
    host[0].app = create_app(Server(engine=engine, model_names=("echo",)))
    refused(url, "--reasoning-parser", thinking={"type": "adaptive"})
    create(url, thinking={"type": "disabled"})


def test_structured_output(url, engine):
    engine.says = "{}"
    create(url, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert engine.seen_params[-1].structured_outputs.json == json.dumps(SCHEMA, separators=(",", ":"))
    refused(url, "output_config.format", output_config={"format": {"type": "xml"}})


def test_count_tokens(url, engine):
    def count(**body: Any) -> int:
        response = post(url, "/v1/messages/count_tokens", {"model": "echo", "messages": ASK["messages"]} | body)
        assert response.status_code == 200, response.text
        assert response.json().keys() == {"input_tokens"}
        return response.json()["input_tokens"]

    assert count() == len("<user>hi<assistant>")
    assert count(system="S", tools=TOOLS) == len("<system>S<user>hi<assistant>")
    long = "y" * (engine.max_model_len + 1)  # more than the model takes is counted as well
    assert count(messages=[{"role": "user", "content": long}]) == len(f"<user>{long}<assistant>")
    assert not engine.seen_prompts


def test_errors_have_anthropics_shape(url, engine, host):
    for path, body, status, kind in (
        ("/v1/messages", ASK | {"model": "other"}, 404, "not_found_error"),
        ("/v1/messages", {"messages": []}, 400, "invalid_request_error"),
        ("/v1/messages/count_tokens", {"messages": 3}, 400, "invalid_request_error"),
    ):
        response = post(url, path, body)
        error = response.json()
        assert (response.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
    engine.says, engine.fails_at = "Hello.", 3
    assert post(url, "/v1/messages", ASK).json()["error"]["type"] == "api_error"
    *_, last = frames(url)
    assert last["type"] == "error"
    assert "secret" not in json.dumps(last)
    app = create_app(Server(engine=engine, model_names=("echo",)))
    host[0].app = RequireKey(app, keys=["right"], guards=lambda path: True, name="API key")
    engine.fails_at = None
    for headers, status in (
        ({"x-api-key": "right", "anthropic-version": "2023-06-01"}, 200), ({"Authorization": "Bearer right"}, 200),
        ({"x-api-key": "right", "Authorization": "Bearer other"}, 200), ({"x-api-key": "wrong"}, 401), ({}, 401),
    ):  # fmt: skip
        response = httpx.post(f"{url}/v1/messages", json=ASK, headers=headers)
        assert response.status_code == status
        assert status == 200 or response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_aborts_its_request(url, engine, streamed):
    engine.step_seconds = 0.1
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as raw:
        raw.sendall(request_bytes("/v1/messages", ASK | {"stream": streamed}))
        wait_for(lambda: engine.steps)
    wait_for(lambda: not engine.running)
    assert max(engine.steps.values()) <= 4


@pytest.mark.parametrize("events", [0, 3])
def test_a_message_that_runs_when_the_server_stops(engine, events):
    app = create_app(Server(engine=engine, model_names=("echo",)))
    sent = until_stopped(app, "/v1/messages", ASK | {"stream": events > 0}, events)
    assert sent[0]["status"] == (200 if events else 503)
    body = sent[-1]["body"]
    assert b'"type":"overloaded_error"' in body
    assert body.startswith(b"event: error\ndata: {" if events else b"{")
    assert b"[DONE]" not in body


def test_unknown_fields_of_a_history_are_ignored(url, engine):
    create(url, messages=[
        {"role": "user", "content": "a", "id": "m"},
        {"role": "assistant", "id": "m", "usage": {}, "content": [
            {"type": "text", "text": "b", "citations": [{"cited_text": "c"}], "parsed_output": {"a": 1}}]},
        {"role": "user", "content": "d"},
    ])  # fmt: skip
    assert [message["content"] for message in engine.tokenizer.seen_messages] == ["a", "b", "d"]


@pytest.mark.parametrize(("said", "body"), [
    ("tools[0].type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("tools[0].input_schema", {"tools": [{"name": "f"}]}),
    ("tools[0].input_schema", {"tools": [{"name": "f", "input_schema": {"type": "array"}}]}),
    ("tools[0].name", {"tools": [{"name": "a b", "input_schema": SCHEMA}]}),
    ("tool_choice.name", {"tools": TOOLS, "tool_choice": {"type": "tool"}}),
    ("tool_choice.name", {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "url", "url": "http://x"}}]}]}),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}),
    ("messages[0].content[0].type", {"messages": [{"role": "assistant", "content": [
        {"type": "server_tool_use", "id": "x"}]}]}),
    ("max_tokens", {"max_tokens": None}), ("max_tokens", {"max_tokens": 0}), ("temperature", {"temperature": -1}),
    ("container", {"container": "c"}), ("mcp_servers", {"mcp_servers": [{"url": "http://x"}]}),
    ("stop_sequences", {"stop_sequences": [""]}), ("thinking.type", {"thinking": {"type": "x"}}),
    ("stop", {"stop": ["a"]}), ("output_config.effort", {"output_config": {"effort": "none"}}),
])  # fmt: skip
def test_refused_by_name(url, said, body):
    refused(url, said, **body)


def test_the_official_client(anthropic_client, engine):
    """Strictly: every object has the types of the client, and no field that the client does not know."""

    engine.says = f"<think>\nW\n</think>\n\nHi{CALL}"
    message = anthropic_client.messages.create(**ASK, tools=TOOLS)
    strict(type(message), message.to_json())
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    for event in anthropic_client.messages.create(**ASK, tools=TOOLS, stream=True):
        strict(type(event), event.to_json())
    with anthropic_client.messages.stream(**ASK, tools=TOOLS) as stream:
        assert "".join(stream.text_stream) == "Hi"
        final = stream.get_final_message()
    assert final.content[2].input == {"q": "a"}
    assert final.stop_reason == "tool_use"
    assert anthropic_client.messages.count_tokens(model="echo", messages=ASK["messages"]).input_tokens == 19
    with pytest.raises(Exception, match="nobody") as caught:
        anthropic_client.messages.create(**ASK | {"model": "nobody"})
    assert caught.value.request_id == caught.value.response.headers["x-request-id"] == caught.value.body["request_id"]
    engine.fails_at = 3
    with pytest.raises(Exception, match="server failed"):
        list(anthropic_client.messages.create(**ASK, stream=True))
