"""Whole numbers with a unit on the command line: `--max-model-len 32k`, as in vLLM."""

import dataclasses
import re
import types
import typing
from collections.abc import Sequence

from jpaged.config import EngineConfig
from jpaged.errors import RequestError

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")


def with_whole_numbers(args: Sequence[str]) -> list[str]:
    """Replace 32k by 32000 and 32K by 32768 in the engine's integer flags. 1.0005k raises RequestError: not whole."""
    end = args.index("--") if "--" in args else len(args)
    names = _whole_number_flags()
    words = list(args[:end])
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in names and equals:
            words[place] = f"{flag}={_in_full(flag, value)}"
        elif place and words[place - 1] in names:
            words[place] = _in_full(words[place - 1], word)
    return [*words, *args[end:]]


def _whole_number_flags() -> set[str]:
    """Return the flags of all integer engine options."""
    hints = typing.get_type_hints(EngineConfig)
    flags = set()
    for field in dataclasses.fields(EngineConfig):
        hint = hints[field.name]
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if int in kinds:
            flags.add(f"--{field.name.replace('_', '-')}")
    return flags


def _in_full(flag: str, word: str) -> str:
    found = _NUMBER.fullmatch(word)
    if found is None:
        return word  # no unit, or a mistake that the flag's own check reports
    value = float(found[1]) * UNITS[found[2]]
    if value != int(value):
        name = flag.removeprefix("--").replace("-", "_")
        raise RequestError(name, word, f"is {value:g}: must be a whole number")
    return str(int(value))
