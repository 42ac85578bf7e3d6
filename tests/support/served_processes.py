"""A server with front ends, as processes, and streams of it."""

import asyncio
import contextlib
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from tests.serving.http_client import wait_for

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "tests.serving.slow_server"]


class Serving:
    """A server whose engine has a process of its own, and `count` front ends."""

    def __init__(self, *arguments: str, name: str = "fake", count: int = 1):
        command = [*COMMAND, name, "--api-server-count", str(count), *(arguments or ("--port", "0"))]
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
        return children_of(self.process.pid, b"front_end")

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

    def kill(self) -> None:
        """End all processes."""
        children = self.children if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def children_of(pid: int, word: bytes) -> list[int]:
    """Child processes of a process that have a word in their command line."""
    found: list[int] = []
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return [child for child in found if word in command_line(child)]


def command_line(pid: int) -> bytes:
    """The command line of a process. Empty for one that has ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def alive(pid: int) -> bool:
    """Whether a process runs. One that has ended, and that its parent has not noticed, does not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


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
