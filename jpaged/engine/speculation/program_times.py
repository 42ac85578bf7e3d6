"""Estimated seconds of the programs that decode with and without drafts, from the times of runs of steps."""

import bisect
import collections
import dataclasses
import enum
from collections.abc import Mapping, Sequence

RATE = 0.2           # share of a run's error that is corrected; after few measurements more, as in a mean
FIRST_STEPS = 4      # whose lowest time is the first estimate
MOST_TIMES = 2.0     # a step counts as at most this multiple of its estimate: another program ran too
DRIFT = 0.002        # with each run that does not measure it, a program's estimate falls by this share
FIRST_DRIFT = 0.05   # the same after one measurement, which may be an outlier. After n of them: FIRST_DRIFT / n**2
LEAST_STEPS = 4      # of a program, in one or several runs, that count as a measurement


class ProgramKind(enum.Enum):
    """A kind of program. Its size is a number of rows, or of tokens for VERIFY."""

    DECODE = "decode"  # one token for each row: forward and sampling program
    VERIFY = "verify"  # tokens and drafts of all rows: forward and sampling program, with the drafter's on the device


Program = tuple[ProgramKind, int]


def decode_size(row_sizes: Sequence[int], num_rows: int) -> int:
    """Rows of the decode program of a step with `num_rows` rows. row_sizes: of all decode programs, ascending."""
    return row_sizes[min(bisect.bisect_left(row_sizes, num_rows), len(row_sizes) - 1)]


@dataclasses.dataclass(slots=True)
class Estimate:
    """A quantity that is measured now and then, and looks better the longer it was not.

    So whatever is not chosen is measured again, the sooner the less it loses. If it looks better by a share with
    each run, trying it costs at most that share of the time.
    """

    value: float
    count: int = 1    # measurements
    measured: int = 0  # number of the run of the last measurement

    def note(self, value: float, run: int) -> None:
        """Replace the value after a measurement in a run."""
        self.value, self.count, self.measured = value, self.count + 1, run

    def hoped(self, run: int, drift: float) -> float:
        """The value as it looks in a run. drift: share by which it falls with each run."""
        share = max(drift, FIRST_DRIFT / self.count**2)
        return self.value * (1 - share) ** (run - self.measured)


class ProgramTimes:
    """Estimates the seconds of each program.

    The time between two arrivals is not that of one program: if the host was late for the first, a part of it belongs
    to the step before. Over a run of steps such parts cancel. So a run is one linear equation, the sum of its programs'
    seconds, and the estimates follow the equations by normalised least mean squares.
    """

    def __init__(self) -> None:
        self._estimates: dict[Program, Estimate] = {}
        self._steps: collections.Counter[Program] = collections.Counter()  # since the last measurement
        self._first: collections.Counter[Program] = collections.Counter()  # first steps, up to FIRST_STEPS
        self._run = 0

    def note(self, programs: Mapping[Program, int], seconds: float, *, had_choice: bool = True) -> None:
        """Add a run. programs: how often each ran in it, at least once. seconds: the sum of its `usual` seconds.

        had_choice: other programs could have run. Else they do not look better afterwards.
        """
        self._run += had_choice
        times = {each: self._estimates[each].value * count for each, count in programs.items()}
        error, norm = seconds - sum(times.values()), sum(value**2 for value in times.values())
        for each, count in programs.items():  # each changes by the share that it has in the run
            estimate = self._estimates[each]
            rate = max(RATE, 1 / (1 + estimate.count))
            estimate.value *= max(1 + rate * error * times[each] / norm, 0.1)
            self._steps[each] += count
            if self._steps[each] >= LEAST_STEPS:
                estimate.note(estimate.value, self._run)
                self._steps[each] = 0

    def usual(self, program: Program, seconds: float) -> float:
        """The seconds of a step that ran a program, without an outlier's excess. Call it for each step of a run.

        The first estimate of a program is the lowest of its first FIRST_STEPS steps. If that is too low, the program is
        chosen, and so corrected.
        """
        estimate = self._estimates.get(program)
        if estimate is None:
            estimate = self._estimates[program] = Estimate(seconds, measured=self._run)
        if self._first[program] < FIRST_STEPS:
            self._first[program] += 1
            estimate.value = min(estimate.value, seconds)
        return min(seconds, MOST_TIMES * estimate.value)

    def is_known(self, program: Program) -> bool:
        """Whether a program was measured."""
        return program in self._estimates

    def seconds(self, kind: ProgramKind, size: int) -> float | None:
        """The estimate. None if the program was never measured."""
        estimate = self._estimates.get((kind, size))
        return None if estimate is None else estimate.value

    def hoped(self, kind: ProgramKind, size: int) -> float | None:
        """The estimate, lower the longer the program did not run."""
        estimate = self._estimates.get((kind, size))
        return None if estimate is None else estimate.hoped(self._run, DRIFT)
