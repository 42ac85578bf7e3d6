"""Steps an engine on a thread of its own, for `AsyncLLM`.

1. Event loops submit commands: add, abort, inspect, reset the prefix cache. The thread carries them out in order,
   between two steps.
2. After each step the thread posts the new outputs to the event loops of their readers, with one call per loop.
3. When the engine is idle, the thread checks the engine's integrity.
"""

import asyncio
import atexit
import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError

from jpaged.engine.engine import Engine, Output, StepError
from jpaged.engine.inspect import EngineCapture
from jpaged.engine.request_group import RequestGroup
from jpaged.errors import CapacityError, EngineError, JPagedError, RequestError
from jpaged.frontend.engine_access import CLOSED
from jpaged.frontend.interrupts import call_at_exit
from jpaged.frontend.output_stream import OutputStream

logger = logging.getLogger(__name__)

STALL_SECONDS = 120.0  # a step that takes longer counts as an engine that makes no progress
CHECK_AFTER_SECONDS = 1.0  # idle time before the integrity check: a request is then unlikely to wait for it
CHECK_EVERY_SECONDS = 60.0  # at least, between two integrity checks: each one walks the whole pool


@dataclasses.dataclass(frozen=True, slots=True)
class _Add:
    request_group: RequestGroup
    stream: OutputStream


@dataclasses.dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Inspect:
    answer: Future[EngineCapture]


@dataclasses.dataclass(frozen=True, slots=True)
class _Reset:
    answer: Future[bool]


_Command = _Add | _Abort | _Inspect | _Reset
_ByLoop = dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, Output | JPagedError]]]


