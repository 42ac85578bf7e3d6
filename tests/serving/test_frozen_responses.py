"""No request to /v1/responses or /v1/messages freezes the server. Like `test_frozen_loop.py`, for their bodies."""

import asyncio
import json

import pytest

from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from tests.serving import fake_engine
from tests.serving.hostile_bodies import listed, mapped, text
from tests.serving.loop_stall import MAX_STALL, ask

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
CASES = {
    RESPONSES: {
        "text": (lambda: b'{"input":' + text(), 200),
        "large instructions": (lambda: b'{"input":"x","instructions":' + text(), 400),
        "instructions": (lambda: b'{"stream":true,"input":"x","instructions":' + text(b"a", 2**20 - 2), 200),
        "background": (lambda: b'{"background":true,"input":' + text(), 200),
        "10,000 items": (lambda: b'{"input":' + listed(
            b'{"role":"user","content":[{"type":"input_text","text":"%s"}]}' % (b"a" * 1_440)), 200),
        "16,000 parts": (lambda: b'{"input":[{"role":"user","content":' + listed(
            b'{"type":"input_text","text":"%s"}' % (b"a" * 930)) + b"}]", 200),
        "20,000 parts": (lambda: b'{"input":[{"role":"user","content":' + listed(
            b'{"type":"input_text","text":"%s"}' % (b"a" * 710)) + b"}]", 400),
        "millions of items": (lambda: b'{"input":' + listed(b"{}"), 400),
        "numbers": (lambda: b'{"input":' + listed(b"1"), 400),
        "hosted tools": (lambda: b'{"input":"x","tools":' + listed(b'{"type":"web_search"}', 40_000), 400),
        "metadata": (lambda: b'{"input":"x","metadata":' + mapped(b'"x"', 1_000_000), 400),
        "format": (lambda: b'{"input":"x","text":{"format":' + mapped(b"1", 1_000_000) + b"}", 400),
        "choice": (lambda: b'{"input":"x","tool_choice":' + mapped(b"1", 1_000_000), 400),
        "arguments": (lambda: b'{"input":[{"type":"function_call","call_id":"c","name":"f","arguments":'
                      + text() + b"}]", 200),
    },
    MESSAGES: {
        "text": (lambda: b'{"max_tokens":2,"messages":[{"role":"user","content":' + text() + b"}]", 200),
        "10,000 messages": (lambda: b'{"max_tokens":2,"messages":' + listed(
            b'{"role":"user","content":[{"type":"text","text":"%s"}]}' % (b"a" * 1_440)), 200),
        "system": (lambda: b'{"max_tokens":2,"messages":[{"role":"user","content":"x"}],"system":' + listed(
            b'{"type":"text","text":"%s"}' % (b"a" * 960)), 200),
        "blocks": (lambda: b'{"max_tokens":2,"messages":[{"role":"user","content":' + listed(b"{}") + b"}]", 400),
        "input": (lambda: b'{"max_tokens":2,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a",'
                  b'"name":"f","input":' + mapped(b"1", 30_000) + b"}]}]", 200),
        "stop": (lambda: b'{"max_tokens":2,"messages":[],"stop_sequences":' + listed(b'"x"'), 400),
    },
    COUNT: {"text": (lambda: b'{"messages":[{"role":"user","content":' + text() + b"}]", 200)},
}  # fmt: skip


class Tokenizer(fake_engine.ByteTokenizer):
    """It renders a conversation as nothing, so that only the server's own work is measured."""

    def apply_chat_template(self, messages, **options) -> str:
        return "a prompt"


def check(path: str, rest, status: int) -> None:
    engine = fake_engine.FakeEngine(tokenizer=Tokenizer(), says="Hi.")
    body = rest() + b"}"
    for _ in range(3):  # the least stall: a collection of garbage may add to one
        app = create_app(Server(engine=engine, model_names=("echo",)))
        got, answer, stall = asyncio.run(ask(app, path, body))
        assert got == status, answer[:500]
        assert len(answer) < 3_000 or status == 200
        if status != 200 and path != RESPONSES:
            assert json.loads(answer)["type"] == "error"
        if stall < MAX_STALL:
            return
    assert stall < MAX_STALL


def test_a_large_body_does_not_stall_the_loop():
    check(RESPONSES, *CASES[RESPONSES]["instructions"])


@pytest.mark.slow  # 21 bodies of 15 MB
@pytest.mark.parametrize(("path", "name"), [(path, name) for path, cases in CASES.items() for name in cases])
def test_no_body_stalls_the_loop(path, name):
    check(path, *CASES[path][name])
