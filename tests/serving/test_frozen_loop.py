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
from typing import ClassVar

import pytest
from starlette.datastructures import Address

from jpaged.errors import CapacityError, RequestError
from jpaged.serving.application import create_app
from jpaged.serving.schemas.requests import CompletionRequest
from jpaged.serving.server_state import Server
from jpaged.serving.web import body, body_process
from jpaged.serving.web.error_responses import ClientDisconnected
from tests.serving import fake_engine
from tests.serving.hostile_bodies import FAST, many_bodies, path_of
from tests.serving.loop_stall import MAX_STALL, ask


class Engine(fake_engine.FakeEngine):
    """A fake engine that reads the beginning of a prompt only."""

    def token_ids(self, prompt, priority: int) -> list[int]:
        parts = {"prompt": prompt} if isinstance(prompt, str) else prompt
        return super().token_ids({name: value[:10] for name, value in parts.items()}, priority)


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
            with pytest.raises(CapacityError, match=r"leave 299,\d+ bytes for one address: send a smaller"):
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

    def check(process: body_process.BodyProcess, raw: bytes, schema: str) -> list[str]:
        checked.append(len(raw))
        began.set()
        assert go_on.wait(10)
        return []

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
            with pytest.raises(CapacityError, match="it was killed, probably because the machine has no memory left"):
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
    code = "import sys, jpaged.serving.web.body_worker, jpaged.serving.web.body; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (number >= 4)) for number, name in enumerate(FAST)]
)
def test_no_body_stalls_the_loop(name):
    check(*FAST[name])


@pytest.mark.slow  # about 100 bodies of 15 MB take half a minute
def test_no_other_body_stalls_the_loop():
    for name, case in many_bodies().items():
        try:
            check(*case)
        except AssertionError as error:
            raise AssertionError(name) from error
