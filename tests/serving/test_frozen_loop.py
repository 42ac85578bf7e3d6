"""No request freezes the server: the longest stall of the event loop under hostile bodies.

A stall is the processor time that the process spends between two ticks of a task on the loop. It counts work on the
loop, and work of threads that hold the interpreter's lock. Unlike the wall time, other processes do not change it.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import ClassVar

import pytest
from starlette.datastructures import Address

from jpaged.errors import CapacityError, RequestError
from jpaged.serving import body, body_process
from jpaged.serving.application import create_app
from jpaged.serving.error_responses import ClientDisconnected
from jpaged.serving.generation import Server
from jpaged.serving.request_schema import CompletionRequest

from .conftest import fake_engine

MAX_STALL = 0.1  # seconds
SIZE = 15_000_000
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
TEXT = b'{"prompt":"x","max_tokens":2,'
TALK = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":2,'


class Engine(fake_engine.FakeEngine):
    """A fake engine that reads the beginning of a prompt only."""

    def _token_ids(self, prompt, priority: int) -> list[int]:
        parts = {"prompt": prompt} if isinstance(prompt, str) else prompt
        return super()._token_ids({name: value[:10] for name, value in parts.items()}, priority)


def listed(value: bytes, size: int = SIZE) -> bytes:
    """A list of one value, repeated to a size in bytes."""
    return b"[" + (value + b",") * (size // (len(value) + 1) - 1) + value + b"]"


def mapped(value: bytes, count: int) -> bytes:
    """An object of many entries."""
    return b"{" + b",".join(b'"%d":%s' % (i, value) for i in range(count)) + b"}"


def text(value: bytes = b"a", size: int = SIZE) -> bytes:
    """A string of one piece, repeated to a size in bytes."""
    return b'"' + value * (size // len(value)) + b'"'


TOOL = b'{"type":"function","function":{"name":"f","parameters":{}}}'
# name -> (path, beginning of the body, rest of the body as a function, accepted statuses)
FAST = {
    "whitespace pattern": (TEXT, lambda: b'"structured_outputs":{"json_object":true,"whitespace_pattern":'
                           + text(b"1", 60_000).replace(b'"1', b'" {1', 1)[:-1] + b'}"}}', 400),
    "digits as white space": (TEXT, lambda: b'"structured_outputs":{"json_object":true,"whitespace_pattern":'
                              + text(b"1", 60_000) + b"}}", 400),
    "name of 15 MB": (TEXT, lambda: text() + b":1}", 400),
    "7 million allowed_token_ids": (TEXT, lambda: b'"allowed_token_ids":' + listed(b"1") + b"}", 400),
    "500,000 allowed_token_ids": (TEXT, lambda: b'"allowed_token_ids":' + listed(b"1", 1_000_000) + b"}", 200),
    "7 million stop_token_ids": (TEXT, lambda: b'"stop_token_ids":' + listed(b"1") + b"}", 400),
    "a million metadata": (TALK, lambda: b'"metadata":' + mapped(b'"x"', 1_000_000) + b"}", 400),
    "5 million tools": (TALK, lambda: b'"tools":' + listed(b"{}") + b"}", 400),
    "a million logit_bias": (TEXT, lambda: b'"logit_bias":' + mapped(b"1", 1_000_000) + b"}", 400),
    "text of 15 MB": (b"{", lambda: b'"prompt":' + text(b"line of code\\n") + b',"max_tokens":2}', 200),
    "a million token ids": (b"{", lambda: b'"prompt":' + listed(b"100", 4 * 2**20 + 1) + b',"max_tokens":2}', 200),
}  # fmt: skip


def _many() -> dict:
    """The other hostile bodies: each kind of value in each field that may hold it."""
    cases = {}
    lists = {
        "stop": b'"x"', "bad_words": b'"x"', "stop_token_ids": b"123456", "allowed_token_ids": b'""', "prompt": b"[]",
        "unknown": b"{}", "store": b"1", "user": b"1", "n": b"1",
    }  # fmt: skip
    for field, value in lists.items():
        for kind, item in {"own": value, "lists": b"[]", "objects": b"{}", "long": text(b"a", 1_000)}.items():
            body = b'"%s":%s}' % (field.encode(), listed(item))
            cases[f"{field} list of {kind}"] = (b"{" if field == "prompt" else TEXT, lambda body=body: body, 400)
    for field in ("metadata", "logit_bias", "logits_processors", "repetition_detection", "stream_options",
                  "response_format", "structured_outputs", "unknown", "suffix"):  # fmt: skip
        for kind, value in {"numbers": b"1", "strings": b'"x"'}.items():
            rest = b'"%s":%s}' % (field.encode(), mapped(value, 1_000_000))
            cases[f"{field} map of {kind}"] = (TEXT, lambda rest=rest: rest, 400)
    for field in ("regex", "grammar", "json", "whitespace_pattern"):
        rest = b'"structured_outputs":{"%s":%s}}' % (field.encode(), text())
        cases[f"structured_outputs.{field} text"] = (TEXT, lambda rest=rest: rest, 400)
    for field in ("user", "cache_salt", "stop", "model", "safety_identifier", "seed", "truncation_side"):
        rest = b'"%s":%s}' % (field.encode(), text())
        cases[f"{field} text"] = (TEXT, lambda rest=rest: rest, (400, 404))
    for field, value in {
        "messages": b'{"role":"user","content":"x"}', "tools": TOOL, "documents": b'{"text":"x"}',
        "chat_template_kwargs": b"1",
    }.items():  # fmt: skip
        for kind, item in {"own": value, "lists": b"[]", "numbers": b"1"}.items():
            rest = b'"%s":%s}' % (field.encode(), listed(item))
            cases[f"{field} list of {kind}"] = (b"{" if field == "messages" else TALK, lambda rest=rest: rest, 400)
    parts = b'{"messages":[{"role":"user","content":%s}]}' % listed(b'{"type":"text","text":"x"}')
    cases["parts"] = (b"", lambda: parts.replace(b'"messages"', b'"tools":[],"messages"'), 400)
    calls = b'[{"role":"assistant","tool_calls":%s}]' % listed(b'{"function":{"name":"f"}}')
    cases["tool calls"] = (b"{", lambda: b'"tools":[],"messages":' + calls + b"}", 400)
    arguments = mapped(b"1", 1_000_000)
    call = b'[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":%s}}]}]' % arguments
    cases["arguments"] = (b"{", lambda: b'"tools":[],"messages":' + call + b"}", 400)
    enum = b'"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":%s}}}]}' % listed(b"1")
    cases["enum"] = (TALK, lambda: enum, 400)
    cases["description"] = (TALK, lambda: enum.replace(listed(b"1"), b'["x"],"description":' + text()), 400)
    cases["tool's key"] = (TALK, lambda: b'"tools":[{"type":"function",' + text() + b":1}]}", 400)
    cases["fields"] = (b"{", lambda: mapped(b"1", 1_000_000)[1:], 400)
    cases["the same field"] = (TEXT, lambda: b'"stop":"x",' * 1_300_000 + b'"stop":"x"}', (200, 400))
    cases["deep lists"] = (TEXT, lambda: b'"stop":' + b"[" * SIZE, 400)
    cases["blanks"] = (TEXT, lambda: b" " * SIZE + b'"n":1}', 200)
    cases["digits"] = (TEXT, lambda: b'"n":' + b"1" * SIZE + b"}", 400)
    cases["fraction"] = (TEXT, lambda: b'"top_p":0.' + b"1" * SIZE + b"}", (200, 400))
    cases["quotes"] = (TEXT, lambda: b'"a":' + b'"' * SIZE, 400)
    cases["escaped"] = (b"{", lambda: b'"prompt":' + text(rb"\u00e9") + b',"max_tokens":2}', 200)
    cases["half a text"] = (b"{", lambda: b'"prompt":"' + b"a" * SIZE, 400)
    cases["not utf-8"] = (b"{", lambda: b'"prompt":' + text(b"\xff") + b"}", 400)
    cases["not an object"] = (b"", lambda: listed(b"1"), 400)
    cases["many prompts"] = (b"{", lambda: b'"prompt":' + listed(b"[1]") + b"}", 400)
    cases["many texts"] = (b"{", lambda: b'"prompt":' + listed(b'"x"') + b"}", 400)
    for value in (b"1", b'"x"', b"[1]", b"[]"):
        cases[f"inputs {value!r}"] = (b"{", lambda value=value: b'"input":' + listed(value) + b"}", 400)
    return cases


class Posted:
    """A request with a body and no headers, as `read_body` reads it."""

    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, raw: bytes, address: str = "10.0.0.1"):
        self._raw = raw
        self.client = Address(address, 1)
        self.left = asyncio.Event()

    async def stream(self):
        yield self._raw

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}


def path_of(body: bytes) -> str:
    head = body[:60]
    return EMBEDDINGS if b'"input"' in head else CHAT if b'"messages"' in head or b'"tools"' in head else COMPLETIONS


async def ask(app, path: str, body: bytes) -> tuple[int, bytes, float]:
    """Send one request to the application. Returns (status, the answer, the longest stall in seconds)."""
    pieces = [body[i : i + 65_536] for i in range(0, len(body), 65_536)][::-1]
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": [],
        "http_version": "1.1", "scheme": "http", "server": ("x", 80), "client": ("x", 1), "root_path": "",
    }  # fmt: skip
    status, answer, longest, done = 0, b"", 0.0, False

    async def receive() -> dict:
        if not pieces:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        return {"type": "http.request", "body": pieces.pop(), "more_body": bool(pieces)}

    async def send(message: dict) -> None:
        nonlocal status, answer
        status = message.get("status", status)
        answer += message.get("body", b"")

    async def tick() -> None:
        nonlocal longest
        last = time.process_time()
        while not done:
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.process_time() - last), time.process_time()

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    await asyncio.wait_for(app(scope, receive, send), 60)
    done = True
    await ticking
    return status, answer, longest


def check(begin: bytes, rest, statuses) -> None:
    app = create_app(Server(engine=Engine(), model_names=("echo",)))
    body = begin + rest()
    for _ in range(3):  # the least stall: a collection of garbage may add to one
        status, answer, stall = asyncio.run(ask(app, path_of(body), body))
        assert status in (statuses if isinstance(statuses, tuple) else (statuses,)), answer[:500]
        assert len(answer) < 3_000 or status == 200
        if status != 200:
            assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}
        if stall < MAX_STALL:
            return
    assert stall < MAX_STALL


def test_the_child_process_answers_as_the_server_does(monkeypatch):
    """A body has the same result in both. A valid one with 300 KB of text keeps every field."""
    fields = {"prompt": "é\n" * 100_000, "temperature": 0.5, "stop": ["a", "b"], "logit_bias": {"5": 1}, "seed": 2**63}
    for more, parameter in (
        ({}, None), ({"top_k": 10**30}, "top_k"), ({"stop": ["a", 1]}, "stop[1]"), ({"nn": 1}, "nn"),
        ({"watermarking": True}, "watermarking"), ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ):  # fmt: skip
        raw = json.dumps(fields | more).encode()
        results = []
        for inline in (2**30, 1_000):
            monkeypatch.setattr(body, "INLINE_BYTES", inline)
            try:
                results.append(asyncio.run(body.read_body(Posted(raw), CompletionRequest)))
            except RequestError as error:
                results.append((error.parameter, str(error)))
        assert results[0] == results[1]
        if parameter is None:
            assert (results[0].prompt, results[0].seed) == (fields["prompt"], 2**63)
        else:
            assert results[0][0] == parameter


def test_large_bodies_have_a_limit_together(monkeypatch):
    """One address gets a half. Beyond it its large bodies get 503, and small ones and those of others are read."""
    monkeypatch.setattr(body, "MAX_WAITING_BYTES", 2_000_000)
    large = b'{"prompt":"%b"}' % (b"a" * 900_000)
    waiting = asyncio.Event()

    class Held(Posted):
        async def stream(self):
            yield large[:800_000]
            await waiting.wait()
            yield large[800_000:]

    async def read_all() -> None:
        first = asyncio.create_task(body.read_body(Held(b""), CompletionRequest))
        await asyncio.sleep(0)
        for _ in range(2):
            with pytest.raises(CapacityError, match=r"leave 299,\d+ bytes for those of one address: send a smaller"):
                await body.read_body(Posted(large), CompletionRequest)
        assert (await body.read_body(Posted(b'{"prompt":"small"}'), CompletionRequest)).prompt == "small"
        half = b'{"prompt":"%b"}' % (b"a" * 500_000)
        assert len((await body.read_body(Posted(half, "10.0.0.2"), CompletionRequest)).prompt) == 500_000
        waiting.set()
        assert len((await first).prompt) == 900_000
        assert len((await body.read_body(Posted(large), CompletionRequest)).prompt) == 900_000

    asyncio.run(read_all())
    assert not body._LargeBody.sizes


def test_the_body_of_a_client_that_has_left_is_not_checked(monkeypatch):
    large = b'{"prompt":"%b"}' % (b"a" * 300_000)
    checked, began, go_on = [], threading.Event(), threading.Event()

    def check(process: body_process.BodyProcess, raw: bytes, schema: str) -> None:
        checked.append(len(raw))
        began.set()
        assert go_on.wait(10)

    async def read_all() -> None:
        requests = [Posted(large + b" " * number) for number in range(3)]
        reading = [asyncio.create_task(body.read_body(request, CompletionRequest)) for request in requests]
        await asyncio.to_thread(began.wait, 10)
        requests[1].left.set()
        with pytest.raises(ClientDisconnected):
            await reading[1]
        go_on.set()
        await asyncio.gather(reading[0], reading[2])

    monkeypatch.setattr(body_process.BodyProcess, "check", check)
    asyncio.run(read_all())
    assert checked == [len(large), len(large) + 2]


def test_a_check_that_is_killed_is_repeated():
    """As by a machine that has no memory left. The body itself is valid."""
    process = body_process.BodyProcess()
    try:
        process.check(b'{"prompt": "a"}', "CompletionRequest")
        os.kill(process._process.pid, signal.SIGSTOP)
        threading.Timer(0.2, process.kill).start()
        process.check(b'{"prompt": "a"}', "CompletionRequest")
        process.close()
        ended = threading.Event()

        def kill() -> None:
            while not ended.wait(0.005):
                process.kill()

        killer = threading.Thread(target=kill)
        killer.start()  # a process takes longer to start
        try:
            with pytest.raises(CapacityError, match="it was killed, as by a machine that has no memory left"):
                process.check(b'{"prompt": "a"}', "CompletionRequest")
        finally:
            ended.set()
            killer.join()
        process.check(b'{"prompt": "a"}', "CompletionRequest")
    finally:
        process.close()


def test_a_check_that_takes_too_long_is_killed():
    process = body_process.BodyProcess()
    try:
        process.check(b'{"prompt": "a"}', "CompletionRequest")
        first = process._process.pid
        with pytest.raises(RequestError, match="takes too much time"):
            process.check(b'{"prompt": "%s"}' % (b"a" * 3_000_000), "CompletionRequest", seconds=0)
        process.check(b'{"prompt": "a"}', "CompletionRequest")
        assert process._process.pid != first
    finally:
        process.close()


def test_the_child_process_imports_nothing_from_the_current_folder(monkeypatch, tmp_path):
    (tmp_path / "random.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    process = body_process.BodyProcess()
    try:
        process.check(b'{"prompt": "a"}', "CompletionRequest")
    finally:
        process.close()


def test_the_child_process_imports_no_jax():
    code = "import sys, jpaged.serving.body_worker, jpaged.serving.body; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", FAST)
def test_no_body_stalls_the_loop(name):
    check(*FAST[name])


@pytest.mark.slow  # about 100 bodies of 15 MB take half a minute
def test_no_other_body_stalls_the_loop():
    for name, case in _many().items():
        try:
            check(*case)
        except AssertionError as error:
            raise AssertionError(name) from error
