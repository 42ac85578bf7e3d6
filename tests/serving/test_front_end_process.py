"""Faults of the engine's process and of its front end: `jpaged serve --api-server-count 1`, as processes."""

import asyncio
import contextlib
import json
import os
import pathlib
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from jpaged import cli
from tests.serving.http_client import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds the front end's process in /proc"),
    pytest.mark.usefixtures("default_sigint"),
]
ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "tests.serving.slow_server"]
BODY = {"model": "fake", "prompt": "abc", "ignore_eos": True, "stream": True}
LONG, SHORT = BODY | {"max_tokens": 1900}, BODY | {"max_tokens": 60}


class Serving:
    """A server as two processes."""

    def __init__(self, *arguments: str, name: str = "fake"):
        command = [*COMMAND, name, "--api-server-count", "1", *(arguments or ("--port", "0"))]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.said: list[str] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as out:
            for line in out:
                self.said.append(line)
                self._lines.put(line)

    def until(self, start: str, seconds: float = 60.0) -> str:
        """The next line of the server that begins with `start`, or that contains " {start}"."""
        with contextlib.suppress(queue.Empty):
            while line := self._lines.get(timeout=seconds):
                if line.startswith(start) or f" {start}" in line:
                    return line.strip()
        raise AssertionError(f"never said {start!r}: {self.text}")

    @property
    def text(self) -> str:
        """All that the server has said."""
        return "".join(self.said)

    def ready(self) -> str:
        """The URL of a server that is ready."""
        return self.until("ready: ").removeprefix("ready: ").removesuffix("/v1")

    @property
    def children(self) -> list[int]:
        """Processes of front ends."""
        tasks = pathlib.Path(f"/proc/{self.process.pid}/task")
        found = [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
        return [pid for pid in found if b"front_end" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]

    @property
    def child(self) -> int:
        """The process of the front end."""
        (pid,) = self.children
        return pid

    def load(self) -> dict[str, int]:
        """The engine's load, now."""
        self.process.send_signal(signal.SIGUSR1)
        line = self.until("[")
        return dict(zip(("running", "blocks", "generated", "finished"), json.loads(line), strict=True))

    def ended(self, seconds: float = 10.0) -> int:
        """Wait for the end. Returns the status. No process is left."""
        children = self.children if self.process.poll() is None else []
        status = self.process.wait(timeout=seconds)
        wait_for(lambda: not any(map(alive, children)), seconds=2)
        self._reading.join(5)
        assert "Traceback" not in self.text
        return status


def alive(pid: int) -> bool:
    """Whether a process runs. One that has ended, and that its parent has not noticed, does not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def start() -> Iterator[Callable[..., Serving]]:
    """Starts servers, and ends them with their front ends."""
    started: list[Serving] = []

    def make(*arguments: str, name: str = "fake") -> Serving:
        started.append(Serving(*arguments, name=name))
        return started[-1]

    yield make
    for each in started:
        children = each.children if each.process.poll() is None else []
        each.process.kill()
        each.process.wait()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Streams:
    """Streams of a server, and the times of their ends."""

    def __init__(self, url: str, body: dict[str, Any], count: int):
        self.url, self.body = url, body
        self.lines: list[list[str]] = [[] for _ in range(count)]
        self.ends: list[float] = []

    async def _read(self, client: httpx.AsyncClient, lines: list[str]) -> None:
        with contextlib.suppress(httpx.HTTPError):
            async with client.stream("POST", f"{self.url}/v1/completions", json=self.body) as answer:
                async for line in answer.aiter_lines():
                    lines.extend([line] if line else [])
        self.ends.append(time.monotonic())

    async def _run(self, act: Callable[[], Any]) -> Any:
        async with httpx.AsyncClient(timeout=60) as client:
            reading = [asyncio.create_task(self._read(client, lines)) for lines in self.lines]
            async with asyncio.timeout(30):
                while not all(len(lines) > 5 for lines in self.lines):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            done = await asyncio.to_thread(act)
            await asyncio.gather(*reading)
            return done

    def during(self, act: Callable[[], Any]) -> Any:
        """Call a function in a thread while all streams run. Returns its result when they have ended."""
        return asyncio.run(self._run(act))

    def check_whole(self) -> None:
        """Each stream has all of its tokens."""
        for lines in self.lines:
            assert lines[-1] == "data: [DONE]"
            assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"


def answer(url: str) -> str:
    """The text of a short answer."""
    body = {"model": "fake", "prompt": "abc", "max_tokens": 4, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_a_front_end_that_dies_is_started_again(start):
    server = start()
    url = server.ready()
    wanted, first = answer(url), server.child
    streams = Streams(url, LONG, 16)

    def kill() -> float:
        assert server.load()["running"] == 16
        os.kill(first, signal.SIGKILL)
        began = time.monotonic()
        while (load := server.load())["blocks"]:
            time.sleep(0.02)
        assert load["running"] == 0
        return time.monotonic() - began

    assert streams.during(kill) < 1
    assert not any("[DONE]" in lines[-1] for lines in streams.lines)
    assert answer(url) == wanted
    assert "front end 0 has ended (status -9): it is started again" in server.text
    assert server.child != first
    after = Streams(url, SHORT, 16)
    after.during(lambda: None)
    after.check_whole()
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0


def test_a_server_whose_front_ends_die_at_once_ends(start):
    server = start()
    server.ready()
    for _ in range(3):
        wait_for(lambda: len(server.children) == 1, seconds=10)
        os.kill(server.child, signal.SIGKILL)
        server.until("front end")
    assert server.ended() == 1
    assert "no front end can be started" in server.text or "has ended 3 times" in server.text


def test_an_engine_that_is_killed_ends_all_streams_with_an_error(start):
    server = start()
    url = server.ready()
    child = server.child
    streams = Streams(url, LONG, 16)

    def kill() -> float:
        server.process.kill()
        return time.monotonic()

    killed = streams.during(kill)
    assert max(streams.ends) - killed < 1
    for lines in streams.lines:
        errors = [line for line in lines if '"error"' in line]
        assert len(errors) == 1
        assert "engine_error" in errors[0]
    wait_for(lambda: not alive(child), seconds=5)
    assert "the server stops: the engine's process has ended" in server.text
    assert server.text.count("in _write") == 16  # each request's own traceback


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_streams_finish(start, number):
    server = start()
    url = server.ready()
    streams = Streams(url, BODY | {"max_tokens": 100}, 16)
    streams.during(lambda: server.process.send_signal(number))
    streams.check_whole()
    began = time.monotonic()
    assert server.ended() == 0
    assert time.monotonic() - began < 3
    assert "stopped after" in server.text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_streams_that_outlast_the_timeout_are_ended(start):
    server = start("--port", "0", "--shutdown-timeout", "1")
    streams = Streams(server.ready(), LONG, 4)
    streams.during(lambda: server.process.send_signal(signal.SIGTERM))
    for lines in streams.lines:
        assert "the server is stopping" in lines[-2]
    assert server.ended() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_all_at_once(start, number):
    server = start("--port", "0", "--shutdown-timeout", "60")
    streams = Streams(server.ready(), LONG, 16)

    def stop() -> float:
        server.process.send_signal(number)
        server.until("stopping: waits up to 60 s for 16 running requests")
        began = time.monotonic()
        server.process.send_signal(number)
        assert server.ended() == 1
        return time.monotonic() - began

    assert streams.during(stop) < 2
    assert "stopped at once by a second signal" in server.text


def test_a_signal_while_the_front_end_starts(start):
    server = start()
    wait_for(lambda: len(server.children) == 1, seconds=60)
    child = server.child
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(timeout=20)
    wait_for(lambda: not alive(child), seconds=20)
    assert "Traceback" not in server.text


def test_a_front_end_that_stops_reading_does_not_stop_the_engine(start):
    server = start()
    url = server.ready()
    streams = Streams(url, BODY | {"max_tokens": 200}, 16)

    def pause() -> tuple[int, int]:
        os.kill(server.child, signal.SIGSTOP)
        before = server.load()["generated"]
        time.sleep(1)
        after = server.load()["generated"]
        os.kill(server.child, signal.SIGCONT)
        return before, after

    before, after = streams.during(pause)
    assert after - before > 16 * 10
    streams.check_whole()


def test_a_front_end_that_never_ends_does_not_keep_the_server(start):
    server = start("--port", "0", "--shutdown-timeout", "0")
    server.ready()
    os.kill(server.child, signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    assert server.ended(30) == 1


def test_an_engine_that_cannot_be_built(start):
    server = start(name="broken")
    assert server.ended(60) not in (0, None)
    assert [line for line in server.text.splitlines() if line] == ["jpaged: broken: it is"]


def test_a_unix_socket_is_removed_at_the_end(start, tmp_path):
    path = tmp_path / "unix"
    server = start("--uds", str(path))
    assert server.ready().startswith("http+unix://")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=20) as client:
        assert client.get("/health").status_code == 200
        os.kill(server.child, signal.SIGKILL)
        server.until("front end 0 has ended")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=20) as client:
        assert client.get("/health").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0
    assert not path.exists()


def test_metrics_have_a_port_of_their_own(start):
    server = start("--port", "0", "--metrics-port", "0")
    metrics = server.until("metrics: ").removeprefix("metrics: ")
    url = server.ready()
    answer(url)
    assert "generation_tokens_total" in httpx.get(metrics, timeout=20).text
    os.kill(server.child, signal.SIGKILL)
    server.until("front end 0 has ended")
    assert "generation_tokens_total" in httpx.get(metrics, timeout=20).text
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_https(start, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    names = ["-subj", "/CN=jpaged test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    server = start("--port", "0", "--ssl-keyfile", str(key), "--ssl-certfile", str(certificate))
    url = server.ready()
    assert url.startswith("https://")
    assert httpx.get(f"{url}/health", verify=False, timeout=20).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0


@pytest.mark.parametrize("count", ["0", "-1", "2"])
def test_a_bad_number_of_front_ends(capsys, count):
    assert cli.main(["serve", "demo", "--port", "0", "--api-server-count", count]) == 2
    assert "api_server_count" in capsys.readouterr().err


def test_a_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", "demo", "--port", port, "--api-server-count", "1"]) != 0
    assert port in capsys.readouterr().err
