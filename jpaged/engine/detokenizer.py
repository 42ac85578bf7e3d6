"""Token ids to text, a token at a time: what has been given out never changes, and all of it equals one decode of all.

Three ways, each in time linear in the tokens (benchmarks/host_overhead.py has what a token costs):
- byte-level BPE (GPT-2, Llama 3, Qwen): every token stands for fixed bytes, so a table and an incremental UTF-8 decoder
  do. At most the three bytes of an incomplete character are held back;
- SentencePiece-like tokenizers (Llama 2, Mistral, Gemma, T5), with bytes for what has no token or without: every token
  has one text, and another one where it is the first. A run of byte tokens is held back to its end, because that is
  what decides: if all of it is UTF-8 it is text, if not each of its bytes is U+FFFD;
- any other tokenizer: the last few tokens are decoded with and without the new one.

The tables are made from what the tokenizer's decoder says of itself, and compared with it once; if they do not agree
the windows do the work.
"""

import codecs
import dataclasses
import enum
import functools
import json
import logging
import re
from collections.abc import Sequence
from typing import Any, Protocol

logger = logging.getLogger(__name__)

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how tokenizers with byte fallback call a token for one byte
BROKEN = "\ufffd"
NUM_COMPARED = 512  # tokens by which a table is compared with its tokenizer
MAX_PENDING = 8  # tokens that a window leaves undecided; a character has four bytes
MAX_WINDOW = 64  # tokens without any text that a window keeps


class Detokenizer(Protocol):
    """Turns one request's output tokens into text."""

    def begins(self, token_id: int) -> int:
        """Characters between the text given out and where a token, added next, would begin.

        One that goes on with an incomplete character begins where that does. Of bytes that are no characters, a guess.
        """
        ...

    def add(self, token_id: int) -> str:
        """Take one more token; the text that is certain now and was not before."""
        ...

    def finish(self) -> str:
        """No more tokens will come: the rest of the text."""
        ...


class TextDecoder(Protocol):
    """A tokenizer's way back to text, shared by all requests."""

    def new(self, *, skip_special_tokens: bool, spaces_between_special_tokens: bool = True) -> Detokenizer:
        """For one request."""
        ...

    def token_text(self, token_id: int) -> str:
        """One token by itself, special ones by their name; half a character is U+FFFD. "" for an unknown id."""
        ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """What a token stands for, exactly, though it be half a character; None where the tokenizer does not tell."""
        ...


