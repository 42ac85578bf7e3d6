"""Several engines, each on a thread of its own, for `AsyncLLM` with data_parallel_size.

1. A router chooses the engine of a request (`jpaged.routing`). The request stays there.
2. Pausing, sleeping, resetting the prefix cache and aborting go to all engines.
3. An engine that ends loses its own requests. The router uses the other engines from then on.
4. With prefill_engines, the first engines only compute prompts. See `frontend/prefill.py`.
"""

import contextlib
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any, TypeVar

from jpaged.engine.engine import Engine
from jpaged.engine.observe.inspect import EngineCapture
from jpaged.engine.request_group import RequestGroup
from jpaged.errors import EngineError
from jpaged.frontend.engine_thread import EngineThread
from jpaged.frontend.pausing import PauseMode, UpdateMode
from jpaged.frontend.watchdog import STALL_SECONDS
from jpaged.outputs import WeightUpdate, WeightVersion, joined_updates
from jpaged.routing import ROUTERS, PrefixAffine, Router, prefix_names

T = TypeVar("T")

logger = logging.getLogger(__name__)


class EngineThreads:
    """Owns several engines. It has the methods of `EngineThread`, and they may be called from any thread."""

    def __init__(
        self, engines: Sequence[Engine], routing: str, *, num_prefill: int = 0, watchdog_seconds: float = STALL_SECONDS
    ):
        """routing: name in ROUTERS. num_prefill: the first `num_prefill` engines only compute prompts."""
        self.num_prefill = num_prefill
        self._router = ROUTERS[routing]()     # for the engines that generate
        self._prefill_router = ROUTERS[routing]()
        self._lock = threading.Lock()         # guards the routers, _when_fatal, _num_running and _updated
        self._when_fatal: list[Callable[[EngineError], None]] = []
        self._num_running = len(engines)      # engines that have not failed
        self._updated: Future[None] = Future()  # done when no update of the weights runs
        self._updated.set_result(None)
        self.threads = tuple(
            EngineThread(engine, watchdog_seconds=watchdog_seconds, name=f"jpaged-engine-{index}")
            for index, engine in enumerate(engines)
        )
        self._block_size = engines[0].runner.block_size
        for index, thread in enumerate(self.threads):
            thread.when_fatal(partial(self._note_ended, index))

    def prefixes(self, request_group: RequestGroup) -> Sequence[int]:
        """Return the hashes of the prompt's prefixes, for `routed`. Takes time that grows with the prompt."""
        if not isinstance(self._router, PrefixAffine):
            return ()
        return prefix_names(request_group.prompt_token_ids, self._block_size, request_group.prefix_salt)

    @contextlib.contextmanager
    def routed(self, request_group: RequestGroup, prefixes: Sequence[int]) -> Iterator[EngineThread]:
        """Choose the engine of a request, yield its thread, and count the request as queued there.

        When the context ends without a call of `add`, the request no longer counts. Raises EngineError if all engines
        have ended, and CapacityError if all queues are full.
        """
        generating = range(self.num_prefill, len(self.threads))
        with self._routed_among(generating, self._router, request_group, prefixes) as thread:
            yield thread

    @contextlib.contextmanager
    def routed_prefill(self, request_group: RequestGroup, prefixes: Sequence[int]) -> Iterator[EngineThread]:
        """As `routed`, for the engines that only compute prompts."""
        among = range(self.num_prefill)
        with self._routed_among(among, self._prefill_router, request_group, prefixes) as thread:
            yield thread

    @contextlib.contextmanager
    def _routed_among(
        self, among: range, router: Router, request_group: RequestGroup, prefixes: Sequence[int]
    ) -> Iterator[EngineThread]:  # fmt: skip
        with contextlib.ExitStack() as stack:
            with self._lock:
                loads = self._loads(len(request_group.prompt_token_ids), among)
                thread = stack.enter_context(self.threads[router.choose(prefixes, loads)].routed(request_group, ()))
            yield thread

    def _loads(self, num_tokens: int, among: range) -> list[float]:
        """Return the number of requests of each engine; infinite for an engine that must not be chosen.

        Only open engines may be chosen. Engines without room for `num_tokens` tokens are excluded, if others have room.
        Of the rest, unhealthy engines are excluded, if others are healthy.
        """
        self._check_open(among)
        chosen = [index for index in among if self.threads[index].commands.is_open] or [among[0]]
        chosen = [index for index in chosen if self.threads[index].arrivals.has_room(num_tokens)] or chosen
        chosen = [index for index in chosen if self.threads[index].is_preferred] or chosen
        loads = [math.inf] * len(self.threads)
        for index in chosen:
            loads[index] = self.threads[index].arrivals.num_requests
        return loads

    def check_room(self, num_tokens: int = 0) -> None:
        """Raise CapacityError if no queue has room for `num_tokens` tokens, EngineError if all engines have ended."""
        self.check_open()
        generating = self.threads[self.num_prefill :]
        if not any(thread.commands.is_open and thread.arrivals.has_room(num_tokens) for thread in generating):
            next((thread for thread in generating if thread.commands.is_open), generating[0]).check_room(num_tokens)

    def stop(self, request_id: str, index: int, num_tokens: int) -> None:
        """End an answer whose text has ended after `num_tokens` tokens. One that has ended is ignored."""
        for thread in self.threads:
            thread.stop(request_id, index, num_tokens)

    def abort(self, request_id: str) -> None:
        """End a request. An id that is not in use is ignored."""
        for thread in self.threads:
            thread.abort(request_id)

    def inspect(self, engine: int = 0) -> Future[EngineCapture]:
        """Capture the state of an engine between two of its steps. Raises EngineError if it has ended."""
        return self.threads[engine].inspect()

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> Future[bool]:
        """Reset the prefix cache of each engine. The result is False if an engine had a request and was not reset."""
        self._forget()
        call = partial(EngineThread.reset_prefix_cache, reset_running_requests=reset_running_requests)
        return self._ask_all(call, all)

    def pause(self, mode: PauseMode, *, clear_cache: bool, level: int = 0) -> Future[None]:
        """Pause all engines, as `EngineThread.pause`."""
        if clear_cache:
            self._forget()
        return self._ask_all(partial(EngineThread.pause, mode=mode, clear_cache=clear_cache, level=level), _nothing)

    def resume(self) -> Future[None]:
        """End a pause of all engines."""
        return self._ask_all(EngineThread.resume, _nothing)

    def wake_up(self, tags: frozenset[str]) -> Future[None]:
        """Wake all engines up, as `EngineThread.wake_up`."""
        return self._ask_all(partial(EngineThread.wake_up, tags=tags), _nothing)

    def update_weights(
        self, leaves: Sequence[Callable[[], Iterable[Any]]], mode: UpdateMode, version: WeightVersion | None
    ) -> Future[WeightUpdate]:
        """Replace the weights of one engine after another, as `EngineThread.update_weights`. leaves: by engine.

        The update ends at the first error. An engine that has ended is left out. An update waits for the one before:
        the other engines copy the first one's arrays, which must not change meanwhile.
        """
        self._forget()
        joined: Future[WeightUpdate] = Future()
        updates: list[WeightUpdate] = []
        left = deque(zip(self.threads, leaves, strict=True))
        with self._lock:
            before, self._updated = self._updated, Future()
            ended = self._updated

        def continue_after(answered: Future[WeightUpdate] | None = None) -> None:
            """Start the next engine's update. answered: of the engine before; None: there was none."""
            try:
                if answered is not None:
                    updates.append(answered.result())
                while left and not left[0][0].commands.is_open:
                    left.popleft()
                if left:
                    thread, of_engine = left.popleft()
                    thread.update_weights([of_engine], mode, version).add_done_callback(continue_after)
                    return
                self.check_open()
                result = joined_updates(updates)
            except BaseException as error:
                with contextlib.suppress(InvalidStateError):  # the caller has cancelled it
                    joined.set_exception(error)
            else:
                with contextlib.suppress(InvalidStateError):
                    joined.set_result(result)
            ended.set_result(None)

        before.add_done_callback(lambda _: continue_after())
        return joined

    @property
    def is_paused(self) -> bool:
        """True while an engine holds new requests."""
        return any(thread.is_paused for thread in self.threads)

    @property
    def is_sleeping(self) -> bool:
        """True while a part of an engine's memory is freed."""
        return any(thread.is_sleeping for thread in self.threads)

    def when_fatal(self, callback: Callable[[EngineError], None]) -> None:
        """Call a function once when all engines have failed, on the last engine's thread."""
        with self._lock:
            self._when_fatal.append(callback)

    def check_open(self) -> None:
        """Raise EngineError when the engines are closed, or all generating engines have ended."""
        self._check_open(range(self.num_prefill, len(self.threads)))

    def _check_open(self, among: range) -> None:
        """Raise EngineError when none of these engines is open."""
        if not any(self.threads[index].commands.is_open for index in among):
            self.threads[among[0]].commands.check_open()

    def check_health(self) -> None:
        """Raise EngineError when one engine is not healthy, as `EngineThread.check_health`."""
        self.check_open()
        for index, thread in enumerate(self.threads):
            try:
                thread.check_health()
            except EngineError as error:
                raise EngineError(f"engine {index}: {error}") from None

    def close(self) -> None:
        """Abort all requests, end the threads, and free the device memory."""
        for thread in self.threads:
            thread.close()

    def _forget(self) -> None:
        """Reset the routers, before the engines empty their prefix caches."""
        with self._lock:
            self._router.forget()
            self._prefill_router.forget()

    def _note_ended(self, index: int, error: EngineError) -> None:
        """Count an engine that has failed."""
        with self._lock:
            self._num_running -= 1
            fatal = [] if self._num_running else self._when_fatal
            logger.critical("engine %d has ended, %d engines continue: restart the server", index, self._num_running)
        for callback in fatal:
            callback(error)

    def _ask_all(
        self, ask: Callable[[EngineThread], Future[T]], join: Callable[[list[T]], T]
    ) -> Future[T]:
        """Call `ask` for all engines that have not ended. Returns a future of `join(results)`, or the first error."""
        self.check_open()
        answers = []
        for thread in self.threads:
            with contextlib.suppress(EngineError):  # it has ended
                answers.append(ask(thread))
        joined: Future[T] = Future()
        left, lock = len(answers), threading.Lock()

        def note(answered: Future[T]) -> None:
            nonlocal left
            with lock:
                left -= 1
                if left:
                    return
            errors = [error for error in (answer.exception() for answer in answers) if error is not None]
            with contextlib.suppress(InvalidStateError):  # the caller has cancelled it
                if errors:
                    joined.set_exception(errors[0])
                else:
                    joined.set_result(join([answer.result() for answer in answers]))

        for answer in answers:
            answer.add_done_callback(note)
        return joined


def _nothing(answers: Sequence[None]) -> None:
    """Join results that are all None."""
