"""The end of an engine's threads and memory: when its owner is collected, and before the interpreter ends.

A thread inside XLA or a tokenizer aborts the process if the interpreter ends meanwhile: status 134 or 139 instead of
the script's own. So every thread of ours that calls one of them ends before.
"""

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from jpaged.errors import EngineError

CLOSE_SECONDS = 10.0  # longest wait for an engine whose owner is collected


def call_at_exit(method: Callable[[], None]) -> Callable[[], Any]:
    """Call a bound method when the interpreter ends, if its object still exists. Not in forked processes.

    Returns the argument for `atexit.unregister`. The method must end the threads that use the device.
    """
    reference, made_in = weakref.WeakMethod(method), OwnProcess()

    def call() -> None:
        live = reference()
        if live is not None and not made_in.is_another:
            live()

    return atexit.register(call)


def close_when_collected(owner: object, close: Callable[[], None]) -> "weakref.finalize[[], Any]":
    """Call a function when an object is collected, unless the result's `detach` was called. Not in forked processes.

    close: must not refer to the object. It runs in a thread of its own: the collector stops a thread anywhere, also
        where it holds a lock that `close` needs. The thread that is stopped waits for it, so that memory is free when
        `del` returns, but not for ever.
    """
    made_in = OwnProcess()

    def run() -> None:
        if made_in.is_another:
            return
        thread = threading.Thread(target=close, name="jpaged-close")
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends: the hooks of `call_at_exit` come next
            return
        if not threading.current_thread().name.startswith("jpaged"):  # `close` may wait for a thread of ours
            thread.join(CLOSE_SECONDS)

    finalizer = weakref.finalize(owner, run)
    finalizer.atexit = False  # `call_at_exit` is for that
    return finalizer


class OwnProcess:
    """Remembers the process that an object was made in."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def is_another(self) -> bool:
        """Whether this process is a forked child of the remembered one."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Raise EngineError in a forked child: it has none of the engine's threads, and would wait for ever."""
        if self.is_another:
            raise EngineError(
                "this process was forked from the one that made the engine, and cannot use it: make the engine in this "
                'process, and start it with multiprocessing.get_context("spawn")'
            )
