"""Detokenizer for byte-level BPE: a table of bytes and an incremental UTF-8 decoder."""

import codecs
from collections.abc import Sequence
from typing import Any

from jpaged.engine.output.detokenizer.backend import is_continuation, special_ids, token_strings
from jpaged.engine.output.detokenizer.interface import Detokenizer

MAX_CHARACTER = 16  # tokens that a character may be spread over: four bytes, and special tokens between them


def _byte_of_character() -> dict[str, int]:
    """Alphabet of byte-level BPE: printable bytes are written as themselves, others as characters from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if chr(byte) not in table)
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


class ByteLevelDecoder:
    """A table with the bytes of each token, for byte-level tokenizers of the `tokenizers` library."""

    def __init__(self, backend: Any):
        byte_of = _byte_of_character()
        tokens = token_strings(backend)
        self._texts: list[str | None] = [""] * (max(tokens, default=-1) + 1)  # None: see `_parts`
        self._parts: dict[int, bytes] = {}  # bytes of tokens that are not whole characters
        for token_id, token in tokens.items():
            try:
                own = bytes([byte_of[character] for character in token])
            except KeyError:  # an added token with characters outside the alphabet stands for its own text
                own = token.encode()
            try:
                self._texts[token_id] = own.decode()
            except UnicodeDecodeError:
                self._texts[token_id] = None
                self._parts[token_id] = own
        special = special_ids(backend)
        self._texts_without_special = ["" if i in special else text for i, text in enumerate(self._texts)]

    def new(
        self, *, skip_special_tokens: bool, spaces_between_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> Detokenizer:
        """See TextDecoder. Never puts spaces between special tokens."""
        made = _ByteLevelDetokenizer(self._texts_without_special if skip_special_tokens else self._texts, self._parts)
        for token_id in after[-MAX_CHARACTER:]:
            made.add(token_id)
        return made

    def token_text(self, token_id: int) -> str:
        """See TextDecoder."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """See TextDecoder."""
        text = self._texts[token_id] if token_id < len(self._texts) else ""
        return self._parts[token_id] if text is None else text.encode()


class _ByteLevelDetokenizer:
    __slots__ = ("_decoder", "_incomplete", "_parts", "_texts")

    def __init__(self, texts: list[str | None], parts: dict[int, bytes]):
        self._texts = texts
        self._parts = parts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._incomplete = False  # the text ends with an incomplete character

    def offset_of_next(self, token_id: int) -> int:
        text = self._texts[token_id] if token_id < len(self._texts) else ""
        continues = text == "" or (text is None and is_continuation(self._parts[token_id][0]))
        return int(self._incomplete and not continues)

    def add(self, token_id: int) -> str:
        text = self._texts[token_id] if token_id < len(self._texts) else ""
        if text is not None and not self._incomplete:
            return text
        text = self._decoder.decode(self._parts[token_id] if text is None else text.encode())
        self._incomplete = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        self._incomplete = False
        return self._decoder.decode(b"", final=True)
