"""Runs the turns of an engine, and remembers how they went: the engine's health.

Called by: `EngineLoop` and `PauseControl` on the engine's thread; `EngineThread` reads the health on any thread.
Owns: the errors of steps and integrity checks, the times of the last step and check, and the watchdog.
Never: decides when a turn may run.
"""

import logging
import math
import time
from collections.abc import Callable

from jpaged.engine.engine import Engine, Output, StepError
from jpaged.errors import EngineError
from jpaged.frontend.live_requests import LiveRequests
from jpaged.frontend.watchdog import Watchdog

logger = logging.getLogger(__name__)

RETRY_SECONDS = 10.0  # time after a failed step in which other engines are preferred
CHECK_AFTER_SECONDS = 1.0  # idle time before the integrity check: a request is then unlikely to wait for it
CHECK_EVERY_SECONDS = 60.0  # minimum time between two integrity checks: each walks the whole pool


class EngineTurns:
    """Steps, flushes and integrity checks of an engine."""

    def __init__(self, engine: Engine, requests: LiveRequests, watchdog: Watchdog):
        self._engine = engine
        self._requests = requests
        self._watchdog = watchdog
        self._step_error: EngineError | None = None  # of the last step
        self._failed_at = -math.inf                  # when a step failed last
        self._integrity_error: EngineError | None = None  # of the integrity check; only a new engine is healthy again
        self._last_step = time.monotonic()
        self._last_check = -math.inf
        self._next_check: float | None = None  # when to check the integrity; None: no step since the last check

    def check_health(self, num_running: int) -> None:
        """Raise EngineError if the last step or an integrity check failed, or no step ends although requests run."""
        if self._integrity_error is not None:
            raise self._integrity_error
        if self._step_error is not None:
            raise self._step_error
        stalled = time.monotonic() - self._last_step
        if num_running and stalled > self._watchdog.seconds:
            raise EngineError(f"no step has ended for {stalled:.0f} s with {num_running} requests running")

    def is_over(self, error: EngineError) -> bool:
        """Return True if `error` is of the last step, which failed more than RETRY_SECONDS ago."""
        return error is self._step_error and time.monotonic() - self._failed_at > RETRY_SECONDS

    # -- on the engine's thread -----------------------------------------------------------------------------------

    def run(self, turn: Callable[[], list[Output]]) -> None:
        """Run one turn of the engine, and post its outputs. turn: `Engine.step` or `Engine.flush`."""
        try:
            with self._watchdog.watching():
                outputs = turn()
        except StepError as error:
            logger.error("%s", error)
            self._step_error, self._failed_at = error, time.monotonic()
            self._requests.post((request_id, error) for request_id in error.request_ids)
        else:
            self._step_error = None
            self._requests.post((output.request_id, output) for output in outputs)
        self._requests.post_tokens()
        self._last_step = time.monotonic()
        self._next_check = max(self._last_step + CHECK_AFTER_SECONDS, self._last_check + CHECK_EVERY_SECONDS)

    def note_idle(self) -> None:
        """Count the time without a step from now on."""
        self._last_step = time.monotonic()

    @property
    def seconds_to_check(self) -> float | None:
        """Time until the next integrity check. None: no check is due, or requests run."""
        if self._next_check is None or self._engine.has_work:
            return None
        return max(self._next_check - time.monotonic(), 0.0)

    def check_integrity(self) -> None:
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
