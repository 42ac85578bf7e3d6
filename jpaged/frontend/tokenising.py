"""Threads that check and tokenise prompts for `AsyncLLM`: short prompts never wait for long ones."""

import asyncio
import contextlib
import heapq
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from jpaged.errors import EngineError
from jpaged.lifetime import call_at_exit
from jpaged.text.encoder import WHOLE

T = TypeVar("T")
LONG_WORKERS = 2  # threads for long prompts. The tokenizer releases the GIL


class TokeniserThreads:
    """One thread for short prompts and `LONG_WORKERS` threads for long ones. All run the shortest prompt first.

    Prompts of about equal length run in order of arrival.
    """

    def __init__(self) -> None:
        self._short = _ShortestFirst(1)
        self._long = _ShortestFirst(LONG_WORKERS)
        self._forget_exit = call_at_exit(self._close_at_exit)

    async def run(self, length: int, call: Callable[[Callable[[], bool]], T]) -> T:
        """Run `call(cancelled)` in a thread, and return its result. length: characters of its prompt.

        `cancelled` returns True once this coroutine has been cancelled.
        """
        cancelled = threading.Event()
        threads = self._short if length <= WHOLE else self._long
        future: Future[T] = Future()
        threads.submit(length // 1024, future, lambda: call(cancelled.is_set))
        try:
            return await asyncio.wrap_future(future)
        finally:
            cancelled.set()

    def close(self) -> None:
        """End the threads, after their current calls. Calls that have not started are cancelled."""
        self._forget_exit()
        self._short.close()
        self._long.close()

    def _close_at_exit(self) -> None:
        """Wait for current calls: a thread inside the tokenizer at the interpreter's end aborts the process."""
        self.close()
        self._short.join()
        self._long.join()


class _ShortestFirst:
    """Daemon threads, which start at the first call, and a queue that is ordered by length."""

    def __init__(self, count: int):
        self._count = count
        self._threads: list[threading.Thread] = []
        self._wake = threading.Condition()
        self._calls: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []
        self._numbers = itertools.count()
        self._closed = False

    def submit(self, length: int, future: Future[Any], call: Callable[[], Any]) -> None:
        """Queue a call."""
        with self._wake:
            if self._closed:
                future.cancel()
                return
            heapq.heappush(self._calls, (length, next(self._numbers), future, call))
            if len(self._threads) < self._count:
                self._threads.append(threading.Thread(target=self._run, name="jpaged-tokenise", daemon=True))
                self._threads[-1].start()
            self._wake.notify()

    def close(self) -> None:
        """Cancel queued calls. The threads end after their current calls."""
        with self._wake:
            self._closed = True
            for _, _, future, _ in self._calls:
                future.cancel()
            self._calls.clear()
            self._wake.notify_all()

    def join(self) -> None:
        """Wait until the threads have ended."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._calls or self._closed):
                    self._wake.wait()
                if self._closed:
                    return
                _, _, future, call = heapq.heappop(self._calls)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # the thread must not end: a Rust panic is not an Exception
                    future.set_exception(error)
            del future, call  # or the thread would keep the last prompt in memory while it waits


@contextlib.contextmanager
def reading_prompt() -> Iterator[None]:
    """Turn a panic of the tokenizer (Rust) into EngineError, so that only its request fails."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        raise EngineError(f"reading the prompt failed: {type(error).__name__}: {error}") from error


def prompt_length(prompt: Any) -> int:
    """Return the number of characters of a prompt's texts; 0 for token ids, and for a prompt of a wrong type."""
    texts = (prompt.get("prompt"), prompt.get("prediction")) if isinstance(prompt, Mapping) else (prompt,)
    return sum(len(text) for text in texts if isinstance(text, str))
