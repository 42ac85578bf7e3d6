"""Writes texts that contain names of special tokens as parts of a Lark grammar."""

import dataclasses
import json
import re
from collections.abc import Container, Mapping, Set


@dataclasses.dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens of a tokenizer: their ids by name, and the ids of end-of-sequence tokens."""

    ids: Mapping[str, int] = dataclasses.field(default_factory=dict)
    end_ids: Set[int] = frozenset()

    def split(self, text: str) -> list[str]:
        """Split a text into names of special tokens and the texts between them. No part is empty."""
        names = [name for name in self.ids if name in text]
        if not names:
            return [text] if text else []
        names.sort(key=len, reverse=True)
        return [part for part in re.split(f"({'|'.join(map(re.escape, names))})", text) if part]

    def lark(self, text: str) -> str:
        """Return a text as Lark. The name of a special token becomes the token."""
        return " ".join(f"<[{self.ids[part]}]>" if part in self.ids else json.dumps(part) for part in self.split(text))

    def free(self, used: Container[str]) -> str:
        """Return Lark for any special token that is not in `used` and ends no answer. "" if there is none."""
        ids = sorted({token_id for name, token_id in self.ids.items() if name not in used} - self.end_ids)
        return f"<[{','.join(map(str, ids))}]>" if ids else ""