class EngineThread:
    """Owns an engine, and runs it until `close`. The public methods may be called from any thread."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._live: dict[str, OutputStream] = {}  # by request id, of all requests in the engine
        self._wake = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._closing = False
        self._ended: EngineError | None = None  # why the thread accepts no more commands
        self._step_error: EngineError | None = None  # of the last step
        self._integrity_error: EngineError | None = None  # of the integrity check; only a new engine is healthy again
        self._last_step = time.monotonic()
        self._last_check = -math.inf
        self._next_check: float | None = None  # when to check the integrity; None: no step since the last check
        self._thread = threading.Thread(target=self._run, name="jpaged-engine", daemon=True)
        self._thread.start()
        self._exit_hook = call_at_exit(self.close)

    def add(self, request_group: RequestGroup, stream: OutputStream) -> None:
        """Add a request group; its outputs go to `stream`. Raises EngineError when the engine is closed or ended."""
        self._submit(_Add(request_group, stream))

    def abort(self, request_id: str) -> None:
        """End a request. An id that is not in use is ignored."""
        with self._wake:
            self._commands.append(_Abort(request_id))
            self._wake.notify()

    def inspect(self) -> Future[EngineCapture]:
        """Capture the engine's state between two steps. Raises EngineError as `add`."""
        answer: Future[EngineCapture] = Future()
        self._submit(_Inspect(answer))
        return answer

    def reset_prefix_cache(self) -> Future[bool]:
        """Forget all KV kept for reuse, unless requests are running. Raises EngineError as `add`."""
        answer: Future[bool] = Future()
        self._submit(_Reset(answer))
        return answer

    def check_open(self) -> None:
        """Raise EngineError when the engine is closed or has ended."""
        if self._ended is not None:
            raise self._ended
        if self._closing:
            raise EngineError(CLOSED)

    def check_health(self) -> None:
        """Raise EngineError when the engine has ended or stalls, or its last step or an integrity check failed."""
        self.check_open()
        if self._integrity_error is not None:
            raise self._integrity_error
        if self._step_error is not None:
            raise self._step_error
        stalled = time.monotonic() - self._last_step
        if self._live and stalled > STALL_SECONDS:
            raise EngineError(f"no step has ended for {stalled:.0f} s with {len(self._live)} requests running")

    def close(self) -> None:
        """Abort all requests, end the thread, and free the device memory."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        atexit.unregister(self._exit_hook)
        self._thread.join()

    def _submit(self, command: _Command) -> None:
        with self._wake:
            self.check_open()
            self._commands.append(command)
            self._wake.notify()

    # -- on the engine's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._engine.close()

    def _serve(self) -> None:
        """Carry out commands and step, until `close` or until the engine fails. Then end all requests.

        A BaseException ends the engine like any other error. Python would end this thread silently on SystemExit, and a
        Rust extension that panics raises a BaseException: the clients would wait forever.
        """
        try:
            while self._carry_out_commands():
                if self._engine.has_work:
                    self._step()
                elif self._next_check is not None and time.monotonic() >= self._next_check:
                    self._check_integrity()
            self._post((output.request_id, output) for output in self._engine.abort(tuple(self._live)))
        except BaseException as error:
            logger.critical("the engine thread ends", exc_info=True)
            self._ended = EngineError(f"the engine has ended: {type(error).__name__}: {error}")
        with self._wake:
            self._ended = self._ended or EngineError(CLOSED)
            left, self._commands = self._commands, deque()
        for command in left:
            match command:
                case _Add(request_group, stream):
                    self._live[request_group.request_id] = stream
                case _Inspect(answer) | _Reset(answer):
                    with contextlib.suppress(InvalidStateError):  # cancelled, or answered before the engine failed
                        answer.set_exception(self._ended)
        streams, self._live = self._live, {}
        by_loop: _ByLoop = defaultdict(list)
        for stream in streams.values():
            by_loop[stream.loop].append((stream, self._ended))
        for loop, pairs in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_put_all, pairs)

    def _carry_out_commands(self) -> bool:
        """Carry out all commands. Returns False after `close`.

        An idle engine waits here, for a command or for the time of the next integrity check.
        """
        with self._wake:
            while not (self._commands or self._closing or self._engine.has_work):
                wait = None if self._next_check is None else max(self._next_check - time.monotonic(), 0.0)
                woken = self._wake.wait(wait)
                self._last_step = time.monotonic()
                if not woken:
                    break
            if self._closing:
                return False
        for _ in range(len(self._commands)):
            match self._commands[0]:
                case _Add(request_group, stream):
                    self._add(request_group, stream)
                case _Abort(request_id):
                    self._post((output.request_id, output) for output in self._engine.abort([request_id]))
                case _Inspect(answer):
                    self._engine.inspect(answer)
                case _Reset(answer) if answer.set_running_or_notify_cancel():
                    answer.set_result(self._engine.reset_prefix_cache())
            self._commands.popleft()  # only now: if a command fails, `_serve` still finds it and reports the failure
        return True

    def _add(self, request_group: RequestGroup, stream: OutputStream) -> None:
        self._live[request_group.request_id] = stream
        try:
            self._engine.admission.check_capacity(request_group)
            self._engine.add(request_group)
        except (RequestError, CapacityError) as error:  # concerns this request only
            self._post([(request_group.request_id, error)])

    def _check_integrity(self) -> None:
        """Check the idle engine. If its state is inconsistent, reset the engine and report it as unhealthy."""
        self._next_check = None
        try:
            self._engine.check_integrity()
        except Exception as error:  # reading inconsistent state may fail in any way
            logger.error("the state of the idle engine is inconsistent, a bug in jpaged; it was reset: %s", error)
            message = f"the engine's state was inconsistent: {error}; restart it, and report this"
            self._integrity_error = EngineError(message)
            self._engine.start_over()  # requests before the restart get a free pool: the old one may mix up KV
        self._last_check = time.monotonic()

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except StepError as error:
            logger.error("%s", error)
            self._step_error = error
            self._post((request_id, error) for request_id in error.request_ids)
        else:
            self._step_error = None
            self._post((output.request_id, output) for output in outputs)
        self._last_step = time.monotonic()
        self._next_check = max(self._last_step + CHECK_AFTER_SECONDS, self._last_check + CHECK_EVERY_SECONDS)

    def _post(self, results: Iterable[tuple[str, Output | JPagedError]]) -> None:
        """Send outputs and errors, each with its request id, to their streams. Makes one call per event loop."""
        by_loop: _ByLoop = defaultdict(list)
        for request_id, result in results:
            stream = self._live[request_id]
            if isinstance(result, JPagedError) or result.finished:
                del self._live[request_id]
            by_loop[stream.loop].append((stream, result))
        for loop, pairs in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, pairs)
            except RuntimeError:  # the loop is closed, so its generators have no reader
                gone = [request_id for request_id, stream in self._live.items() if stream.loop is loop]
                self._engine.abort(gone)
                for request_id in gone:
                    del self._live[request_id]


def _put_all(pairs: list[tuple[OutputStream, Output | JPagedError]]) -> None:
    for stream, result in pairs:
        stream.put(result)
