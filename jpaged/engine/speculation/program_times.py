"""Measured seconds of the programs that decode with and without drafts."""

import collections
import enum

WINDOW = 7  # measurements of which the estimate is the median


class ProgramKind(enum.Enum):
    """A kind of program. Its size is a number of rows, or of tokens for VERIFY."""

    DECODE = "decode"    # one token for each row: forward and sampling program
    VERIFY = "verify"    # tokens and drafts of all rows: forward and sampling program
    PROPOSE = "propose"  # drafts of all rows, by a model


class ProgramTimes:
    """Estimates the seconds of each program as the median of its last WINDOW measurements.

    A step that was slow by chance, because another program ran too or the host was late, does not move the median. Of
    two middle values it takes the lower one. A lasting change is followed after WINDOW // 2 + 1 measurements.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[ProgramKind, int], collections.deque[float]] = {}
        self._seconds: dict[tuple[ProgramKind, int], float] = {}
        self._last: dict[tuple[ProgramKind, int], int] = {}
        self._old: set[tuple[ProgramKind, int]] = set()

    def note(self, kind: ProgramKind, size: int, seconds: float, step: int) -> None:
        """Add a measurement, made at a step of the budget."""
        key = kind, size
        values = self._values.setdefault(key, collections.deque(maxlen=WINDOW))
        if key in self._old:
            self._old.remove(key)
            values.clear()
        values.append(seconds)
        self._seconds[key] = sorted(values)[(len(values) - 1) // 2]
        self._last[key] = step

    def seconds(self, kind: ProgramKind, size: int) -> float | None:
        """The estimate. None if the program was never measured."""
        return self._seconds.get((kind, size))

    def last_step(self, kind: ProgramKind, size: int) -> int:
        """Step of the last measurement, -1 if there is none."""
        return self._last.get((kind, size), -1)

    def replace_next(self, kind: ProgramKind, size: int) -> None:
        """Let the next measurement replace all earlier ones: they were made under conditions long ago."""
        self._old.add((kind, size))
