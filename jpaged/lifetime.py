"""The end of an engine's threads and memory: when its owner is collected, and before the interpreter ends.

A thread inside XLA or a tokenizer aborts the process if the interpreter ends meanwhile: status 134 or 139 instead of
the script's own. So every thread of ours that calls one of them ends before, and a daemon thread of the caller that
makes an engine then ends with it (`using_device`).
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

    Returns a function that takes this back. The method must end the threads that use the device.
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


# Not hooks of `atexit`: it never calls one that a daemon thread registers while it calls the others.
_hooks: dict[object, Callable[[], None]] = {}


def _at_exit() -> None:
    """Call the hooks, the last one first; wait for threads that use the device; call the hooks of what they made."""
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
    """Register `_at_exit` again. `atexit` calls the last hook first, and the one with which JAX frees devices is older.

    The caller has imported JAX.
    """
    atexit.register(_at_exit)


atexit.register(_at_exit)


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
        self.ending = False  # the interpreter ends
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
    """The interpreter does not end while a thread is inside this context, or function, which calls XLA.

    If it wants to end, a daemon thread inside ends with SystemExit: at `stop_if_ending`, or when it leaves.
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
    """Inside `using_device`: the interpreter may end while this thread waits for a network."""
    depth = _users.step_out()
    try:
        yield
    finally:
        _users.step_in(depth)
    _users.check()


def end_thread() -> NoReturn:
    """End a daemon thread, without a traceback, because the interpreter ends.

    Its frames are kept: a thread that frees an array while the interpreter ends aborts the process.
    """
    error = SystemExit()
    _kept.append(error)
    raise error


_kept: list[object] = []


def stop_if_ending() -> None:
    """End a thread that is inside `using_device`, if the interpreter wants to end."""
    _users.check()


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