def text_decoder(tokenizer: Any) -> TextDecoder:
    """The fastest exact way back to text that a transformers tokenizer allows."""
    windows = WindowDecoder(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return windows
    steps = _steps(getattr(backend, "decoder", None))
    rules = _Rules.of(steps)
    if [step["type"] for step in steps if step["type"] != "Fuse"] == ["ByteLevel"]:
        table: TextDecoder = ByteLevelDecoder(backend)
    elif rules is not None:
        table = PieceDecoder(backend, rules)
    else:
        return windows
    if _agree(table, windows, sorted(_tokens(backend)), sorted(backend.get_added_tokens_decoder())):
        return table
    logger.info("%s decodes in a way of its own: text is made by decoding a few tokens at a time", type(tokenizer))
    return windows


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """What a decoder of `tokenizers` does, step by step; [] of what is none, or does not say."""
    if not hasattr(decoder, "__getstate__") or not type(decoder).__module__.startswith("tokenizers"):
        return []
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _agree(table: TextDecoder, windows: "WindowDecoder", ids: list[int], added: list[int]) -> bool:
    """Whether a table gives what its tokenizer does, for tokens spread over the vocabulary and those added to it."""
    some = [*ids[:: -(-len(ids) // NUM_COMPARED) or 1], *added[:NUM_COMPARED]]
    for skip in (False, True):
        detokenizer = table.new(skip_special_tokens=skip)
        text = "".join([detokenizer.add(token_id) for token_id in some]) + detokenizer.finish()
        if text != windows.decode(some, skip):
            return False
    return True


# -- byte-level tokenizers --------------------------------------------------------------------------------------------


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself where it has a shape, else one from U+0100."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if chr(byte) not in table)
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


class ByteLevelDecoder:
    """A table of what each token of a byte-level tokenizer (of `tokenizers`) stands for."""

    def __init__(self, backend: Any):
        byte_of = _byte_of_character()
        tokens = _tokens(backend)
        self._texts: list[str | None] = [""] * (max(tokens, default=-1) + 1)  # None: no whole characters
        self._parts: dict[int, bytes] = {}                                    # of these
        for token_id, token in tokens.items():
            try:
                own = bytes([byte_of[character] for character in token])
            except KeyError:  # an added token with characters outside the alphabet is its own text
                own = token.encode()
            try:
                self._texts[token_id] = own.decode()
            except UnicodeDecodeError:
                self._texts[token_id] = None
                self._parts[token_id] = own
        special = _special_ids(backend)
        self._unskipped_texts = ["" if i in special else text for i, text in enumerate(self._texts)]

    def new(self, *, skip_special_tokens: bool, spaces_between_special_tokens: bool = True) -> Detokenizer:
        """See TextDecoder. It puts no spaces between special tokens in any case."""
        return _ByteLevelDetokenizer(self._unskipped_texts if skip_special_tokens else self._texts, self._parts)

    def token_text(self, token_id: int) -> str:
        """See TextDecoder."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """See TextDecoder."""
        text = self._texts[token_id] if token_id < len(self._texts) else ""
        return self._parts[token_id] if text is None else text.encode()


class _ByteLevelDetokenizer:
    __slots__ = ("_decoder", "_parts", "_texts", "_within")

    def __init__(self, texts: list[str | None], parts: dict[int, bytes]):
        self._texts = texts
        self._parts = parts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._within = False  # whether a character has begun that is not complete

    def begins(self, token_id: int) -> int:
        text = self._texts[token_id] if token_id < len(self._texts) else ""
        goes_on = text == "" or (text is None and _goes_on(self._parts[token_id][0]))
        return int(self._within and not goes_on)

    def add(self, token_id: int) -> str:
        text = self._texts[token_id] if token_id < len(self._texts) else ""
        if text is not None and not self._within:
            return text
        text = self._decoder.decode(self._parts[token_id] if text is None else text.encode())
        self._within = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        self._within = False
        return self._decoder.decode(b"", final=True)


def _goes_on(byte: int) -> bool:
    """Whether a byte of UTF-8 is none that a character begins with."""
    return byte & 0xC0 == 0x80


def _tokens(backend: Any) -> dict[int, str]:
    """All tokens as the decoder is given them: an added one may have been normalised, as it is looked for in texts."""
    tokens = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
    return tokens | {token_id: backend.id_to_token(token_id) for token_id in backend.get_added_tokens_decoder()}


def _special_ids(backend: Any) -> frozenset[int]:
    """Ids that are left out where special tokens are; one that was normalised is not."""
    added = backend.get_added_tokens_decoder().items()
    return frozenset(
        token_id for token_id, token in added if token.special and not backend.decode([token_id])
    )


# -- SentencePiece-like tokenizers ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Replacement:
    """In every token `old` becomes `new`; in the first of a text it is left out, where the rule is Metaspace's."""

    old: str
    new: str
    not_in_first: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Rules:
    """How tokens become text, in this order: replace, join byte tokens, strip the beginning of the whole."""

    replacements: tuple[_Replacement, ...]
    has_bytes: bool
    strip: tuple[str, int] = ("", 0)  # a character, and how many of it at most

    @classmethod
    def of(cls, steps: Sequence[dict[str, Any]]) -> "_Rules | None":
        """Of a decoder's steps; None where these are others, or in another order."""
        replacements: list[_Replacement] = []
        has_bytes, fused, strip = False, False, ("", 0)
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": new} if old and not has_bytes:
                    replacements.append(_Replacement(old, new))
                case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme} if not has_bytes:
                    replacements.append(_Replacement(old, " ", not_in_first=scheme != "never"))
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
        """A token's own text."""
        for rule in self.replacements:
            token = token.replace(rule.old, "" if first and rule.not_in_first else rule.new)
        return token


class PieceDecoder:
    """A table of each token's text, for tokenizers (of `tokenizers`) with SentencePiece's pieces."""

    def __init__(self, backend: Any, rules: _Rules):
        tokens = _tokens(backend)
        size = max(tokens, default=-1) + 1
        self.rules = rules
        self.texts: list[str | None] = [None] * size  # None: the tokenizer has no such id
        self.first_texts: dict[int, str] = {}         # of tokens that are others at the beginning
        self.byte_of: dict[int, int] = {}
        for token_id, token in tokens.items():
            self.texts[token_id] = text = rules.text(token, first=False)
            first = rules.text(token, first=True)
            if first != text:
                self.first_texts[token_id] = first
            byte = BYTE_TOKEN.fullmatch(text) if rules.has_bytes else None
            if byte is not None:
                self.byte_of[token_id] = int(byte[1], 16)
        special = _special_ids(backend)
        self.unskipped_texts = [None if i in special else text for i, text in enumerate(self.texts)]

    def new(self, *, skip_special_tokens: bool, spaces_between_special_tokens: bool = True) -> Detokenizer:
        """See TextDecoder. It puts no spaces between special tokens in any case."""
        return _PieceDetokenizer(self, self.unskipped_texts if skip_special_tokens else self.texts)

    def token_text(self, token_id: int) -> str:
        """See TextDecoder; as the token is inside of a text, with its leading space."""
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
        self._first_texts: dict[int, str] | None = decoder.first_texts  # None when the first token was there
        self._content, self._strip = decoder.rules.strip  # so many characters may still be stripped
        self._run = bytearray()
        self._begun = 0  # characters that have begun in the run

    def begins(self, token_id: int) -> int:
        text = self._texts[token_id] if token_id < len(self._texts) else None
        if not self._run:
            return 0
        if text is None or (token_id in self._byte_of and _goes_on(self._byte_of[token_id])):
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
            self._begun += not _goes_on(byte)
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
    try:
        return run.decode()
    except UnicodeDecodeError:
        return BROKEN * len(run)


# -- all other tokenizers ---------------------------------------------------------------------------------------------


class TokenKind(enum.Enum):
    """What a token means for the text around it."""

    TEXT = "text"
    BYTE = "byte"        # one byte of a character that has no token: the whole run of them is decoded together
    NOTHING = "nothing"  # left out: a special token that is skipped, or an id that the tokenizer does not have


class WindowDecoder:
    """Any transformers tokenizer, through its own decode of a few tokens at a time."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._vocab_size = len(tokenizer)
        self._token_texts: dict[int, str] = {}
        self._kinds: dict[tuple[int, bool], TokenKind] = {}

    def new(self, *, skip_special_tokens: bool, spaces_between_special_tokens: bool = True) -> Detokenizer:
        """See TextDecoder."""
        spaces = skip_special_tokens or spaces_between_special_tokens
        return _WindowDetokenizer(self, skip_special_tokens, {} if spaces else self._added_tokens)

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

    def token_bytes(self, token_id: int) -> bytes | None:
        """See TextDecoder."""
        byte = BYTE_TOKEN.fullmatch(self._name(token_id))
        if byte is not None:
            return bytes([int(byte[1], 16)])
        text = self.token_text(token_id)
        return None if BROKEN in text else text.encode()

    @functools.cached_property
    def _added_tokens(self) -> dict[int, str]:
        """The tokens that were added to the vocabulary, special and others, by their own text."""
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
    """The window's tokens up to `_read` have been given out, as `_context`; the rest is undecided."""

    def __init__(self, decoder: WindowDecoder, skip_special_tokens: bool, added_tokens: dict[int, str]):
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._added_tokens = added_tokens  # those that stand without a space after each other
        self._last_is_added = False
        self._ids: list[int] = []  # the window
        self._read = 0
        self._context = ""
        self._pending = 0  # tokens of text among the undecided

    def begins(self, token_id: int) -> int:
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
            return self._decide(window) if self._pending > MAX_PENDING else ""
        text = window[len(self._context) :]
        self._move(self._read, window)
        added = self._added_tokens.get(token_id)
        if added is not None and self._last_is_added:
            text = added
        self._last_is_added = added is not None
        return text

    def finish(self) -> str:
        return self._decode(self._ids)[len(self._context) :]

    def _move(self, start: int, window: str) -> None:
        """All of the window is given out; the next one starts at its token `start`.

        Unless that has no text of its own: a decode that begins there would treat the token after it as the first of a
        text, and strip its leading space.
        """
        context = self._decode(self._ids[start:])
        if context or len(self._ids) > MAX_WINDOW:
            self._ids, self._context = self._ids[start:], context
        else:
            self._context = window
        self._read = len(self._ids)
        self._pending = 0

    def _decide(self, window: str) -> str:
        """What stays undecided for so long is no half character: give it out up to the last place where it divides."""
        self._last_is_added = False
        if window.startswith(self._context):
            for cut in range(len(self._ids) - 1, max(self._read, len(self._ids) - MAX_PENDING), -1):
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
            text = self._decode(self._ids[self._read :])
        self._move(self._read, window)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids, self._skip)
