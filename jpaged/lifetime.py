"""Ends engines' threads and frees their memory: when the owner is collected, and before the interpreter ends.

If the interpreter ends while a thread is inside XLA or a tokenizer, the process aborts with status 134 or 139. So all
threads of jpaged that call them end first, and so does a caller's daemon thread inside `using_device`.
"""

import atexit
import collections
import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from jpaged.errors import EngineError

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0  # longest wait for an engine whose owner is collected


def call_at_exit(method: Callable[[], None]) -> Callable[[], None]:
    """Call a bound method when the interpreter ends, if its object still exists. Not in forked processes.

    Returns a function that cancels the call. The method must end the threads that use the device.
    """
    made_in, key = OwnProcess(), object()

    def forget(_: object = None) -> None:
        _hooks.pop(key, None)

    reference = weakref.WeakMethod(method, forget)

    def call() -> None:
        live = reference()
        if live is not None and not made_in.is_another:
            live()

    _come_before_jax()
    _hooks[key] = call
    return forget


# Not hooks of `atexit`, which never calls a hook that a daemon thread registers while `atexit` is running.
_hooks: dict[object, Callable[[], None]] = {}


def _at_exit() -> None:
    """Call the hooks, newest first. Wait for threads that use the device, then call the hooks that they added."""
    _users.ending = True
    _call_hooks()
    _users.wait_for_end()
    _call_hooks()


def _call_hooks() -> None:
    while _hooks:
        _, call = _hooks.popitem()
        try:
            call()
        except Exception:  # the other engines end nevertheless
            logger.exception("an engine could not be closed")


@functools.cache
def _come_before_jax() -> None:
    """Register `_at_exit` again, once JAX is imported: `atexit` then runs it before JAX's hook, which frees devices."""
    atexit.register(_at_exit)


# The first finalizer registers `weakref`'s hook. It must be registered before `_at_exit`, so that it runs later: it
# calls the finalizers of constants that JAX is tracing in a thread, and the trace would fail with a KeyError.
weakref.finalize(_at_exit, int).atexit = False
atexit.register(_at_exit)


def close_when_collected(owner: object, close: Callable[[], None]) -> "weakref.finalize[[], Any]":
    """Call a function when an object is collected, unless the result's `detach` was called. Not in forked processes.

    close: must not refer to the object. It runs in a new thread, because garbage collection may interrupt a thread that
        holds a lock that `close` needs. That thread waits up to twice CLOSE_SECONDS, so that `del` frees the memory.
    """
    made_in = OwnProcess()

    def run() -> None:
        if made_in.is_another:
            return
        if _users.ending:
            _kept.append(close)
        began = threading.Event()

        def close_inside() -> None:
            with _users:
                began.set()
                close()

        thread = threading.Thread(target=close_inside, name="jpaged-close")
        with _users:  # this may be a daemon thread, while the interpreter ends
            try:
                thread.start()
            except RuntimeError:  # the interpreter ends: the hooks of `call_at_exit` come next
                return
            began.wait(CLOSE_SECONDS)
            if not threading.current_thread().name.startswith("jpaged"):  # `close` may wait for a thread of ours
                thread.join(CLOSE_SECONDS)

    finalizer = weakref.finalize(owner, run)
    finalizer.atexit = False  # `call_at_exit` is for that
    return finalizer


class _DeviceUsers:
    """Threads inside `using_device`."""

    def __init__(self) -> None:
        self.ending = False  # True once the interpreter ends
        self.reset()

    def reset(self) -> None:
        """Forget all threads: a forked child has none of them."""
        self._depths: collections.Counter[int] = collections.Counter()  # nested contexts, by thread
        self._change = threading.Condition()  # reentrant: the collector may call `__enter__` inside of it

    def __enter__(self) -> None:
        with self._change:
            self._depths[threading.get_ident()] += 1

    def __exit__(self, *error: object) -> None:
        with self._change:
            self._depths[threading.get_ident()] -= 1
            if not self._depths[threading.get_ident()]:
                del self._depths[threading.get_ident()]
            self._change.notify_all()

    def step_out(self) -> int:
        """Leave all contexts of this thread. Returns their number, for `step_in`."""
        with self._change:
            depth = self._depths.pop(threading.get_ident(), 0)
            self._change.notify_all()
        return depth

    def step_in(self, depth: int) -> None:
        with self._change:
            if depth:
                self._depths[threading.get_ident()] = depth

    def check(self) -> None:
        """End this thread if the interpreter ends and the thread is inside `using_device`."""
        if self.ending and self._depths[threading.get_ident()]:
            end_thread()

    def wait_for_end(self) -> None:
        """Wait until no other thread is inside."""
        self.ending = True
        with self._change:
            self._change.wait_for(lambda: not self._depths.keys() - {threading.get_ident()})


_users = _DeviceUsers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_users.reset)


@contextlib.contextmanager
def using_device() -> Iterator[None]:
    """Context or decorator for code that calls XLA. The interpreter's end waits until no thread is inside.

    Once the end has begun, a thread inside gets SystemExit when it enters, leaves, or calls `stop_if_ending`.
    """
    with _users:
        try:
            _users.check()
            yield
            _users.check()
        except RuntimeError as error:
            if "interpreter shutdown" not in str(error):
                raise
            end_thread()  # Python starts no threads then


@contextlib.contextmanager
def not_using_device() -> Iterator[None]:
    """Inside `using_device`: let the interpreter end while this thread waits for a network."""
    depth = _users.step_out()
    try:
        yield
    finally:
        _users.step_in(depth)
    _users.check()


def end_thread() -> NoReturn:
    """End a daemon thread without a traceback, because the interpreter ends.

    Its frames are kept alive: freeing an array while the interpreter ends aborts the process.
    """
    error = SystemExit()
    _kept.append(error)
    raise error


_kept: list[object] = []


def stop_if_ending() -> None:
    """End this thread if it is inside `using_device` and the interpreter ends."""
    _users.check()


class OwnProcess:
    """Remembers the process that an object was made in."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def is_another(self) -> bool:
        """True in a forked child of the remembered process."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Raise EngineError in a forked child: it lacks the engine's threads, and would wait forever."""
        if self.is_another:
            raise EngineError(
                "this process was forked from the one that made the engine, and cannot use it: make the engine in this "
                'process, and start it with multiprocessing.get_context("spawn")'
            )
