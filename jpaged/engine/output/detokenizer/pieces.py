"""Detokenizer for SentencePiece-like tokenizers: a table of texts, with or without tokens for single bytes."""

import codecs
import dataclasses
from collections.abc import Sequence
from typing import Any

from jpaged.engine.output.detokenizer.backend import is_continuation, special_ids, token_strings
from jpaged.engine.output.detokenizer.interface import BROKEN, BYTE_TOKEN, Detokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class _Replacement:
    """Replace `old` by `new` in every token."""

    old: str
    new: str
    removed_in_first: bool = False  # Metaspace: the first token of a text loses `old`


@dataclasses.dataclass(frozen=True, slots=True)
class PieceRules:
    """How tokens become text, in this order: replace, join byte tokens, strip the beginning of the text."""

    replacements: tuple[_Replacement, ...]
    has_bytes: bool
    strip: tuple[str, int] = ("", 0)  # a character, and the largest number to strip

    @classmethod
    def of(cls, steps: Sequence[dict[str, Any]]) -> "PieceRules | None":
        """Read the steps of a decoder. None if there are other steps, or another order."""
        replacements: list[_Replacement] = []
        has_bytes, fused, strip = False, False, ("", 0)
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": new} if old and not has_bytes:
                    replacements.append(_Replacement(old, new))
                case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme} if not has_bytes:
                    replacements.append(_Replacement(old, " ", removed_in_first=scheme != "never"))
                case {"type": "ByteFallback"} if not has_bytes and not fused:
                    has_bytes = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": content, "start": start, "stop": 0} if fused and not strip[1]:
                    strip = (content, start)
                case _:
                    return None
            if fused and step["type"] not in ("Fuse", "Strip"):
                return None
        return cls(tuple(replacements), has_bytes, strip) if steps else None

    def text(self, token: str, *, first: bool) -> str:
        """Return a token's text. first: the token is the first of the text."""
        for rule in self.replacements:
            token = token.replace(rule.old, "" if first and rule.removed_in_first else rule.new)
        return token


class PieceDecoder:
    """A table with the text of each token, for SentencePiece-like tokenizers of the `tokenizers` library."""

    def __init__(self, backend: Any, rules: PieceRules):
        tokens = token_strings(backend)
        size = max(tokens, default=-1) + 1
        self.rules = rules
        self.texts: list[str | None] = [None] * size  # None: unknown id
        self.first_texts: dict[int, str] = {}  # tokens with another text at the beginning
        self.byte_of: dict[int, int] = {}
        for token_id, token in tokens.items():
            self.texts[token_id] = text = rules.text(token, first=False)
            first = rules.text(token, first=True)
            if first != text:
                self.first_texts[token_id] = first
            byte = BYTE_TOKEN.fullmatch(text) if rules.has_bytes else None
            if byte is not None:
                self.byte_of[token_id] = int(byte[1], 16)
        special = special_ids(backend)
        self.texts_without_special = [None if i in special else text for i, text in enumerate(self.texts)]

    def new(
        self, *, skip_special_tokens: bool, spaces_between_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> Detokenizer:
        """See TextDecoder. Never puts spaces between special tokens."""
        made = _PieceDetokenizer(self, self.texts_without_special if skip_special_tokens else self.texts)
        made.begin_after(after)
        return made

    def token_text(self, token_id: int) -> str:
        """See TextDecoder. Returns the text of a token inside a text, with its leading space."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """See TextDecoder."""
        if token_id in self.byte_of:
            return bytes([self.byte_of[token_id]])
        return (self.texts[token_id] or "").encode() if token_id < len(self.texts) else b""


class _PieceDetokenizer:
    __slots__ = ("_begun", "_byte_of", "_content", "_first_texts", "_run", "_strip", "_texts")

    def __init__(self, decoder: PieceDecoder, texts: list[str | None]):
        self._texts = texts
        self._byte_of = decoder.byte_of
        self._first_texts: dict[int, str] | None = decoder.first_texts  # None after the first token
        self._content, self._strip = decoder.rules.strip  # character to strip, and how many more of it
        self._run = bytearray()  # current run of byte tokens
        self._begun = 0  # characters that begin in the run

    def begin_after(self, token_ids: Sequence[int]) -> None:
        """Continue after these tokens, whose text is not returned."""
        for token_id in token_ids:
            if self._first_texts is None and not self._strip:
                break
            self.add(token_id)
        self._stripped(self._end_run())
        self._run += self._half_character(token_ids)
        self._begun = int(bool(self._run))

    def _half_character(self, token_ids: Sequence[int]) -> bytes:
        """Bytes of an incomplete character at the end of tokens."""
        tail: list[int] = []
        for token_id in reversed(token_ids):
            byte = self._byte_of.get(token_id)
            known = token_id < len(self._texts) and self._texts[token_id] is not None
            if len(tail) == 3 or (known and byte is None):
                break
            if known and byte is not None:
                tail.insert(0, byte)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(bytes(tail))
        return decoder.getstate()[0]

    def offset_of_next(self, token_id: int) -> int:
        text = self._texts[token_id] if token_id < len(self._texts) else None
        if not self._run:
            return 0
        if text is None or (token_id in self._byte_of and is_continuation(self._byte_of[token_id])):
            return max(self._begun - 1, 0)
        return self._begun if token_id in self._byte_of else len(_text_of_run(self._run))

    def add(self, token_id: int) -> str:
        text = self._texts[token_id] if token_id < len(self._texts) else None
        if text is None:
            return ""
        if self._first_texts is not None:
            text = self._first_texts.get(token_id, text)
            self._first_texts = None
        byte = self._byte_of.get(token_id)
        if byte is not None:
            self._run.append(byte)
            self._begun += not is_continuation(byte)
            return ""
        if self._run:
            text = self._end_run() + text
        return self._stripped(text) if self._strip else text

    def finish(self) -> str:
        text = self._end_run()
        return self._stripped(text) if self._strip else text

    def _end_run(self) -> str:
        run, self._run, self._begun = self._run, bytearray(), 0
        return _text_of_run(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if not text.startswith(self._content):
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


def _text_of_run(run: bytearray) -> str:
    """Decode a run of byte tokens as a whole: if it is not valid UTF-8, each byte is U+FFFD, as in `tokenizers`."""
    try:
        return run.decode()
    except UnicodeDecodeError:
        return BROKEN * len(run)
