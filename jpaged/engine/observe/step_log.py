"""The last steps that the device has finished, for snapshots of the engine."""

import dataclasses
from collections import deque

from jpaged.engine.strategies import CollectedStep
from jpaged.snapshot import StepSnapshot

MAX_STEPS = 256  # two seconds of steps of 8 ms; a snapshot copies all of them


@dataclasses.dataclass(slots=True)
class LoggedStep:
    """Size and time of one step. Nothing changes it; `frozen` takes more than twice as long to create."""

    index: int          # steps finished before this one
    rows: int
    decodes: int        # rows that computed their last sampled token
    prompt_tokens: int  # tokens of chunks of prompts
    began: float        # seconds of `time.monotonic()`
    ended: float
    drafts: int = 0     # tokens of the step that are drafts

    def described(self, now: float) -> StepSnapshot:
        """The step as plain data. now: seconds of the same clock."""
        seconds = self.ended - self.began
        age = now - self.ended
        return StepSnapshot(self.index, self.rows, self.decodes, self.prompt_tokens, seconds, age, self.drafts)


class StepLog:
    """A ring of the last MAX_STEPS steps. Adding one takes 2 µs, whatever the step's size (busy AMD EPYC)."""

    def __init__(self) -> None:
        self._steps: deque[LoggedStep] = deque(maxlen=MAX_STEPS)
        self._num_steps = 0

    def add(self, collected: CollectedStep) -> None:
        """Add a finished step."""
        plan = collected.step.plan
        num_prompt = len(plan.prompt_tokens)
        self._steps.append(
            LoggedStep(
                self._num_steps, len(plan.rows), plan.num_decodes, num_prompt, collected.began, collected.now,
                plan.total_tokens - plan.num_decodes - num_prompt,
            )
        )  # fmt: skip
        self._num_steps += 1

    def last(self) -> tuple[LoggedStep, ...]:
        """The steps, oldest first."""
        return tuple(self._steps)
