"""The queue of commands from other threads to an engine's thread.

Called by: `EngineThread` and `Arrivals` on any thread; `EngineLoop` on the engine's thread.
Owns: the commands, the reason why no more are accepted, and the lock that also guards `Arrivals`.
Never: carries out a command.
"""

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from jpaged.engine.observe.inspect import EngineCapture
from jpaged.engine.request_group import RequestGroup
from jpaged.errors import EngineError
from jpaged.frontend.engine_access import CLOSED
from jpaged.frontend.pausing import PauseMode, UpdateMode
from jpaged.lifetime import OwnProcess
from jpaged.outputs import WeightUpdate

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Add:
    request_group: RequestGroup
    stream: Any  # an `OutputStream`, or that of another process


@dataclasses.dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    request_id: str
    index: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Inspect:
    answer: Future[EngineCapture]


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    work: Callable[[], Any]  # may raise RequestError or EngineError
    answer: Future[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Pause:
    mode: PauseMode
    clear_cache: bool
    level: int  # of sleep, when the engine is paused. 0: do not sleep
    answer: Future[None]


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    mode: UpdateMode
    work: Callable[[bool], WeightUpdate]  # replaces the weights; True: running requests recompute their KV
    answer: Future[WeightUpdate]


Command = Add | Abort | Stop | Inspect | Call | Pause | Update
WhenFatal = Callable[[EngineError], None]


class CommandQueue:
    """Commands in order of arrival. `changed` guards it, and is notified when the engine's thread has work."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: deque[Command] = deque()
        self.is_closing = False
        self._ended: EngineError | None = None  # the reason why no more commands are accepted
        self._when_fatal: list[WhenFatal] = []
        self._made_in = OwnProcess()

    @property
    def is_open(self) -> bool:
        """False once the engine is closed or has ended."""
        return self._ended is None and not self.is_closing

    def check_open(self) -> None:
        """Raise EngineError when the engine is closed or has ended, and in a forked process."""
        self._made_in.check()
        if self._ended is not None:
            raise self._ended
        if self.is_closing:
            raise EngineError(CLOSED)

    def submit(self, command: Command) -> None:
        """Append a command. Raises as `check_open`, except for an Abort and a Stop."""
        with self.changed:
            if not isinstance(command, Abort | Stop):
                self.check_open()
            self.waiting.append(command)
            self.changed.notify()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the engine's thread, between two steps. Raises as `check_open`."""
        answer: Future[T] = Future()
        self.submit(Call(work, answer))
        return answer

    def when_fatal(self, callback: WhenFatal) -> None:
        """Call a function once if the engine fails: on the engine's thread, or on this one if it has failed already."""
        with self.changed:
            self._when_fatal.append(callback)
            ended = None if self.is_closing else self._ended
        if ended is not None:
            callback(ended)

    def close(self) -> None:
        """Make the engine's thread end."""
        with self.changed:
            self.is_closing = True
            self.changed.notify()

    def end(self, failure: EngineError | None) -> tuple[EngineError, Iterable[Command], Iterable[WhenFatal]]:
        """Accept no more commands. Returns the reason, the commands left, and after a failure the callbacks to call."""
        with self.changed:
            self._ended = failure or EngineError(CLOSED)
            left, self.waiting = self.waiting, deque()
            return self._ended, left, tuple(self._when_fatal) if failure else ()
