"""Token ids to text, a token at a time: what has been given out never changes, and all of it equals one decode of all.

Byte-level BPE (GPT-2, Llama 3, Qwen): every token stands for fixed bytes, so a table and an incremental UTF-8 decoder
do: 0.3 us a token against 2.4 us for decoding windows (benchmarks/host_overhead.py). Any other tokenizer: the last few
tokens are decoded with and without the new one, and text is held back while more tokens could still change it.
"""

import codecs
import enum
import re
from typing import Any, Protocol

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # how tokenizers with byte fallback call a token for one byte


class TokenKind(enum.Enum):
    """What a token means for the text around it."""

    TEXT = "text"
    BYTE = "byte"        # one byte of a character that has no token: the whole run of them is decoded together
    NOTHING = "nothing"  # left out: a special token that is skipped, or an id that the tokenizer does not have


class Detokenizer(Protocol):
    """Turns one request's output tokens into text."""

    text: str

    def add(self, token_id: int) -> None:
        """Take one more token; `text` grows by what is certain now."""
        ...

    def finish(self) -> None:
        """No more tokens will come: `text` is complete after this."""
        ...


class TextDecoder(Protocol):
    """A tokenizer's way back to text, shared by all requests."""

    def new(self, *, skip_special_tokens: bool) -> Detokenizer:
        """For one request."""
        ...

    def token_text(self, token_id: int) -> str:
        """One token by itself, special ones by their name; half a character is U+FFFD. "" for an unknown id."""
        ...


def text_decoder(tokenizer: Any) -> TextDecoder:
    """The fastest exact way back to text that a transformers tokenizer allows."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if type(getattr(backend, "decoder", None)).__name__ == "ByteLevel":
        return ByteLevelDecoder(backend)
    return WindowDecoder(tokenizer)


# -- byte-level tokenizers --------------------------------------------------------------------------------------------


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself where it has a shape, else one from U+0100."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if chr(byte) not in table)
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


class ByteLevelDecoder:
    """A table of the bytes that each token of a byte-level tokenizer (of `tokenizers`) stands for."""

    def __init__(self, backend: Any):
        byte_of = _byte_of_character()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.token_bytes = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            try:
                self.token_bytes[token_id] = bytes([byte_of[character] for character in token])
            except KeyError:  # an added token with characters outside the alphabet is its own text
                self.token_bytes[token_id] = token.encode()
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def new(self, *, skip_special_tokens: bool) -> Detokenizer:
        """See TextDecoder."""
        return _ByteLevelDetokenizer(self.token_bytes, self.special_ids if skip_special_tokens else frozenset())

    def token_text(self, token_id: int) -> str:
        """See TextDecoder."""
        return self.token_bytes[token_id].decode(errors="replace") if token_id < len(self.token_bytes) else ""


class _ByteLevelDetokenizer:
    def __init__(self, token_bytes: list[bytes], skipped: frozenset[int]):
        self.text = ""
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def add(self, token_id: int) -> None:
        if token_id < len(self._token_bytes) and token_id not in self._skipped:
            self.text += self._decode(self._token_bytes[token_id])

    def finish(self) -> None:
        self.text += self._decode(b"", final=True)


# -- all other tokenizers ---------------------------------------------------------------------------------------------


class WindowDecoder:
    """Any transformers tokenizer, through its own decode of a few tokens at a time."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._vocab_size = len(tokenizer)
        self._token_texts: dict[int, str] = {}
        self._kinds: dict[tuple[int, bool], TokenKind] = {}

    def new(self, *, skip_special_tokens: bool) -> Detokenizer:
        """See TextDecoder."""
        return _WindowDetokenizer(self, skip_special_tokens)

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """All of these tokens, which the tokenizer has, as one text."""
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def kind(self, token_id: int, skip_special_tokens: bool) -> TokenKind:
        """What a token means for the text around it; found out once a token."""
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

    def _find_kind(self, token_id: int, skip_special_tokens: bool) -> TokenKind:
        if token_id >= self._vocab_size:
            return TokenKind.NOTHING
        if skip_special_tokens and self.token_text(token_id) and not self.decode([token_id], skip_special_tokens=True):
            return TokenKind.NOTHING
        token = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        return TokenKind.BYTE if BYTE_TOKEN.fullmatch(token) else TokenKind.TEXT


class _WindowDetokenizer:
    """Text up to token `_read` has been given out; `_start` is where the window begins that gives it its context."""

    def __init__(self, decoder: WindowDecoder, skip_special_tokens: bool):
        self.text = ""
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._token_ids: list[int] = []
        self._start = 0
        self._read = 0
        self._context = ""  # decode of the tokens from _start to _read

    def add(self, token_id: int) -> None:
        kind = self._decoder.kind(token_id, self._skip)
        if kind is TokenKind.NOTHING:
            return
        self._token_ids.append(token_id)
        if kind is TokenKind.BYTE:
            return
        window = self._decoder.decode(self._token_ids[self._start :], self._skip)
        if window.endswith("\ufffd") or not window.startswith(self._context):
            return
        self.text += window[len(self._context) :]
        # The new window starts at what this one added, unless that has no text of its own: a decode that begins there
        # would treat the token after it as the first of a text, and strip its leading space.
        start = self._read
        context = self._decoder.decode(self._token_ids[start:], self._skip)
        if context:
            self._start, self._context = start, context
        else:
            self._context = window
        self._read = len(self._token_ids)

    def finish(self) -> None:
        if self._read < len(self._token_ids):
            whole = self._decoder.decode(self._token_ids, self._skip)
            if whole.startswith(self.text):
                self.text = whole
            else:
                self.text += self._decoder.decode(self._token_ids[self._start :], self._skip)[len(self._context) :]
            self._read = len(self._token_ids)
