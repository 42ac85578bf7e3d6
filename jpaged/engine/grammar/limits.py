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


# What one compile and one step may cost, in llguidance's own units. It takes some 14,000 of lexer fuel and 20,000
# items a millisecond: a step ends within about 10 ms however hostile the grammar. Its own defaults allow 85 ms (an
# ambiguous Lark grammar, `s: "a" | s s | s s s`), in which all other requests would wait.
STEP_LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
