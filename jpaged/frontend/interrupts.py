"""The ends that come from outside, Ctrl-C and the interpreter's: between two steps of the engine, never inside one."""

import atexit
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class DeferredInterrupt:
    """Inside, Ctrl-C is remembered; `check` raises it where it does no harm, and so does leaving, even by an error.

    Half a step would be a cache that no longer fits its index. A second Ctrl-C is not held back. Does nothing outside
    the main thread, or where somebody else handles the signal.
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
        """Raise KeyboardInterrupt if Ctrl-C has come."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            signal.default_int_handler(number, frame)
        self._pending = True


def call_at_exit(method: Callable[[], None]) -> Callable[[], Any]:
    """Call a bound method when the interpreter ends, if its object still lives; returns what `atexit.unregister` takes.

    It must end the threads that use the device: one inside XLA while the interpreter is torn down aborts the process.
    """
    reference = weakref.WeakMethod(method)

    def call() -> None:
        live = reference()
        if live is not None:
            live()

    return atexit.register(call)
