"""Bad requests get OpenAI's error body with the field's name. Good requests that run at the same time are unchanged."""

import concurrent.futures
import dataclasses
import json

import httpx
import openai
import pytest

from jpaged.errors import LogitsError
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from jpaged.serving.web.body import MAX_BODY_BYTES
from tests.serving import fake_engine
from tests.serving.http_client import CHAT, error_of, until_stopped
from tests.support.http_server import running

MESSAGES = [{"role": "user", "content": "hi"}]

BIG = (
    "n", "best_of", "beam_width", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "truncate_prompt_tokens",
    "stream_interval", "priority", "presence_penalty",
)  # fmt: skip
BLANKS = {"json_object": True, "whitespace_pattern": " {%s}" % ("1" * 5_000)}

BAD_COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [256]}, "prompt"),
    ({"prompt": [2**70]}, "prompt[0]"),
    ({"prompt": "a", "temprature": 1}, "temprature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "temperature": 1e300}, "temperature"),
    ({"prompt": "a", "temperature": True}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "top_p": 1.5}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "min_p": 2}, "min_p"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 4096}, "max_tokens"),
    ({"prompt": "a", "n": 65}, "n"),
    ({"prompt": "a", "n": 10**9}, "n"),
    ({"prompt": "a", "seed": 2**64}, "seed"),
    ({"prompt": "a", "logprobs": -2}, "logprobs"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"1": "x"}}, "logit_bias"),
    ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": ["x"]}, "stop_token_ids[0]"),
    ({"prompt": "a", "return_token_offsets": True}, "return_token_offsets"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "best_of": 65}, "best_of"),
    ({"prompt": "a", "best_of": True}, "best_of"),
    ({"prompt": "a", "response_format": {}}, "response_format.type"),
    ({"prompt": "a", "structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"prompt": "a", "prompt_embeds": "AAAA"}, "prompt_embeds"),
    *(({"prompt": "a", name: 10**30}, name) for name in BIG),
    ({"prompt": "a", "stop_token_ids": [2**31]}, "stop_token_ids[0]"),
    ({"prompt": "a", "logit_bias": {str(10**30): 1}}, "logit_bias"),
    ({"prompt": "a", "repetition_detection": {"max_pattern_size": 4, "min_count": 10**30}}, "repetition_detection"),
    ({"prompt": "a", "structured_outputs": BLANKS}, "structured_outputs.whitespace_pattern"),
]
BAD_CHATS = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "a"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
    ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
    ({"messages": MESSAGES, "max_tokens": 100_000}, "max_tokens"),
    ({"messages": MESSAGES, "max_completion_tokens": 100_000}, "max_completion_tokens"),
    ({"messages": MESSAGES, "logprobs": 3}, "logprobs"),
    ({"messages": MESSAGES, "logprobs": True, "top_logprobs": -2}, "top_logprobs"),
    ({"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0]"),
    ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
    ({"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"messages": False}}, "chat_template_kwargs.messages"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"a": "x" * 1_001}}, "chat_template_kwargs.a"),
    ({"messages": MESSAGES, "documents": [{"text": "x"}]}, "documents"),
    ({"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
    ({"messages": MESSAGES, "tool_choice": "any"}, "tool_choice"),
    ({"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"messages": [{"role": "tool", "content": "1", "tool_call_id": 3}]}, "messages[0].tool_call_id"),
]
CASES = [("/v1/completions", body, param) for body, param in BAD_COMPLETIONS]
CASES += [("/v1/chat/completions", body, param) for body, param in BAD_CHATS]


@pytest.mark.parametrize(("path", "field", "right"), [
    ("/v1/completions", {"messages": MESSAGES}, "/v1/chat/completions"),
    ("/v1/completions", {"input": "a"}, "/v1/responses"),
    ("/v1/chat/completions", {"prompt": "a"}, "/v1/completions"),
    ("/v1/chat/completions", {"input": "a"}, "/v1/responses"),
    ("/v1/chat/completions", {"messages": MESSAGES, "store": True}, "/v1/responses"),
])  # fmt: skip
def test_a_field_of_another_route_is_named_with_the_route(url, path, field, right):
    error = error_of(httpx.post(url + path, json={"model": "echo", **field}), 400)
    assert error["param"] in field
    assert f"is a field of {right}: send the request there" in error["message"]


def test_bad_fields_are_named_while_others_run(client, url, engine):
    """Each bad request gets 400 with `param`. A stream that runs meanwhile ends unchanged."""
    engine.step_seconds = 0.01

    def stream() -> str:
        chunks = client.completions.create(model="echo", prompt="good", max_tokens=150, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with concurrent.futures.ThreadPoolExecutor() as pool, httpx.Client(base_url=url) as http:
        good = pool.submit(stream)
        for path, body, param in CASES:
            for streamed in (False, True):
                if streamed and "stream_options" in body:
                    continue
                error = error_of(http.post(path, json=body | ({"stream": True} if streamed else {})), 400)
                assert error["param"] == param, (body, error)
                assert error["type"] == "invalid_request_error"
                assert param.split("[")[0].split(".")[0] in error["message"]
        assert good.result(timeout=20) == ("good" * 38)[:150]
    assert not engine.running


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b"\xff", b'{"prompt": NaN}', b'{"prompt": 1e999}', b"[" * 100_000, b'{"a":' * 9_999],
)
def test_bodies_that_are_not_a_json_object(url, raw):
    error_of(httpx.post(f"{url}/v1/completions", content=raw), 400)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"prompt": "a", "truncation_side": "x" * 9_000}, "one of 'left', 'right', got "),
        ("completions", {"prompt": "a", "early_stopping": "x"}, "one of True, False, 'never', got 'x'"),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"type": "x"}]}]},
         "one of 'custom', 'function', got 'x'"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image", "text": "a"}]}]},
         "one of 'refusal', 'text', got 'image'"),
        ("chat/completions", {"messages": MESSAGES, "tool_choice": {"type": "x", "function": {"name": "f"}}},
         "one of 'allowed_tools', 'custom', 'function', got 'x'"),
    ],
)  # fmt: skip
def test_errors_list_the_choices(url, path, body, message):
    error = error_of(httpx.post(f"{url}/v1/{path}", json=body), 400)
    assert error["message"].startswith(f"{error['param']} must be {message}")
    assert len(error["message"]) < 500


