"""The loop of an engine's thread: carries out commands between two steps, and steps.

Called by: the thread of `EngineThread`, which runs it once.
Owns: the order of commands, steps and checks on the engine's thread.
Never: is called from another thread.
"""

import contextlib
import dataclasses
import logging
from concurrent.futures import InvalidStateError

from jpaged.engine.engine import Engine
from jpaged.errors import EngineError, RequestError
from jpaged.frontend.arrivals import Arrivals
from jpaged.frontend.commands import Abort, Add, Call, Command, CommandQueue, Inspect, Pause, Stop, Update
from jpaged.frontend.engine_turns import EngineTurns
from jpaged.frontend.live_requests import LiveRequests
from jpaged.frontend.pause_control import PauseControl
from jpaged.frontend.update_control import UpdateControl

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineLoop:
    """Carries out commands and steps, until the engine is closed or fails."""

    engine: Engine
    commands: CommandQueue
    requests: LiveRequests
    arrivals: Arrivals
    turns: EngineTurns
    pauses: PauseControl
    updates: UpdateControl

    def run(self) -> None:
        """Carry out commands and step. Then end all requests, and close the engine."""
        try:
            self._end(self._serve())
        finally:
            self.engine.close()

    def _serve(self) -> EngineError | None:
        """Carry out commands and step, until `close` or until the engine fails. Returns the failure.

        BaseException is caught too: otherwise, clients would wait forever after a SystemExit or a Rust panic.
        """
        try:
            while self._carry_out_commands():
                if self._can_step:
                    if self.engine.spare_seconds > 0:  # a command came before the next step is due
                        continue
                    self.turns.run(self.engine.step)
                    self.pauses.finish()
                    self.updates.finish()
                    self.arrivals.publish()
                elif self.turns.seconds_to_check == 0:
                    self.turns.check_integrity()
            self.requests.is_held_for_update = False
            self.requests.add_held()
            self.requests.abort_all()
        except BaseException as error:
            logger.critical("the engine thread ends", exc_info=True)
            return EngineError(f"the engine has ended: {type(error).__name__}: {error}")
        return None

    def _end(self, failure: EngineError | None) -> None:
        """End the commands and requests that are left, with an error."""
        ended, left, callbacks = self.commands.end(failure)
        for command in (*left, *self.pauses.waiting, *self.updates.waiting):
            match command:
                case Add(request_group, stream):
                    self.requests.live[request_group.request_id] = stream
                case Inspect(answer=answer) | Call(answer=answer) | Pause(answer=answer) | Update(answer=answer):
                    with contextlib.suppress(InvalidStateError):  # cancelled, or answered before the engine failed
                        answer.set_exception(ended)
        self.requests.post([(request_id, ended) for request_id in self.requests.live])
        for callback in callbacks:
            callback(ended)

    @property
    def _can_step(self) -> bool:
        return self.engine.has_work and not self.pauses.is_frozen

    def _carry_out_commands(self) -> bool:
        """Carry out all commands. Returns False after `close`.

        An engine waits here for a command: an idle one until the next integrity check, one with work until it must
        schedule the next step.
        """
        commands = self.commands
        with commands.changed:
            while not (commands.waiting or commands.is_closing):
                if self._can_step:
                    if (spare := self.engine.spare_seconds) <= 0:
                        break
                    commands.changed.wait(spare)
                else:
                    woken = commands.changed.wait(self.turns.seconds_to_check)
                    self.turns.note_idle()
                    if not woken:
                        break
            if commands.is_closing:
                return False
        count = len(commands.waiting)
        for _ in range(count):
            self._carry_out(commands.waiting[0])
            commands.waiting.popleft()  # last, so that `_end` finds a command that failed, and reports the failure
        if count:
            self.updates.finish()  # an abort may have ended the last request
            self.arrivals.publish()
        return True

    def _carry_out(self, command: Command) -> None:
        match command:
            case Add(request_group) as add:
                self.requests.begin(add, hold=self.pauses.is_paused)
                self.arrivals.note_queued(request_group)
            case Abort(request_id):
                self.requests.abort(request_id)
            case Stop(request_id, index, num_tokens):
                self.requests.stop(request_id, index, num_tokens)
            case Inspect(answer):
                self.engine.inspect(answer)
            case Call(work, answer) if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(work())
                except (RequestError, EngineError) as error:  # concerns this call only
                    answer.set_exception(error)
            case Pause(answer=answer) as pause if answer.set_running_or_notify_cancel():
                self.pauses.pause(pause)
            case Update(answer=answer) as update if answer.set_running_or_notify_cancel():
                self.updates.begin(update)
