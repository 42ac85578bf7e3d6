"""Measured seconds of the programs that decode with and without drafts."""

import collections
import enum

WINDOW = 7  # the estimate is the lower quartile of this number of measurements


class ProgramKind(enum.Enum):
    """A kind of program. Its size is a number of rows, or of tokens for VERIFY."""

    DECODE = "decode"    # one token for each row: forward and sampling program
    VERIFY = "verify"    # tokens and drafts of all rows: forward and sampling program
    PROPOSE = "propose"  # drafts of all rows, by a model


class ProgramTimes:
    """Estimates the seconds of each program as the lower quartile of its last WINDOW measurements: the second lowest.

    A step may be slow by chance, because another program ran too or the host was late. It is never fast by chance. So
    five slow steps of seven do not move the estimate, and it follows a lasting change after six measurements.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[ProgramKind, int], collections.deque[float]] = {}
        self._seconds: dict[tuple[ProgramKind, int], float] = {}
        self._last: dict[tuple[ProgramKind, int], int] = {}
        self._counts: collections.Counter[tuple[ProgramKind, int]] = collections.Counter()
        self._old: set[tuple[ProgramKind, int]] = set()

    def note(self, kind: ProgramKind, size: int, seconds: float, step: int) -> None:
        """Add a measurement, made at a step of the budget."""
        key = kind, size
        values = self._values.setdefault(key, collections.deque(maxlen=WINDOW))
        if key in self._old and seconds < self._seconds.get(key, 0.0):
            values.clear()
        self._old.discard(key)
        values.append(seconds)
        self._seconds[key] = sorted(values)[(len(values) - 1) // 4]
        self._last[key] = step
        self._counts[key] += 1

    def seconds(self, kind: ProgramKind, size: int) -> float | None:
        """The estimate. None if the program was never measured."""
        return self._seconds.get((kind, size))

    def last_step(self, kind: ProgramKind, size: int) -> int:
        """Step of the last measurement, -1 if there is none."""
        return self._last.get((kind, size), -1)

    def is_settled(self, kind: ProgramKind, size: int) -> bool:
        """Whether there were two measurements or more. A single one may be an outlier."""
        return self._counts[kind, size] > 1

    def doubt(self, kind: ProgramKind, size: int) -> None:
        """Let the next measurement replace all earlier ones if it is lower than their estimate.

        The earlier ones may be out of date. A lower measurement is no outlier. A higher one may be, and is only added:
        a program that has become slower is measured again as soon as it is chosen.
        """
        self._old.add((kind, size))
