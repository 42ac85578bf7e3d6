"""Detokenizer for any transformers tokenizer: decodes the last few tokens with and without the new one."""

import enum
import functools
from collections.abc import Sequence
from typing import Any

from jpaged.engine.output.detokenizer.interface import BROKEN, BYTE_TOKEN, Detokenizer

MAX_PENDING = 8  # pending tokens of a window; a character has at most four bytes
MAX_WINDOW = 64  # tokens without any text that a window keeps


class TokenKind(enum.Enum):
    """How a token contributes to the text."""

    TEXT = "text"
    BYTE = "byte"        # one byte of a character without a token; a run of byte tokens is decoded as a whole
    NOTHING = "nothing"  # no text: a skipped special token, or an unknown id


class WindowDecoder:
    """Decoder for any transformers tokenizer: calls its `decode` on a few tokens at a time."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._vocab_size = len(tokenizer)
        self._token_texts: dict[int, str] = {}
        self._kinds: dict[tuple[int, bool], TokenKind] = {}

    def new(
        self, *, skip_special_tokens: bool, spaces_between_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> Detokenizer:
        """See TextDecoder."""
        spaces = skip_special_tokens or spaces_between_special_tokens
        made = _WindowDetokenizer(self, skip_special_tokens, {} if spaces else self._added_tokens)
        made.begin_after(after)
        return made

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Decode known tokens as one text."""
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def kind(self, token_id: int, skip_special_tokens: bool) -> TokenKind:
        """Return how a token contributes to the text. Cached."""
        key = (token_id, skip_special_tokens)
        if key not in self._kinds:
            self._kinds[key] = self._find_kind(token_id, skip_special_tokens)
        return self._kinds[key]

    def token_text(self, token_id: int) -> str:
        """See TextDecoder."""
        if token_id not in self._token_texts:
            known = token_id < self._vocab_size
            self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False) if known else ""
        return self._token_texts[token_id]

    def token_bytes(self, token_id: int) -> bytes | None:
        """See TextDecoder."""
        byte = BYTE_TOKEN.fullmatch(self._name(token_id))
        if byte is not None:
            return bytes([int(byte[1], 16)])
        text = self.token_text(token_id)
        return None if BROKEN in text else text.encode()

    @functools.cached_property
    def _added_tokens(self) -> dict[int, str]:
        """Text of each token that was added to the vocabulary, special or not."""
        return {token_id: str(token) for token_id, token in self._tokenizer.added_tokens_decoder.items()}

    def _name(self, token_id: int) -> str:
        return (self._tokenizer.convert_ids_to_tokens(token_id) if token_id < self._vocab_size else None) or ""

    def _find_kind(self, token_id: int, skip_special_tokens: bool) -> TokenKind:
        if token_id >= self._vocab_size:
            return TokenKind.NOTHING
        if skip_special_tokens and self.token_text(token_id) and not self.decode([token_id], skip_special_tokens=True):
            return TokenKind.NOTHING
        return TokenKind.BYTE if BYTE_TOKEN.fullmatch(self._name(token_id)) else TokenKind.TEXT


class _WindowDetokenizer:
    """Keeps a window of the last tokens.

    Its first `_num_returned` tokens have the returned text `_context`. The others are pending: their text may change.
    """

    def __init__(self, decoder: WindowDecoder, skip_special_tokens: bool, added_tokens: dict[int, str]):
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._added_tokens = added_tokens  # tokens that follow each other without a space
        self._last_is_added = False
        self._ids: list[int] = []  # the window
        self._num_returned = 0
        self._context = ""
        self._pending = 0  # pending tokens of kind TEXT

    def begin_after(self, token_ids: Sequence[int]) -> None:
        """Continue after these tokens, whose text is not returned."""
        kinds = {token_id: self._decoder.kind(token_id, self._skip) for token_id in token_ids[-MAX_WINDOW:]}
        self._ids = [token_id for token_id in token_ids[-MAX_WINDOW:] if kinds[token_id] is not TokenKind.NOTHING]
        if not self._ids:
            return
        # An incomplete character is not in the context, because the answer completes it.
        counts = range(len(self._ids), max(len(self._ids) - MAX_PENDING, -1), -1)
        texts = ((count, self._decode(self._ids[:count])) for count in counts)
        whole = next(((count, text) for count, text in texts if not text.endswith(BROKEN)), None)
        self._num_returned, self._context = whole or (len(self._ids), self._decode(self._ids))
        self._pending = sum(kinds[token_id] is TokenKind.TEXT for token_id in self._ids[self._num_returned :])
        self._last_is_added = self._ids[-1] in self._added_tokens

    def offset_of_next(self, token_id: int) -> int:
        return 0

    def add(self, token_id: int) -> str:
        kind = self._decoder.kind(token_id, self._skip)
        if kind is TokenKind.NOTHING:
            return ""
        self._ids.append(token_id)
        if kind is TokenKind.BYTE:
            self._last_is_added = False
            return ""
        self._pending += 1
        window = self._decode(self._ids)
        if window.endswith(BROKEN) or not window.startswith(self._context):
            return self._flush(window) if self._pending > MAX_PENDING else ""
        text = window[len(self._context) :]
        self._move(self._num_returned, window)
        added = self._added_tokens.get(token_id)
        if added is not None and self._last_is_added:
            text = added
        self._last_is_added = added is not None
        return text

    def finish(self) -> str:
        return self._decode(self._ids)[len(self._context) :]

    def _move(self, start: int, window: str) -> None:
        """Mark the whole window as returned, and start the next one at its token `start`.

        If the tokens from `start` on have no text, the window keeps its start. Otherwise the next token would be
        decoded as the first of a text, and lose its leading space.
        """
        context = self._decode(self._ids[start:])
        if context or len(self._ids) > MAX_WINDOW:
            self._ids, self._context = self._ids[start:], context
        else:
            self._context = window
        self._num_returned = len(self._ids)
        self._pending = 0

    def _flush(self, window: str) -> str:
        """Return text of pending tokens, which are too many to be one incomplete character.

        Cuts at the last position where both parts decode to the text of the whole.
        """
        self._last_is_added = False
        if window.startswith(self._context):
            for cut in range(len(self._ids) - 1, max(self._num_returned, len(self._ids) - MAX_PENDING), -1):
                left = self._decode(self._ids[:cut])
                if left + self._decode(self._ids[cut:]) == window and left.startswith(self._context):
                    text, rest = left[len(self._context) :], self._ids[cut:]
                    self._ids = self._ids[:cut]
                    self._move(cut - 1, left)
                    self._ids += rest
                    self._pending = len(rest)
                    return text
            text = window[len(self._context) :]
        else:
            text = self._decode(self._ids[self._num_returned :])
        self._move(self._num_returned, window)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids, self._skip)
