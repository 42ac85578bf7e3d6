"""How much a grammar may ask for; the engine's options of the same names."""

import dataclasses
from typing import Any

from jpaged.errors import RequestError


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """Limits of structured output; fields of `EngineConfig` of the same names. Raises RequestError for a bad one."""

    max_grammar_bytes: int = 65536
    max_grammar_depth: int = 32
    max_grammar_enum: int = 10_000
    max_regex_bytes: int = 4096
    grammar_compile_timeout: float = 5.0
    grammar_cache_size: int = 64

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            whole = field.type is int
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not value > 0:
                raise RequestError(field.name, value, f"must be {'an integer from 1' if whole else 'a number above 0'}")

    @classmethod
    def from_options(cls, options: Any) -> "GrammarLimits":
        """From whatever has attributes of these names, such as an EngineConfig."""
        return cls(**{field.name: getattr(options, field.name) for field in dataclasses.fields(cls)})


# What one step may cost, in llguidance's own units: a step, in which all other requests wait, must stay short however
# hostile the grammar. An item of the parser takes up to 7 us, a unit of lexer fuel 0.07 us (2 slow CPU cores).
STEP_LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,  # an object of 500 optional properties needs more than 2,000
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}

# Grammars can be ambiguous where schemas are not: `s: "a" | "" | s s | s s s` took 88 ms a mask with 10,000 items, and
# ends with an error within 16 ms with 2,000. The JSON, C and chess grammars of llama.cpp need fewer than 500.
GRAMMAR_STEP_LIMITS: dict[str, Any] = STEP_LIMITS | {"step_max_items": 2_000}
