"""An engine on a thread of its own, for `AsyncLLM`.

Called by: `AsyncLLM`, `EngineThreads` and `prefill`, on any thread.
Owns: the thread, and its parts.
Never: runs the engine on the caller's thread.

1. Event loops submit commands: add, abort, inspect, pause, sleep (`commands`). A full queue refuses requests at once
   (`arrivals`). The thread carries the commands out in order, between two steps (`engine_loop`).
2. While the engine is paused, new requests are held, and are added when it resumes (`pause_control`).
3. After each step the thread posts the new outputs to the event loops of their readers, with one call per loop
   (`live_requests`). An idle engine checks its integrity (`engine_turns`). `watchdog` logs steps that take too long.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from jpaged.engine.engine import Engine
from jpaged.engine.kv_cache.handover import KVHandover
from jpaged.engine.observe.inspect import EngineCapture
from jpaged.engine.request_group import RequestGroup
from jpaged.errors import EngineError, NoWeightsError
from jpaged.frontend.arrivals import Arrivals
from jpaged.frontend.commands import Abort, Add, CommandQueue, Inspect, Pause, Stop, Update
from jpaged.frontend.engine_loop import EngineLoop
from jpaged.frontend.engine_turns import EngineTurns
from jpaged.frontend.live_requests import LiveRequests
from jpaged.frontend.pause_control import PauseControl
from jpaged.frontend.pausing import PauseMode, UpdateMode
from jpaged.frontend.update_control import UpdateControl
from jpaged.frontend.watchdog import STALL_SECONDS, Watchdog
from jpaged.lifetime import call_at_exit
from jpaged.outputs import WeightUpdate, WeightVersion


class EngineThread:
    """Runs an engine until `close`. The methods may be called from any thread.

    runner:   the engine's runner.
    commands: accepts calls until the engine ends.
    arrivals: the queue's length, and its limits.
    """

    def __init__(self, engine: Engine, *, watchdog_seconds: float = STALL_SECONDS, name: str = "jpaged-engine"):
        """watchdog_seconds: a longer step is logged, and makes the engine unhealthy. name: of the thread."""
        self.runner = engine.runner
        self._engine = engine
        self.commands = CommandQueue()
        self._requests = LiveRequests(engine)
        self.arrivals = Arrivals(engine, self.commands, self._requests)
        self._thread = threading.Thread(target=lambda: self._loop.run(), name=name, daemon=True)
        self._watchdog = Watchdog(self._thread, engine.pipeline.describe, watchdog_seconds)
        self._turns = EngineTurns(engine, self._requests, self._watchdog)
        self._pauses = PauseControl(engine, self._requests, self._turns)
        self._updates = UpdateControl(engine, self._requests, self._turns, self._pauses)
        self._loop = EngineLoop(
            engine, self.commands, self._requests, self.arrivals, self._turns, self._pauses, self._updates
        )
        self._thread.start()
        self._forget_exit = call_at_exit(self.close)

    def prefixes(self, request_group: RequestGroup) -> Sequence[int]:
        """Return (): a single engine needs no prefix hashes."""
        return ()

    @contextlib.contextmanager
    def routed(self, request_group: RequestGroup, prefixes: Sequence[int]) -> Iterator["EngineThread"]:
        """Yield this thread, and count the request as queued until `add` or the context's end. Raises as `add`."""
        self.arrivals.reserve(request_group)
        try:
            yield self
        finally:
            self.arrivals.cancel(request_group)

    def add(self, request_group: RequestGroup, stream: Any) -> None:
        """Add a request group, which may be reserved by `routed`. Its outputs go to `stream`.

        Raises EngineError when the engine is closed or has ended, and CapacityError if the queue is full.
        """
        with self.commands.changed:
            self.arrivals.claim(request_group)
            self.commands.submit(Add(request_group, stream))

    def check_room(self, num_tokens: int = 0) -> None:
        """See `Arrivals.check_room`. Raises NoWeightsError if the engine is awake without weights.

        During an update a request waits: half of the new weights are no reason to refuse it.
        """
        is_updating = self._updates.is_updating
        try:
            self._pauses.require_weights()
        except NoWeightsError:
            if not (is_updating or self._updates.is_updating):  # an update may have begun since the first look
                raise
        self.arrivals.check_room(num_tokens)

    def abort(self, request_id: str) -> None:
        """End a request. An id that is not in use is ignored."""
        self.commands.submit(Abort(request_id))

    def stop(self, request_id: str, index: int, num_tokens: int) -> None:
        """End an answer whose text has ended after `num_tokens` tokens. One that has ended is ignored."""
        self.commands.submit(Stop(request_id, index, num_tokens))

    def inspect(self, engine: int = 0) -> Future[EngineCapture]:
        """Capture the engine's state between two steps. Raises EngineError as `add`. engine: 0, as there is one."""
        answer: Future[EngineCapture] = Future()
        self.commands.submit(Inspect(answer))
        return answer

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> Future[bool]:
        """See `Engine.reset_prefix_cache`. Raises EngineError as `add`."""

        def work() -> bool:
            if reset_running_requests:
                self._turns.run(self._engine.flush)
            return self._engine.reset_prefix_cache(reset_running_requests=reset_running_requests)

        return self.commands.call(work)

    def take_kv(self, request_group: RequestGroup) -> Future[KVHandover]:
        """See `Engine.take_kv`. Raises EngineError as `add`."""
        return self.commands.call(lambda: self._engine.take_kv(request_group))

    def put_kv(self, handover: KVHandover) -> Future[int]:
        """See `Engine.put_kv`. Raises EngineError as `add`."""
        return self.commands.call(lambda: self._engine.put_kv(handover))

    def pause(self, mode: PauseMode, *, clear_cache: bool, level: int = 0) -> Future[None]:
        """Pause; see `PauseMode`. The future is done when no step runs. Raises EngineError as `add`.

        clear_cache: empty the prefix cache. Kept requests recompute their KV. level: of sleep; 0: do not sleep.
        """
        answer: Future[None] = Future()
        self.commands.submit(Pause(mode, clear_cache, level, answer))
        return answer

    def resume(self) -> Future[None]:
        """End a pause, and add the held requests. The future raises RequestError if the engine sleeps."""
        return self.commands.call(self._pauses.resume)

    def wake_up(self, tags: frozenset[str]) -> Future[None]:
        """Allocate the memory that sleep freed. Resume if all parts are awake. The future may raise EngineError."""
        return self.commands.call(lambda: self._pauses.wake_up(tags))

    def update_weights(
        self, leaves: Sequence[Callable[[], Iterable[Any]]], mode: UpdateMode, version: WeightVersion | None
    ) -> Future[WeightUpdate]:
        """Replace the weights, and treat running requests as `mode` says. Raises EngineError as `add`.

        leaves: one function, which returns the leaves that `Engine.update_weights` takes.
        """
        [of_engine] = leaves
        answer: Future[WeightUpdate] = Future()

        def work(recompute: bool) -> WeightUpdate:
            return self._engine.update_weights(of_engine(), version=version, recompute=recompute)

        self.commands.submit(Update(mode, work, answer))
        return answer

    @property
    def is_paused(self) -> bool:
        """True while new requests are held."""
        return self._pauses.is_paused

    @property
    def threads(self) -> "tuple[EngineThread, ...]":
        """Only this thread. `EngineThreads` has several."""
        return (self,)

    @property
    def is_updating(self) -> bool:
        """True while the weights are replaced. Requests wait until the update ends."""
        return self._updates.is_updating

    @property
    def is_sleeping(self) -> bool:
        """True while a part of the engine's memory is freed."""
        return bool(self._pauses.asleep)

    def when_fatal(self, callback: Callable[[EngineError], None]) -> None:
        """Call a function once if the engine fails: on the engine's thread, or on this one if it has failed already."""
        self.commands.when_fatal(callback)

    def check_health(self) -> None:
        """Raise EngineError when the engine has ended or stalls, or its last step or an integrity check failed."""
        self.commands.check_open()
        stands_still = self._pauses.is_frozen or self._updates.is_updating
        self._turns.check_health(0 if stands_still else len(self._requests.live))

    @property
    def is_preferred(self) -> bool:
        """True if the engine is healthy. After a failed step, it is again True after RETRY_SECONDS."""
        try:
            self.check_health()
        except EngineError as error:
            return self._turns.is_over(error)
        return True

    def close(self) -> None:
        """Abort all requests, end the thread, and free the device memory."""
        self.commands.close()
        self._forget_exit()
        self._thread.join()
        self._watchdog.close()