def test_null_is_absent(client):
    body = {"prompt": "ab", "max_tokens": 2, "temperature": None, "stop": None, "suffix": None, "stream_options": None}
    assert client.completions.create(model="echo", **{k: v for k, v in body.items() if v is not None}, extra_body=body)


def test_unknown_field_comes_with_a_suggestion(url):
    error = error_of(httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_token": 1}), 400)
    assert "did you mean max_tokens?" in error["message"]


def test_unknown_model_path_and_method(url):
    error = error_of(httpx.post(f"{url}/v1/completions", json={"model": "gpt", "prompt": "a"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    error_of(httpx.get(f"{url}/v1/nothing"), 404)
    error_of(httpx.get(f"{url}/v1/completions"), 405)


def test_body_too_large(url):
    error_of(httpx.post(f"{url}/v1/completions", content=b" " * (MAX_BODY_BYTES + 1), timeout=20), 413)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_logits_that_are_not_finite_are_an_error(url, engine, monkeypatch, path, stream):
    """The engine ends such an answer with finish_reason="error" and this reason."""
    answer = engine.answer

    def failed(*args):
        return dataclasses.replace(answer(*args), finish_reason="error", stop_reason=LogitsError.message)

    monkeypatch.setattr(engine, "answer", failed)
    body = {"max_tokens": 1, "stream": stream} | ({"messages": MESSAGES} if "chat" in path else {"prompt": "a"})
    error = error_of(httpx.post(f"{url}/v1/{path}", json=body), 500)
    assert "not finite" in error["message"]
    assert error["code"] == "engine_error"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "full"}),
        ("/v1/completions", {"prompt": "full", "stream": True}),
        ("/v1/completions", {"prompt": ["abc", "full", "full"]}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
        ("/v1/embeddings", {"input": "full"}),
    ],
)
def test_full_engine(url, engine, monkeypatch, path, body):
    if "messages" in body:
        monkeypatch.setattr(engine.tokenizer, "apply_chat_template", lambda *args, **kwargs: "full")
    response = httpx.post(f"{url}{path}", json=body)
    error = error_of(response, 503)
    assert (error["type"], error["code"], error["param"]) == ("server_error", "engine_full", None)
    assert response.headers["retry-after"] == "7"
    assert response.headers["content-type"] == "application/json"
    assert not engine.running  # the accepted prompts of the request were aborted


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "abcd"}), ("/v1/chat/completions", CHAT)])
def test_the_stopping_server_ends_a_stream_with_an_error(engine, path, body):
    app = create_app(Server(engine=engine, model_names=("echo",)))
    sent = until_stopped(app, path, body | {"stream": True}, 2)
    error, done, _ = sent[-1]["body"].decode().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "stopping"
    assert done == "data: [DONE]"


def test_engine_failure_reveals_no_details(url, client, engine):
    engine.fails_at = 0
    error = error_of(httpx.post(f"{url}/v1/completions", json={"prompt": "abc"}), 500)
    assert "secret" not in error["message"]
    engine.fails_at = 2
    with pytest.raises(openai.APIError, match="log says why"):  # the stream has begun: the error is an event
        list(client.completions.create(model="echo", prompt="abc", stream=True))
    engine.fails_at = None
    assert client.completions.create(model="echo", prompt="abc", max_tokens=1).choices[0].text == "a"


def test_model_without_chat_template(url, engine):
    engine.tokenizer.chat_template = None
    error = error_of(httpx.post(f"{url}/v1/chat/completions", json={"messages": MESSAGES}), 400)
    assert "--chat-template" in error["message"]


def test_closing_the_application_closes_the_engine():
    engine = fake_engine.FakeEngine()
    with running(create_app(Server(engine=engine, model_names=("echo",)))) as url:
        assert json.loads(httpx.get(f"{url}/v1/models").text)["data"]
        assert not engine.closed
    assert engine.closed
