"""Interfaces of all detokenizers."""

import re
from collections.abc import Sequence
from typing import Protocol

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # name of a token for one byte, in tokenizers with byte fallback
BROKEN = "\ufffd"  # text of bytes that are not valid UTF-8


class Detokenizer(Protocol):
    """Turns the output tokens of one request into text."""

    def offset_of_next(self, token_id: int) -> int:
        """Return the number of characters between the returned text and the start of a token, if it is added next.

        A token that continues an incomplete character starts with it. For invalid UTF-8, the number is an estimate.
        """
        ...

    def add(self, token_id: int) -> str:
        """Append a token, and return the text that is certain now."""
        ...

    def finish(self) -> str:
        """Return the rest of the text. Called after the last token."""
        ...


class TextDecoder(Protocol):
    """Turns token ids into text. All requests share it."""

    def new(
        self, *, skip_special_tokens: bool, spaces_between_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> Detokenizer:
        """Return the detokenizer of a new request.

        after: the prompt. The text is what the answer adds to the prompt's text, so its first word keeps its space.
            A character that begins in the prompt and ends in the answer is text of the answer.
        """
        ...

    def token_text(self, token_id: int) -> str:
        """Return a token's text: a special token's name, U+FFFD for half a character, "" for an unknown id."""
        ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the exact bytes of a token, which may be half a character. None if the tokenizer hides them."""
        ...
