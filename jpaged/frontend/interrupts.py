"""Ctrl-C takes effect between two steps of the engine, never inside a step."""

import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import Self, TypeVar

T = TypeVar("T")


class DeferredInterrupt:
    """A context that delays Ctrl-C until `check`, or the end of the context, raises KeyboardInterrupt.

    An interrupt inside a step would leave a KV cache that does not match its index. A second Ctrl-C interrupts at once.
    The context does nothing outside the main thread, or if SIGINT is ignored or has another handler.
    """

    def __init__(self) -> None:
        self._pending = False
        self._installed = False

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._remember)
            self._installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if not isinstance(error, KeyboardInterrupt):
            self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def between(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, with a `check` before each."""
        for item in items:
            self.check()
            yield item

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            signal.default_int_handler(number, frame)
        self._pending = True
