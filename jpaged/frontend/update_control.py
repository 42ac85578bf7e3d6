"""Replaces the weights of an engine between two steps.

Called by: `EngineLoop` on the engine's thread.
Owns: the updates that wait until no request runs.
Never: checks the weights (`frontend/weight_updates.py`).
"""

from collections.abc import Callable
from functools import partial

from jpaged.engine.engine import Engine
from jpaged.errors import RequestError
from jpaged.frontend.commands import Update
from jpaged.frontend.engine_turns import EngineTurns
from jpaged.frontend.live_requests import LiveRequests
from jpaged.frontend.pause_control import PauseControl
from jpaged.frontend.pausing import UpdateMode


class UpdateControl:
    """State of weight updates.

    waiting:     updates with mode WAIT, until no request runs. New requests are held.
    is_updating: an update runs, and no step can.
    """

    def __init__(self, engine: Engine, requests: LiveRequests, turns: EngineTurns, pauses: PauseControl):
        self._engine = engine
        self._requests = requests
        self._turns = turns
        self._pauses = pauses
        self.waiting: list[Update] = []
        self.is_updating = False

    def begin(self, update: Update) -> None:
        """Replace the weights, or wait for the running requests; see `UpdateMode`."""
        if update.mode is not UpdateMode.WAIT or not self._engine.has_work:
            self._carry_out(update)
        elif self._pauses.is_frozen:
            known = "the engine is paused with running requests, which would never finish: resume it, or use 'keep'"
            update.answer.set_exception(RequestError("mode", update.mode.value, known))
        else:
            self.waiting.append(update)
            self._requests.is_held_for_update = True

    def finish(self) -> None:
        """Carry out the waiting updates, if no request runs. Then add the held requests, unless the engine pauses."""
        if not self.waiting or self._engine.has_work:
            return
        while self.waiting:  # if the engine ends here, the loop answers those that still wait
            self._carry_out(self.waiting[0])
            self.waiting.pop(0)
        self._requests.is_held_for_update = False
        if not self._pauses.is_paused:
            self._requests.add_held()

    def _carry_out(self, update: Update) -> None:
        self._turns.run(self._engine.flush)
        if update.mode is UpdateMode.ABORT:
            self._requests.abort_all()
        self.is_updating = True
        answer: Callable[[], None]
        try:
            answer = partial(update.answer.set_result, update.work(update.mode is UpdateMode.RECOMPUTE))
            self._pauses.note_new_weights()
        except Exception as error:  # the caller's: of its arrays, its iterator or its files
            answer = partial(update.answer.set_exception, error)
        finally:
            self._turns.note_idle()
            self.is_updating = False
        answer()
