"""Limits the processor time of a block of Python code, such as a chat template that never ends.

A watching thread raises `TimeLimitError` inside the block's thread, between two bytecodes. A single call into C, like a
huge string product, is not interrupted.
"""

import ctypes
import heapq
import itertools
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager


class TimeLimitError(Exception):
    """A block took longer than its limit."""


class _Block:
    """A running block of code.

    The watching thread and the block's own thread each claim it with one `append`, which is atomic. The first claim
    decides if the block gets the exception. A lock would be lost if the exception came just after `acquire`.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.thread_id = threading.get_ident()
        self.claims: list[str] = []
        try:
            self._clock = time.pthread_getcpuclockid(self.thread_id)
        except AttributeError:  # macOS and Windows lack it: the limit is elapsed time
            self._clock = time.CLOCK_MONOTONIC
        self._begin = time.clock_gettime(self._clock)

    def left(self) -> float:
        """Seconds of processor time until the limit. So a busy machine does not end the block early."""
        return self.seconds - (time.clock_gettime(self._clock) - self._begin)

    def claim(self, name: str) -> bool:
        """True for the first claim."""
        self.claims.append(name)
        return self.claims[0] == name


class _Watch:
    """The watching thread of this process. It starts with the first block."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._blocks: list[tuple[float, int, _Block]] = []  # (time to look at it, number, block)
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def add(self, block: _Block) -> None:
        """Watch a block of the calling thread."""
        with self._wake:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="jpaged-time-limit", daemon=True)
                self._thread.start()
            self._push(block, block.seconds)
            if self._blocks[0][2] is block:
                self._wake.notify()

    def _push(self, block: _Block, seconds: float) -> None:
        heapq.heappush(self._blocks, (time.monotonic() + max(seconds, 0.01), next(self._numbers), block))

    def _run(self) -> None:
        with self._wake:
            while True:
                while self._blocks and self._blocks[0][2].claims:
                    heapq.heappop(self._blocks)
                wait = self._blocks[0][0] - time.monotonic() if self._blocks else None
                if wait is None or wait > 0:
                    self._wake.wait(wait)
                    continue
                block = heapq.heappop(self._blocks)[2]
                try:
                    left = block.left()
                except OSError:  # its thread has just ended
                    continue
                if left > 0:
                    self._push(block, left)
                elif block.claim("watch"):
                    thread, error = ctypes.c_ulong(block.thread_id), ctypes.py_object(TimeLimitError)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)


_watch = _Watch()


@contextmanager
def time_limit(seconds: float) -> Generator[None]:
    """Raise TimeLimitError in this block when it has used `seconds` of processor time. Works in every thread."""
    block = _Block(seconds)
    _watch.add(block)
    try:
        yield
    except TimeLimitError:
        raise
    except BaseException:
        _end(block)
        raise
    else:
        _end(block)


def _end(block: _Block) -> None:
    """End a block. If its exception is pending, wait for it here: it must not reach code after the block."""
    if not block.claim("end"):
        time.sleep(0.01)  # interrupted by the exception, at its end
        for _ in range(1000):
            time.sleep(0.001)
