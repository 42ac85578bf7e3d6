"""RepetitionDetectionParams: when a repetitive answer ends. Checked when created, then immutable."""

import dataclasses
from collections.abc import Mapping
from typing import Self

from jpaged.errors import MAX_INTEGER, RequestError, unknown_field

MAX_PATTERN = 1024  # tokens; each new token is compared with this many earlier tokens, in 6 us


@dataclasses.dataclass(frozen=True)
class RepetitionDetectionParams:
    """End an answer when its last tokens are one pattern, repeated `min_count` times.

    Names and defaults are vLLM's. Raises RequestError that names the field as `repetition_detection.FIELD`.
    """

    max_pattern_size: int = 0
    """Length of the longest pattern, in tokens, from 0 to 1,024. 0 switches the detection off."""

    min_pattern_size: int = 0
    """Length of the shortest pattern, in tokens, from 0 to `max_pattern_size`. 0 means 1."""

    min_count: int = 0
    """Number of repetitions that ends the answer, at least 2. It must be 0 if `max_pattern_size` is 0."""

    @classmethod
    def from_fields(cls, fields: object) -> Self:
        """Create from a mapping of fields; return an instance unchanged. Raises RequestError for an unknown field."""
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
            self._check("min_count", 0, 0, " if max_pattern_size is 0")
            return
        self._check("min_count", 2, MAX_INTEGER)
        object.__setattr__(self, "min_pattern_size", max(self.min_pattern_size, 1))

    def _check(self, name: str, low: int, high: int, where: str = "") -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            accepted = f"must be an integer from {low} to {high}{where}"
            raise RequestError(f"repetition_detection.{name}", value, accepted)
