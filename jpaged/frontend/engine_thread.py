"""Steps an engine on a thread of its own, for `AsyncLLM`.

1. Event loops submit commands: add, abort, inspect, pause, sleep. The thread carries them out in order, between two
   steps. While the engine is paused, new requests are held, and are added when it resumes.
2. After each step the thread posts the new outputs to the event loops of their readers, with one call per loop.
3. When the engine is idle, the thread checks the engine's integrity.
4. A watchdog logs steps that take too long (`frontend/watchdog.py`).
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from jpaged.engine.engine import Engine, Output, StepError
from jpaged.engine.kv_cache.handover import KVHandover
from jpaged.engine.observe.inspect import EngineCapture
from jpaged.engine.request_group import RequestGroup
from jpaged.engine.scheduling.admission import QueueLength
from jpaged.engine.step_plan import Runner
from jpaged.errors import CapacityError, EngineError, JPagedError, RequestError
from jpaged.frontend.engine_access import CLOSED
from jpaged.frontend.output_stream import OutputStream
from jpaged.frontend.pausing import WAKE_TAGS, PauseMode
from jpaged.frontend.watchdog import STALL_SECONDS, Watchdog
from jpaged.lifetime import OwnProcess, call_at_exit

T = TypeVar("T")

logger = logging.getLogger(__name__)

RETRY_SECONDS = 10.0  # time after a failed step in which other engines are preferred
CHECK_AFTER_SECONDS = 1.0  # idle time before the integrity check: a request is then unlikely to wait for it
CHECK_EVERY_SECONDS = 60.0  # minimum time between two integrity checks: each walks the whole pool


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
class _Call:
    work: Callable[[], Any]  # may raise RequestError or EngineError
    answer: Future[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Pause:
    mode: PauseMode
    clear_cache: bool
    sleep: bool  # free the KV pool when the engine is paused
    answer: Future[None]


_Command = _Add | _Abort | _Inspect | _Call | _Pause
_ByLoop = dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, Output | JPagedError]]]


class EngineThread:
    """Owns an engine, and runs it until `close`. The public methods may be called from any thread."""

    def __init__(self, engine: Engine, *, watchdog_seconds: float = STALL_SECONDS, name: str = "jpaged-engine"):
        """watchdog_seconds: a longer step is logged, and makes the engine unhealthy. name: of the thread."""
        self._engine = engine
        self._live: dict[str, OutputStream] = {}  # by request id, of all requests in the engine
        self._wake = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._closing = False
        self._ended: EngineError | None = None  # the reason why the thread accepts no more commands
        self._step_error: EngineError | None = None  # of the last step
        self._failed_at = -math.inf                  # when a step failed last
        self._integrity_error: EngineError | None = None  # of the integrity check; only a new engine is healthy again
        self._when_fatal: list[Callable[[EngineError], None]] = []
        self._paused = False
        self._asleep: frozenset[str] = frozenset()  # tags of `wake_up` that sleep
        self._pausing: list[_Pause] = []            # pauses that wait until no request runs
        self._held: dict[str, _Add] = {}            # requests that arrived while the engine is paused, by id
        self._queue = QueueLength(-engine.runner.max_num_seqs)  # after the last step or command
        self._arriving = QueueLength()              # requests that count as queued, but are not queued yet
        self._reserved: set[str] = set()            # ids of arriving requests without an _Add command yet
        self._last_step = time.monotonic()
        self._last_check = -math.inf
        self._next_check: float | None = None  # when to check the integrity; None: no step since the last check
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._watchdog = Watchdog(self._thread, engine.pipeline.describe, watchdog_seconds)
        self._thread.start()
        self._forget_exit = call_at_exit(self.close)
        self._made_in = OwnProcess()

    @property
    def runner(self) -> Runner[Any]:
        """The engine's runner."""
        return self._engine.runner

    def prefixes(self, request_group: RequestGroup) -> Sequence[int]:
        """Return (): a single engine needs no prefix hashes."""
        return ()

    @contextlib.contextmanager
    def routed(self, request_group: RequestGroup, prefixes: Sequence[int]) -> Iterator["EngineThread"]:
        """Yield this thread, and count the request as queued until `add` or the context's end. Raises as `add`."""
        with self._wake:
            self._reserve(request_group)
            self._reserved.add(request_group.request_id)
        try:
            yield self
        finally:
            with self._wake:
                if request_group.request_id in self._reserved:
                    self._reserved.remove(request_group.request_id)
                    self._arriving = self._arriving.plus(-1, -len(request_group.prompt_token_ids))

    @property
    def num_requests(self) -> int:
        """Number of requests that wait or run."""
        return len(self._live) + self._arriving.queued

    def add(self, request_group: RequestGroup, stream: OutputStream) -> None:
        """Add a request group, which may be reserved by `routed`. Its outputs go to `stream`.

        Raises EngineError when the engine is closed or has ended, and CapacityError if the queue is full.
        """
        with self._wake:
            if request_group.request_id in self._reserved:
                self.check_open()
                self._reserved.remove(request_group.request_id)
            else:
                self._reserve(request_group)
            self._commands.append(_Add(request_group, stream))
            self._wake.notify()

    def _reserve(self, request_group: RequestGroup) -> None:
        tokens = len(request_group.prompt_token_ids)
        self.check_room(tokens)
        self._arriving = self._arriving.plus(1, tokens)

    def check_room(self, num_tokens: int = 0) -> None:
        """Raise CapacityError if the queue has no room for a prompt of `num_tokens` tokens. EngineError as `add`.

        It reads the queue's length after the last step, so it does not wait for the running step.
        """
        self.check_open()
        admission = self._engine.admission
        if admission.has_limits:
            admission.check_length(self._length_with_arriving(), num_tokens)

    def has_room(self, num_tokens: int = 0) -> bool:
        """Return True if `check_room` would not raise CapacityError. Counts no refused request."""
        admission = self._engine.admission
        if not admission.has_limits:
            return True
        with self._wake:  # a request moves from `_arriving` to `_queue` under this lock
            return admission.has_room(self._length_with_arriving(), num_tokens)

    def abort(self, request_id: str) -> None:
        """End a request. An id that is not in use is ignored."""
        with self._wake:
            self._commands.append(_Abort(request_id))
            self._wake.notify()

    def inspect(self, engine: int = 0) -> Future[EngineCapture]:
        """Capture the engine's state between two steps. Raises EngineError as `add`. engine: 0, as there is one."""
        answer: Future[EngineCapture] = Future()
        self._submit(_Inspect(answer))
        return answer

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> Future[bool]:
        """See `Engine.reset_prefix_cache`. Raises EngineError as `add`."""

        def work() -> bool:
            if reset_running_requests:
                self._advance(self._engine.flush)
            return self._engine.reset_prefix_cache(reset_running_requests=reset_running_requests)

        return self._call(work)

    def take_kv(self, request_group: RequestGroup) -> Future[KVHandover]:
        """See `Engine.take_kv`. Raises EngineError as `add`."""
        return self._call(lambda: self._engine.take_kv(request_group))

    def put_kv(self, handover: KVHandover) -> Future[int]:
        """See `Engine.put_kv`. Raises EngineError as `add`."""
        return self._call(lambda: self._engine.put_kv(handover))

    def pause(self, mode: PauseMode, *, clear_cache: bool, sleep: bool = False) -> Future[None]:
        """Pause; see `PauseMode`. The future is done when no step runs. Raises EngineError as `add`.

        clear_cache: empty the prefix cache. Kept requests recompute their KV. sleep: also free device memory.
        """
        answer: Future[None] = Future()
        self._submit(_Pause(mode, clear_cache, sleep, answer))
        return answer

    def resume(self) -> Future[None]:
        """End a pause, and add the held requests. The future raises RequestError if the engine sleeps."""
        return self._call(self._resume)

    def wake_up(self, tags: frozenset[str]) -> Future[None]:
        """Allocate the memory that sleep freed. Resume if all parts are awake. The future may raise EngineError."""
        return self._call(lambda: self._wake_up(tags))

    @property
    def is_paused(self) -> bool:
        """True while new requests are held."""
        return self._paused

    @property
    def is_sleeping(self) -> bool:
        """True while a part of the engine's memory is freed."""
        return bool(self._asleep)

    def when_fatal(self, callback: Callable[[EngineError], None]) -> None:
        """Call a function once if the engine fails: on the engine's thread, or on this one if it has failed already."""
        with self._wake:
            self._when_fatal.append(callback)
            ended = None if self._closing else self._ended
        if ended is not None:
            callback(ended)

    def check_open(self) -> None:
        """Raise EngineError when the engine is closed or has ended, and in a forked process."""
        self._made_in.check()
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
        if self._live and not self._frozen and stalled > self._watchdog.seconds:
            raise EngineError(f"no step has ended for {stalled:.0f} s with {len(self._live)} requests running")

    @property
    def is_open(self) -> bool:
        """False once the engine is closed or has ended."""
        return self._ended is None and not self._closing

    @property
    def is_preferred(self) -> bool:
        """True if the engine is healthy. After a failed step, it is again True after RETRY_SECONDS."""
        try:
            self.check_health()
        except EngineError as error:
            return error is self._step_error and time.monotonic() - self._failed_at > RETRY_SECONDS
        return True

    def close(self) -> None:
        """Abort all requests, end the thread, and free the device memory."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._forget_exit()
        self._thread.join()
        self._watchdog.close()

    def _call(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the engine's thread, between two steps."""
        answer: Future[T] = Future()
        self._submit(_Call(work, answer))
        return answer

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

        BaseException is caught too: otherwise, clients would wait forever after a SystemExit or a Rust panic.
        """
        try:
            while self._carry_out_commands():
                if self._can_step:
                    self._advance(self._engine.step)
                    self._finish_pausing()
                    self._publish_queue()
                elif self._check_is_due:
                    self._check_integrity()
            for held in self._held.values():
                self._add(held)
            self._post((output.request_id, output) for output in self._engine.abort(tuple(self._live)))
        except BaseException as error:
            logger.critical("the engine thread ends", exc_info=True)
            self._ended = EngineError(f"the engine has ended: {type(error).__name__}: {error}")
        with self._wake:
            fatal = self._when_fatal if self._ended else []
            self._ended = self._ended or EngineError(CLOSED)
            left, self._commands = self._commands, deque()
        for command in (*left, *self._pausing):
            match command:
                case _Add(request_group, stream):
                    self._live[request_group.request_id] = stream
                case _Inspect(answer=answer) | _Call(answer=answer) | _Pause(answer=answer):
                    with contextlib.suppress(InvalidStateError):  # cancelled, or answered before the engine failed
                        answer.set_exception(self._ended)
        streams, self._live = self._live, {}
        by_loop: _ByLoop = defaultdict(list)
        for stream in streams.values():
            by_loop[stream.loop].append((stream, self._ended))
        for loop, pairs in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(put_all, pairs)
        for callback in fatal:
            callback(self._ended)

    @property
    def _frozen(self) -> bool:
        """True if the engine must run no step, even if it has requests."""
        return bool(self._asleep) or (self._paused and not self._pausing)

    @property
    def _can_step(self) -> bool:
        return self._engine.has_work and not self._frozen

    @property
    def _check_is_due(self) -> bool:
        return self._next_check is not None and not self._engine.has_work and time.monotonic() >= self._next_check

    def _carry_out_commands(self) -> bool:
        """Carry out all commands. Returns False after `close`.

        An idle engine waits here, for a command or for the time of the next integrity check.
        """
        with self._wake:
            while not (self._commands or self._closing or self._can_step):
                wait = None
                if self._next_check is not None and not self._engine.has_work:
                    wait = max(self._next_check - time.monotonic(), 0.0)
                woken = self._wake.wait(wait)
                self._last_step = time.monotonic()
                if not woken:
                    break
            if self._closing:
                return False
        count = len(self._commands)
        for _ in range(count):
            match self._commands[0]:
                case _Add() as add:
                    self._live[add.request_group.request_id] = add.stream
                    self._admit(add)
                    self._note_arrived(add)
                case _Abort(request_id):
                    if held := self._held.pop(request_id, None):
                        self._add(held)
                    self._post((output.request_id, output) for output in self._engine.abort([request_id]))
                case _Inspect(answer):
                    self._engine.inspect(answer)
                case _Call(work, answer) if answer.set_running_or_notify_cancel():
                    try:
                        answer.set_result(work())
                    except (RequestError, EngineError) as error:  # concerns this call only
                        answer.set_exception(error)
                case _Pause() as pause if pause.answer.set_running_or_notify_cancel():
                    self._pause(pause)
            self._commands.popleft()  # last, so that `_serve` finds a command that failed, and reports the failure
        if count:
            self._publish_queue()
        return True

    def _admit(self, add: _Add) -> None:
        """Add a request, or hold it while the engine is paused. `add` has checked the queue already."""
        if self._paused:
            self._held[add.request_group.request_id] = add
        else:
            self._add(add)

    def _add(self, add: _Add) -> None:
        try:
            self._engine.add(add.request_group)
        except (RequestError, CapacityError) as error:  # concerns this request only
            self._post([(add.request_group.request_id, error)])

    def _queue_length(self) -> QueueLength:
        """Length of the queue, including held requests."""
        if not self._engine.admission.has_limits:
            return QueueLength()
        length, held = self._engine.admission.queue_length(), self._held.values()
        tokens = sum(len(add.request_group.prompt_token_ids) for add in held)
        return length.plus(len(held), tokens)

    def _length_with_arriving(self) -> QueueLength:
        """Length of the queue after the last step, plus the requests that have arrived since."""
        arriving = self._arriving
        return self._queue.plus(arriving.queued, arriving.num_tokens)

    def _publish_queue(self) -> None:
        """Update the length of the queue that other threads read."""
        if self._engine.admission.has_limits:
            self._queue = self._queue_length()

    def _note_arrived(self, add: _Add) -> None:
        """Count a request as queued instead of arriving."""
        queue = self._queue_length()
        with self._wake:
            self._arriving = self._arriving.plus(-1, -len(add.request_group.prompt_token_ids))
            self._queue = queue

    def _pause(self, pause: _Pause) -> None:
        self._paused = True
        self._pausing.append(pause)
        if pause.mode is not PauseMode.WAIT:
            self._advance(self._engine.flush)
        if pause.mode is PauseMode.ABORT:
            running = [request_id for request_id in self._live if request_id not in self._held]
            self._post((output.request_id, output) for output in self._engine.abort(running))
        self._finish_pausing()

    def _finish_pausing(self) -> None:
        """Complete the waiting pauses, unless the newest has mode WAIT and requests still run."""
        if not self._pausing or (self._pausing[-1].mode is PauseMode.WAIT and self._engine.has_work):
            return
        pauses, self._pausing = self._pausing, []
        for pause in pauses:
            try:
                if pause.sleep and not self._asleep:
                    self._engine.sleep()
                    self._asleep = frozenset(WAKE_TAGS)
                elif pause.clear_cache and not self._asleep:
                    self._engine.reset_prefix_cache(reset_running_requests=True)
            except BaseException as error:
                pause.answer.set_exception(EngineError(f"the engine has ended: {error}"))
                raise
            pause.answer.set_result(None)

    def _resume(self) -> None:
        if self._asleep:
            raise RequestError("resume", ", ".join(sorted(self._asleep)), "the engine sleeps: wake it up")
        for pause in self._pausing:
            error = RequestError("mode", pause.mode.value, "the engine was resumed before its requests had finished")
            pause.answer.set_exception(error)
        self._pausing.clear()
        self._paused = False
        self._last_step = time.monotonic()
        held, self._held = self._held, {}
        for add in held.values():
            self._add(add)

    def _wake_up(self, tags: frozenset[str]) -> None:
        if self._asleep:
            self._engine.wake_up(weights="weights" in tags, kv_cache="kv_cache" in tags)
            self._asleep -= tags
        if not self._asleep:
            self._resume()

    def _check_integrity(self) -> None:
        """Check the idle engine. If its state is inconsistent, reset the engine and report it as unhealthy."""
        self._next_check = None
        try:
            self._engine.check_integrity()
        except Exception as error:  # reading inconsistent state may fail in any way
            logger.error("the state of the idle engine is inconsistent, a bug in jpaged; it was reset: %s", error)
            message = f"the engine's state was inconsistent: {error}; restart it, and report this"
            self._integrity_error = EngineError(message)
            self._engine.start_over()  # until the restart, requests get an empty pool: the old one may mix up their KV
        self._last_check = time.monotonic()

    def _advance(self, turn: Callable[[], list[Output]]) -> None:
        """Run one turn of the engine, and post its outputs. turn: `Engine.step` or `Engine.flush`."""
        try:
            with self._watchdog.watching():
                outputs = turn()
        except StepError as error:
            logger.error("%s", error)
            self._step_error, self._failed_at = error, time.monotonic()
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
                loop.call_soon_threadsafe(put_all, pairs)
            except RuntimeError:  # the loop is closed, so its generators have no reader
                gone = [request_id for request_id, stream in self._live.items() if stream.loop is loop]
                self._engine.abort(gone)
                for request_id in gone:
                    del self._live[request_id]
                    self._held.pop(request_id, None)


def put_all(pairs: list[tuple[OutputStream, Output | JPagedError]]) -> None:
    """Put outputs and errors into their streams. Called on the event loop of the streams."""
    for stream, result in pairs:
        stream.put(result)
