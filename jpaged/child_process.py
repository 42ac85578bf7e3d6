"""A Python program in a child process: it answers each request with one line, and can be killed at any time.

C code that holds the GIL, or that cannot be interrupted, runs there without delaying the engine's threads.
"""

import errno
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO

from jpaged.errors import CapacityError, EngineError

_ASK_SECONDS = 0.1  # between two calls of `cancelled`
_START_SECONDS = 60.0  # importing takes 0.5 s, but much longer on a machine that has just started

# Errors of a machine that is busy. They pass.
_BUSY = {
    errno.EMFILE: "the process has no file descriptors left",
    errno.ENFILE: "the machine has no file descriptors left",
    errno.EAGAIN: "the machine has too many processes",
    errno.ENOMEM: "the machine has no memory left",
}


# Signals from the kernel when memory runs out, or from an operator. A crash of the program has another signal.
_SENT = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT}


class ChildEnded(EOFError):
    """The program ended before it answered. killed: a signal from outside ended it, so it has not crashed."""

    def __init__(self, killed: bool) -> None:
        self.killed = killed
        super().__init__("the child process was killed" if killed else "the child process has ended")


class ChildProcess:
    """Starts a program on first use, and again after it has ended. Used by one thread at a time.

    The program prints one line when it is ready, and one line for each request.
    """

    def __init__(self, arguments: Sequence[str], import_path: str, purpose: str, first_input: bytes = b"") -> None:
        """Describe the program.

        arguments:   of the Python interpreter.
        import_path: the program's PYTHONPATH.
        purpose:     its task for error messages, such as "compile the grammar".
        first_input: bytes that it reads before it is ready.
        """
        self._arguments = [sys.executable, "-P", *arguments]  # -P: import nothing from the current folder
        self._import_path = import_path
        self._purpose = purpose
        self._first_input = first_input
        self._process: subprocess.Popen[bytes] | None = None
        self._ended_here: subprocess.Popen[bytes] | None = None  # by `kill`

    def ask(self, *request: bytes, seconds: float, cancelled: Callable[[], bool] = lambda: False) -> bytes:
        """Send a request, and return the line that answers it.

        Raises TimeoutError after `seconds`, InterruptedError when `cancelled` returns True, and ChildEnded if the
        program has ended; each also closes the program. Raises CapacityError if a process cannot be started because
        the machine is busy, and EngineError if it cannot be started for another reason.
        """
        process = self._running()
        try:
            return _exchange(process, request, seconds, cancelled)
        except (TimeoutError, InterruptedError):
            self.close()
            raise
        except (OSError, EOFError) as error:
            self.close()
            raise ChildEnded(process.returncode in _SENT and process is not self._ended_here) from error

    def close(self) -> None:
        """Kill the program and wait for its end. The next request starts it again."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            process.wait()

    def kill(self) -> None:
        """Kill the program without waiting for its end. May be called from any thread."""
        process = self._ended_here = self._process
        if process is not None:
            process.kill()

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        try:
            self._process = process = subprocess.Popen(
                self._arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={**os.environ, "PYTHONPATH": self._import_path},
                start_new_session=True,  # Ctrl-C must reach the parent only
            )
            assert process.stdin is not None
            os.set_blocking(process.stdin.fileno(), False)
            _exchange(process, [self._first_input], _START_SECONDS)
        except (OSError, EOFError) as error:
            started, reason = self._process, None
            self.close()
            if isinstance(error, OSError):
                reason = _BUSY.get(error.errno)
            if started is not None and started.returncode == -signal.SIGKILL and not isinstance(error, TimeoutError):
                reason = "it was killed, probably because the machine has no memory left"
            if reason:
                message = f"no process can be started to {self._purpose} ({reason}): try again later"
                raise CapacityError(message) from error
            raise EngineError(f"cannot start a process to {self._purpose}: {error!r}") from error
        return process


def _exchange(
    process: "subprocess.Popen[bytes]",
    request: Sequence[bytes],
    seconds: float,
    cancelled: Callable[[], bool] = lambda: False,
) -> bytes:
    """Write all data and read one line. Raises TimeoutError, InterruptedError, or EOFError if the program has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    end = time.monotonic() + seconds
    for data in request:
        rest = memoryview(data)
        while rest:
            _wait(process.stdin, selectors.EVENT_WRITE, end, cancelled)
            rest = rest[os.write(process.stdin.fileno(), rest[:65_536]) :]
    line = b""
    while not line.endswith(b"\n"):
        _wait(process.stdout, selectors.EVENT_READ, end, cancelled)
        piece = os.read(process.stdout.fileno(), 65_536)
        if not piece:
            raise EOFError
        line += piece
    return line


def _wait(pipe: IO[bytes], event: int, end: float, cancelled: Callable[[], bool]) -> None:
    with selectors.PollSelector() as selector:  # unlike epoll, needs no file descriptor
        selector.register(pipe, event)
        while not selector.select(max(min(end - time.monotonic(), _ASK_SECONDS), 0)):
            if cancelled():
                raise InterruptedError
            if time.monotonic() >= end:
                raise TimeoutError
