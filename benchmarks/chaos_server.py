"""A `jpaged serve` process for `chaos.py`: starts and ends it, disturbs it, and reads its state. Linux only."""

import contextlib
import ctypes
import dataclasses
import http.client
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos_clock
from attack import children
from drawn_requests import ask

KEY = "chaos"  # the admin key
SIZES = {
    "max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 64, "row_buckets": (16,),
    "token_buckets": (64,),
    "kv_cache_memory_bytes": 5 * 2**20,  # too few blocks for 16 long requests: some are preempted
}  # fmt: skip
START_SECONDS = 240.0     # limit of a start, which may compile all programs on a busy machine
SHUTDOWN_SECONDS = 10     # --shutdown-timeout
FRONT_END_SECONDS = 10.0  # from the start of a front end's process until it answers, on a busy machine
DISK_BYTES = 24 * 2**20   # of the small disk
DAMAGES = ("truncated", "random", "empty", "changed")  # ways to damage a file


class Disk:
    """A small file system for the server's log and compile cache, which `fill` fills.

    It is a tmpfs. Without the right to mount, it is a folder, and `fill` limits the server's file sizes (RLIMIT_FSIZE).
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], capture_output=True, check=False
        )
        self.is_mounted = mounted.returncode == 0
        self._filler = folder / "filler"

    def close(self) -> None:
        """Unmount the disk."""
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=False)

    def fill(self, pid: int) -> None:
        """Leave no byte free on the disk."""
        if not self.is_mounted:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            return
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4_096))

    def free(self, pid: int) -> None:
        if not self.is_mounted:
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self._filler.unlink(missing_ok=True)


@dataclasses.dataclass(slots=True)
class Span:
    """A period in which requests may fail in a documented way: the server restarts or drains."""

    kind: str  # restart, kill or drain
    start: float
    end: float = float("inf")


class ServerProcess:
    """The server. One thread disturbs it, others send requests."""

    def __init__(self, model: str, folder: Path, disk: Disk, front_ends: int | None = None):
        """front_ends: processes of their own; None: the server is one process."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = taken.getsockname()[1]
        self.disk = disk
        self.cache = disk.folder / "programs"
        self.spans: list[Span] = []
        self.up = threading.Event()
        self.faults: list[str] = []  # wrong exits, and tracebacks in logs
        self.start_seconds: list[float] = []
        self._log = disk.folder / "server.log"
        self._clock = folder / "clock"
        self._offset = 0.0
        self.has_front_ends = front_ends is not None
        self._flags = [model] if front_ends is None else [model, "--api-server-count", str(front_ends)]
        self.process: subprocess.Popen[bytes]
        self.memory_at_start = 0
        self.files_at_start = 0
        chaos_clock.write(self._clock, 0.0)

    # -- start and end

    def start(self) -> None:
        """Start the process, and wait until /ready answers 200. Exits if that takes more than START_SECONDS."""
        began = time.monotonic()
        options = [part for name, each in SIZES.items() for part in _option(name, each)]
        command = [
            sys.executable, str(Path(__file__).with_name("chaos_clock.py")), str(self._clock), "serve", *self._flags,
            "--port", str(self.port), "--admin-key", KEY, "--allowed-hosts", "*",
            "--shutdown-timeout", str(SHUTDOWN_SECONDS), "--compilation-cache-dir", str(self.cache), *options,
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, preexec_fn=_end_with_parent)
        while time.monotonic() - began < START_SECONDS:
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended with {self.process.returncode} at its start\n{self.log()[-5_000:]}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if ask(self.port, "GET", "/ready")[0] == 200:
                    break
            time.sleep(0.05)
        else:
            raise SystemExit(f"the server is not ready after {START_SECONDS} s\n{self.log()[-5_000:]}")
        self.start_seconds.append(round(time.monotonic() - began, 1))
        self.memory_at_start = 0
        for span in self.spans:
            span.end = min(span.end, time.monotonic())
        self.up.set()

    def terminate(self) -> None:
        """Send SIGTERM, and check that the server finishes and ends with status 0."""
        self._down("restart")
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(timeout=SHUTDOWN_SECONDS + 20)
        except subprocess.TimeoutExpired:
            self.faults.append("the server did not end after SIGTERM")
            self.process.kill()
            self.process.wait()
        else:
            if status != 0:
                self.faults.append(f"status {status} after SIGTERM: {self.log()[-1_500:]}")
        self.read_log()

    def kill(self) -> None:
        self._down("kill")
        self.process.kill()
        self.process.wait()
        self.read_log()

    def front_ends(self) -> list[int]:
        """Processes of front ends, the oldest first. The first one of a server keeps responses, files and batches."""
        return sorted(pid for pid in children(self.process.pid) if b"jpaged.serving.front_end" in _command_line(pid))

    def kill_front_end(self, rng: random.Random) -> bool:
        """Kill one with SIGKILL, and wait for the next. Returns False if none comes. Only its own requests may end."""
        before = self.front_ends()
        victim = rng.choice(before)
        self.spans.append(Span("front", now := time.monotonic(), now + 0.1))
        self.spans.append(starting := Span("starting", now))  # no other may be left, and then connections wait
        keeper = Span("keeper", now)  # responses may be refused until it is back
        if victim == before[0]:
            self.spans.append(keeper)
        os.kill(victim, signal.SIGKILL)
        try:
            while time.monotonic() - now < START_SECONDS:
                if len(set(self.front_ends()) - {victim}) == len(before):
                    return True
                time.sleep(0.05)
            return False
        finally:
            keeper.end = starting.end = time.monotonic() + FRONT_END_SECONDS

    def _down(self, kind: str) -> None:
        self.up.clear()
        self.spans.append(Span(kind, time.monotonic()))

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def read_log(self) -> None:
        """Add the log's tracebacks to `faults`, then empty the log."""
        text = self.log()
        for part in text.split("Traceback (most recent call last)")[1:]:
            self.faults.append("a traceback in the log: " + part[:3_000])
        os.truncate(self._log, 0)

    # -- disturbances

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process with SIGSTOP inside the block, then continue it."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def draining(self) -> Iterator[None]:
        """Drain the server inside the block."""
        span = Span("drain", time.monotonic())
        self.spans.append(span)
        self.admin("POST", "/admin/drain")
        try:
            yield
        finally:
            self.admin("DELETE", "/admin/drain")
            span.end = time.monotonic()

    def move_clock(self, seconds: float) -> None:
        """Move the server's wall clock. Jumps add up; at 20 years the clock returns to the real time."""
        self._offset = self._offset + seconds if abs(self._offset + seconds) < 20 * 365 * 86_400 else 0.0
        chaos_clock.write(self._clock, self._offset)

    def damage_cache(self, rng: random.Random, count: int) -> list[str]:
        """Damage `count` files of the compile cache. Returns the kind of each damage."""
        files = sorted(path for path in self.cache.rglob("*") if path.is_file() and path.stat().st_size)
        ways = []
        for path in rng.sample(files, min(count, len(files))):
            way, data = rng.choice(DAMAGES), bytearray(path.read_bytes())
            if way == "truncated":
                del data[rng.randrange(len(data)) :]
            elif way == "empty":
                data.clear()
            elif way == "random":
                data[:] = rng.randbytes(len(data))
            else:
                for _ in range(8):
                    data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
            path.write_bytes(data)
            ways.append(way)
        return ways

    # -- state

    def admin(self, method: str, path: str) -> Any:
        """Call an admin route. Returns the JSON of its answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, headers={"authorization": f"Bearer {KEY}"})
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise OSError(f"{method} {path} answers {answer.status}: {body[:300]!r}")
        return json.loads(body)

    def held(self) -> dict[str, int]:
        """Requests and blocks that the engine still holds."""
        seen = self.admin("GET", "/admin/inspect")
        pool, status = seen["pool"], self.admin("GET", "/admin/status")
        return {
            "running": len(seen["running"]), "waiting": len(seen["waiting"]), "used_blocks": pool["used_blocks"],
            "references": pool["references"], "open_requests": status["open_requests"],
        }  # fmt: skip

    def num_files(self) -> int:
        """Open files and sockets of the process."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def _option(name: str, value: Any) -> list[str]:
    values = value if isinstance(value, tuple) else (value,)
    return ["--" + name.replace("_", "-"), *map(str, values)]


def _end_with_parent() -> None:
    """End this process when its parent ends, so that no server survives it (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
