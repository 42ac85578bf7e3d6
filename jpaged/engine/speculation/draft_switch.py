"""Decides whether a drafter is asked at all, from the measured seconds per token with and without it."""

import dataclasses
from collections.abc import Sequence

from jpaged.engine.speculation.program_times import Estimate, decode_size

DRIFT = 0.003       # with each run of one way, the other looks better by this share
WEIGHT = 0.2        # of a new measurement, once there are several
TRIAL = 2           # runs of a way that is tried again, before the two are compared
MUCH = 1.3          # a trial of more than this multiple of the other's cost ends at once
TRIAL_WEIGHT = 0.5  # of their measurements: text and load may have changed
MOST_OUTLIER = 1.5  # a measurement counts as at most this multiple of the estimate: another program ran too


@dataclasses.dataclass(slots=True)
class _Mode:
    """The two ways to decode a similar number of rows, and the one in use."""

    is_on: bool = False
    run: int = 0
    trial: int = 0  # further runs before the two ways are compared
    costs: dict[bool, Estimate] = dataclasses.field(default_factory=dict)  # seconds per step and its tokens per row


class DraftSwitch:
    """Compares decoding with and without a drafter, for each number of rows that has a decode program.

    `DraftBudget` knows the times of programs. It does not know what the drafter costs: the host's work for proposals, a
    draft head that follows all steps, a draft model that catches up. The switch measures all of it, as seconds per
    token. The way that is not in use looks a little better with each run (`Estimate`), so it is tried again.

    Plain decoding comes first, then decoding with the drafter.
    """

    def __init__(self, row_sizes: Sequence[int]):
        """row_sizes: rows of each decode program."""
        self._row_sizes = sorted(row_sizes)
        self._modes = {size: _Mode() for size in self._row_sizes}

    def is_on(self, num_rows: int) -> bool:
        """Whether the drafter is asked in a step of `num_rows` rows."""
        return self._mode(num_rows).is_on

    def note_new(self, num_rows: int, num_new: int) -> None:
        """Note that some of the rows have new requests: the drafter may suit them, so it is tried sooner."""
        mode = self._mode(num_rows)
        if not mode.is_on and True in mode.costs and num_new:
            mode.costs[True].count = min(mode.costs[True].count, max(1, num_rows // num_new))

    def note(self, num_rows: int, cost: float) -> bool:
        """Note a run of steps in the mode of its number of rows. Returns whether the mode has changed.

        cost: seconds of the run x rows / tokens. Without drafts it is the seconds of a step.
        """
        mode = self._mode(num_rows)
        mode.run += 1
        estimate, weight = mode.costs.get(mode.is_on), TRIAL_WEIGHT if mode.trial else WEIGHT
        if estimate is None:
            mode.costs[mode.is_on] = estimate = Estimate(cost, measured=mode.run)
        else:
            before = estimate.hoped(mode.run - 1, DRIFT)  # what made the switch choose it
            change = (cost if mode.trial else min(cost, MOST_OUTLIER * before)) - before
            estimate.note(before + max(weight, 1 / (estimate.count + 1)) * change, mode.run)
        mode.trial -= mode.trial > 0
        other = mode.costs.get(not mode.is_on)
        is_tried = mode.trial > 0 and (other is None or estimate.value < MUCH * other.value)
        if is_tried or (other is not None and other.hoped(mode.run, DRIFT) >= estimate.value):
            return False
        mode.is_on, mode.trial = not mode.is_on, TRIAL
        return True

    def _mode(self, num_rows: int) -> _Mode:
        return self._modes[decode_size(self._row_sizes, num_rows)]
