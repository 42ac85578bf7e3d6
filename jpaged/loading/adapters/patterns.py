"""`ModulePatterns`: values of PEFT's `rank_pattern` and `alpha_pattern` by module path."""

import re
from collections.abc import Mapping
from typing import Any

from jpaged.errors import ModelLoadError, shown

_LITERAL = re.compile(r"[\w.-]+")
# Limits of keys that are regular expressions: Python's `re` needs exponential time for a repeated group, and time
# n^k for k repetitions in a path of n characters. Three repetitions and 200 keys take at most milliseconds a module.
_MAX_EXPRESSIONS = 200
_MAX_LENGTH = 500      # characters
_MAX_REPETITIONS = 3


class ModulePatterns:
    """Finds the value of the first key that matches a module path, as PEFT does.

    A key is a regular expression for the end of the path: `(.*\\.)?(KEY)$`. Most keys are names, which need no `re`.
    """

    def __init__(self, patterns: Mapping[str, Any], label: str):
        """Raises ModelLoadError for a key that is not a regular expression, or that could take too long."""
        self._values = list(patterns.values())
        self._names: dict[str, int] = {}
        self._expressions: list[tuple[int, re.Pattern[str]]] = []
        for index, key in enumerate(patterns):
            if _LITERAL.fullmatch(key):
                self._names[key] = index
            else:
                self._expressions.append((index, _compile(key, label)))
        if len(self._expressions) > _MAX_EXPRESSIONS:
            raise ModelLoadError(
                f"{label} has {len(self._expressions)} regular expressions; at most {_MAX_EXPRESSIONS} are supported: "
                "use names of modules as keys"
            )

    def find(self, path: str, default: Any) -> Any:
        """The value for a module path; `default` if no key matches."""
        parts = path.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts)))
        found = [self._names[end] for end in ends if end in self._names]
        found += [index for index, expression in self._expressions if expression.match(path)]
        return self._values[min(found)] if found else default


def _compile(key: str, label: str) -> re.Pattern[str]:
    repetitions = sum(map(key.count, "*+{"))
    if len(key) > _MAX_LENGTH or repetitions > _MAX_REPETITIONS or re.search(r"\)[*+{]|\\\d|\(\?[^:]", key):
        raise ModelLoadError(
            f"{label}: the key {shown(key)} is too complex; supported are regular expressions of at most "
            f"{_MAX_LENGTH} characters and {_MAX_REPETITIONS} repetitions, without repeated groups: "
            "use names of modules as keys"
        )
    try:
        return re.compile(rf"(.*\.)?({key})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise ModelLoadError(f"{label}: the key {shown(key)} is not a regular expression: {error}") from None
