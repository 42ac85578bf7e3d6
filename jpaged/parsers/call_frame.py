"""The texts of a dialect around forced calls, for grammars."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Set
from typing import Any

NAME = "$"    # in `CallFrame.head`: the name of the tool
NUMBER = "#"  # in `CallFrame.head`: a number


@dataclasses.dataclass(frozen=True, slots=True)
class Tags:
    """The tokenizer's added tokens, as grammars write them.

    ids:     ids of added tokens, special or not. A tag among them is written as its token, as models were trained to.
    special: the special ones. Free text cannot contain them.
    """

    ids: Mapping[str, int] = dataclasses.field(default_factory=dict)
    special: Set[str] = frozenset()

    def lark(self, text: str) -> str:
        """Return a text as Lark. Names of added tokens in it become the tokens."""
        names = sorted((name for name in self.ids if name and name in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        return " ".join(f"<[{self.ids[part]}]>" if part in self.ids else literal(part) for part in parts if part)

    def has_special(self, text: str) -> bool:
        """Return True if a special token's name is in a text."""
        return any(name in text for name in self.special)


# Returns the Lark rules of a tool's arguments, the first of them `rule: ...`; None: the dialect cannot enforce them.
Arguments = Callable[[str, Mapping[str, Any], Tags], list[str] | None]


@dataclasses.dataclass(frozen=True, slots=True)
class CallFrame:
    """The texts around forced calls: `begin (before head ARGUMENTS tail after, ...) finish`.

    head:      may contain NAME and NUMBER.
    between:   text between two calls. None: an answer has one call only.
    arguments: grammar of the arguments. None: JSON.
    optional:  `begin` may be missing.
    needs:     an added token without which this frame is not used.
    """

    head: str
    tail: str = ""
    begin: str = ""
    finish: str = ""
    before: str = ""
    after: str = ""
    between: str | None = ""
    arguments: Arguments | None = None
    optional: bool = False
    needs: str = ""


def json_frame(key: str = "arguments", **texts: Any) -> CallFrame:
    """Return a frame with calls like `{"name": ..., "arguments": ...}`."""
    return CallFrame(f'{{"name": "{NAME}", "{key}": ', "}", **texts)


def literal(text: str) -> str:
    """Return a literal of a Lark grammar. Its strings have JSON's syntax."""
    return json.dumps(text, ensure_ascii=False)
