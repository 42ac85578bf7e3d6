"""Facts that a field of `SamplingParams` declares, besides its name, type, default and docstring."""

import dataclasses
import math
from typing import Any

FLOAT32_MAX = 3.4028234663852886e38


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """Facts of a sampling parameter. Checks, flags, columns of the request table and docs follow from them."""

    above: float = -math.inf  # a number must be greater than `above`, at least `least`, and at most `most`
    least: float = -math.inf
    most: float = math.inf
    beams: bool = True        # works with use_beam_search; a list in `sampling` has the parameters that are not numbers
    http: bool = True         # HTTP requests have a field of this name and type; else a route declares its own, or none
    flag: str | None = None   # help of its flag; None: `jpaged generate` has no flag, or declares its own
    column: int | None = None # its column in the request table, see `runtime.state.Field`
    full: bool = False        # only SamplerVariant.FULL applies it
    filters: bool = False     # keeps some tokens and drops others: rows that select the most likely token skip it

    @property
    def accepted(self) -> str:
        """Accepted numbers, as an error names them."""
        if self.most < math.inf:
            low, bracket = (self.above, "(") if self.above > -math.inf else (self.least, "[")
            return f"a number in {bracket}{low:g}, {self.most:g}]"
        if self.above > -math.inf:
            return f"a number above {self.above:g}"
        return f"a finite number from {self.least:g}" if self.least > -math.inf else "a finite number"

    def accepts(self, value: float) -> bool:
        """True for a finite float32 in the range."""
        return abs(value) <= FLOAT32_MAX and self.above < value <= self.most and value >= self.least


def parameter(default: Any, **facts: Any) -> Any:
    """A dataclass field with a default and the fields of `Parameter`."""
    return dataclasses.field(default=default, metadata={"parameter": Parameter(**facts)})
