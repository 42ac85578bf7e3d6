"""Limits on grammars: size, compile time, and the cost of one step."""

import dataclasses
from typing import Any

from jpaged.errors import RequestError


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """Limits of structured output, named as in `EngineConfig`. Raises RequestError unless all are positive numbers."""

    max_grammar_bytes: int = 65536        # of a schema, a grammar, or all choices together
    max_grammar_depth: int = 32           # schemas nested in each other
    max_grammar_enum: int = 10_000        # values of one `enum`, or choices
    max_regex_bytes: int = 4096           # of one regular expression
    grammar_compile_timeout: float = 5.0  # seconds
    grammar_cache_size: int = 64          # compiled grammars

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            whole = field.type is int
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not value > 0:
                raise RequestError(field.name, value, f"must be {'an integer from 1' if whole else 'a number above 0'}")

    @classmethod
    def from_options(cls, options: Any) -> "GrammarLimits":
        """Read the limits from an object with attributes of these names, such as an `EngineConfig`."""
        return cls(**{field.name: getattr(options, field.name) for field in dataclasses.fields(cls)})


# Limits on the cost of one step, in llguidance's units. All requests wait during a step, so it must stay short even for
# a hostile grammar. A parser item takes up to 7 us, a unit of lexer fuel 0.07 us (2 slow CPU cores).
STEP_LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,  # an object of 500 optional properties needs more than 2,000
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}

# Grammars, unlike schemas, can be ambiguous. With 10,000 items `s: "a" | "" | s s | s s s` took 88 ms a mask. With
# 2,000 it ends with an error within 16 ms. The JSON, C and chess grammars of llama.cpp need fewer than 500.
GRAMMAR_STEP_LIMITS: dict[str, Any] = STEP_LIMITS | {"step_max_items": 2_000}
