"""RepetitionDetectionParams: when an answer that goes round in circles ends. Checked when made, frozen afterwards."""

import dataclasses
from collections.abc import Mapping
from typing import Self

from jpaged.errors import RequestError, unknown_field

MAX_PATTERN = 1024  # tokens: each new one is compared with as many before it, 6 us


@dataclasses.dataclass(frozen=True)
class RepetitionDetectionParams:
    """The answer ends where its last tokens are one pattern, of some length, again and again.

    Names and defaults are vLLM's. Raises RequestError that names the field as `repetition_detection.FIELD`.
    """

    max_pattern_size: int = 0
    """Tokens of the longest pattern that is looked for; 0: none is."""

    min_pattern_size: int = 0
    """Tokens of the shortest one; 0 is 1."""

    min_count: int = 0
    """Times that the pattern must stand there, at least 2."""

    @classmethod
    def from_fields(cls, fields: object) -> Self:
        """From a mapping of its fields, or one of it as it is. Raises RequestError that names an unknown field."""
        if isinstance(fields, cls):
            return fields
        if not isinstance(fields, Mapping):
            accepted = "must be RepetitionDetectionParams, or its fields as a dict"
            raise RequestError("repetition_detection", fields, accepted)
        for name in fields:
            if name not in cls.__dataclass_fields__:
                raise unknown_field("repetition_detection", name, fields[name], cls.__dataclass_fields__)
        return cls(**fields)

    def __post_init__(self) -> None:
        self._check("max_pattern_size", 0, MAX_PATTERN)
        self._check("min_pattern_size", 0, self.max_pattern_size)
        if self.max_pattern_size == 0:
            self._check("min_count", 0, 0, " where max_pattern_size is 0")
            return
        self._check("min_count", 2, None)
        object.__setattr__(self, "min_pattern_size", max(self.min_pattern_size, 1))

    def _check(self, name: str, low: int, high: int | None, where: str = "") -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
            bounds = f"an integer from {low}" if high is None else f"an integer from {low} to {high}"
            raise RequestError(f"repetition_detection.{name}", value, f"must be {bounds}{where}")
