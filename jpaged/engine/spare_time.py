"""How long the host may wait before it schedules the next step, so that requests that arrive meanwhile are in it.

Called by: `Engine`, after each step and between two.
Owns: the times of the latest steps.
Never: waits.

The device has one step to run when the host schedules the next. Scheduled at once, a request that arrives while step k
runs is in step k+2: its first token takes 2.5 steps on average, and 3 at most. Scheduled after SHARE of step k, it is
in step k+1 if it arrived before: 1.9 steps on average, and 2.4 at most.
"""

import collections
import dataclasses

SHARE = 0.6  # of the shortest likely time of the step on the device
STEPS = 8    # that are remembered
ALIKE = 2    # of them must have had no more tokens: one may have been slow by chance


@dataclasses.dataclass(frozen=True, slots=True)
class _StepTime:
    tokens: int     # that the step computed
    seconds: float  # on the device
    host: float     # seconds in which the host scheduled and dispatched a step


class SpareTime:
    """Estimates low, because a device that waits for the host loses more than a request that waits for a step."""

    def __init__(self) -> None:
        self._latest: collections.deque[_StepTime] = collections.deque(maxlen=STEPS)

    def note(self, tokens: int, seconds: float, host: float) -> None:
        """Add a step of `tokens` tokens. host: seconds that scheduling and dispatching a step took."""
        self._latest.append(_StepTime(tokens, seconds, host))

    def forget(self) -> None:
        """Forget all steps: the next ones may have much shorter contexts. Called when the device was idle."""
        self._latest.clear()

    def seconds(self, tokens: int) -> float:
        """Seconds after the start of a step of `tokens` tokens until the host must schedule the next.

        The step takes at least as long as the shortest of the latest steps with no more tokens, if there are ALIKE. The
        host needs no longer than it did in all of them. At most 0 if too little is known.
        """
        if len(self._latest) < STEPS:
            return 0.0
        smaller = [step.seconds for step in self._latest if step.tokens <= tokens]
        shortest = min(smaller) if len(smaller) >= ALIKE else 0.0
        return SHARE * shortest - sum(step.host for step in self._latest) / STEPS
