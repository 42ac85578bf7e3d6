"""Pauses an engine, and puts it to sleep.

Called by: `EngineLoop` on the engine's thread; `EngineThread` reads the state on any thread.
Owns: the paused and sleeping state, and the pauses that wait until no request runs.
Never: takes a lock, or checks arguments (`frontend/pausing.py`).
"""

from jpaged.engine.engine import Engine
from jpaged.errors import EngineError, RequestError
from jpaged.frontend.commands import Pause
from jpaged.frontend.engine_turns import EngineTurns
from jpaged.frontend.live_requests import LiveRequests
from jpaged.frontend.pausing import WAKE_TAGS, PauseMode


class PauseControl:
    """State of pause and sleep.

    is_paused: new requests are held.
    asleep:    tags of `wake_up` that sleep. If none does but the weights are discarded, the pause lasts until
        `note_new_weights`.
    waiting:   pauses that wait until no request runs.
    """

    def __init__(self, engine: Engine, requests: LiveRequests, turns: EngineTurns):
        self._engine = engine
        self._requests = requests
        self._turns = turns
        self.is_paused = False
        self.asleep: frozenset[str] = frozenset()
        self.waiting: list[Pause] = []
        self._waits_for_weights = False  # `wake_up` has woken all parts, but there are no weights

    @property
    def is_frozen(self) -> bool:
        """True if the engine must run no step, even if it has requests."""
        return bool(self.asleep) or (self.is_paused and not self.waiting)

    def pause(self, pause: Pause) -> None:
        """Pause; see `PauseMode`."""
        self.is_paused = True
        self.waiting.append(pause)
        if pause.mode is not PauseMode.WAIT:
            self._turns.run(self._engine.flush)
        if pause.mode is PauseMode.ABORT:
            self._requests.abort_all()
        self.finish()

    def finish(self) -> None:
        """Complete the waiting pauses, unless the newest has mode WAIT and requests still run."""
        if not self.waiting or (self.waiting[-1].mode is PauseMode.WAIT and self._engine.has_work):
            return
        while self.waiting:  # if the engine ends here, the loop answers those that still wait
            pause = self.waiting.pop(0)
            try:
                if (pause.level and not self.asleep) or pause.level > 1:
                    self._engine.sleep(discard_weights=pause.level > 1)
                    self.asleep = frozenset(WAKE_TAGS)
                elif pause.clear_cache and not self.asleep:
                    self._engine.reset_prefix_cache(reset_running_requests=True)
            except BaseException as error:
                pause.answer.set_exception(EngineError(f"the engine has ended: {error}"))
                raise
            pause.answer.set_result(None)

    def resume(self) -> None:
        """End the pause, and add the held requests.

        Raises RequestError if the engine sleeps, and NoWeightsError if it has no weights.
        """
        if self.asleep:
            raise RequestError("resume", ", ".join(sorted(self.asleep)), "the engine sleeps: wake it up")
        self._engine.require_weights()
        for pause in self.waiting:
            error = RequestError("mode", pause.mode.value, "the engine was resumed before its requests had finished")
            pause.answer.set_exception(error)
        self.waiting.clear()
        self.is_paused = self._waits_for_weights = False
        self._turns.note_idle()
        self._requests.add_held()

    def wake_up(self, tags: frozenset[str]) -> None:
        """Allocate the memory of these parts. Resume if all parts are awake, and the weights are not discarded.

        Raises EngineError without the memory.
        """
        if self.asleep:
            self._engine.wake_up(weights="weights" in tags, kv_cache="kv_cache" in tags)
            self.asleep -= tags
        if self.asleep:
            return
        self._waits_for_weights = self._engine.runner.weights_problem() is not None
        if not self._waits_for_weights:
            self.resume()

    def note_new_weights(self) -> None:
        """Resume, if `wake_up` found no weights."""
        if self._waits_for_weights and not self.asleep:
            self.resume()

    def require_weights(self) -> None:
        """Raise NoWeightsError if the engine is awake without weights. While it sleeps, requests wait."""
        if not self.asleep:
            self._engine.require_weights()
