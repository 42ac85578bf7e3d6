"""Assigns the log-probabilities of tokens to the text of a response. Tokens of reasoning, calls and tags have none."""

import dataclasses

import msgspec
from msgspec import Raw

from jpaged.parsers.harmony import MESSAGE
from jpaged.serving.openai_api.generation import Update
from jpaged.serving.openai_api.logprob_shapes import chat_logprobs
from jpaged.serving.schemas.responses_answers import EMPTY, EventLogprob


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedToken:
    """One token's log-probabilities as JSON: without bytes for events, with bytes for items. start: its text offset."""

    start: int
    in_event: bytes
    in_item: bytes


class WaitingTokens:
    """Generated tokens whose text the parser has not returned yet. top: number of most likely tokens to show."""

    def __init__(self, top: int):
        self._top = top
        self._text = ""   # received by the parser, and not yet returned
        self._start = 0   # characters of the answer before `_text`
        self._tokens: list[EncodedToken] = []

    def add(self, new: Update) -> None:
        """Add the tokens of an update, and encode them."""
        self._text += new.text
        if new.logprobs is None:
            return
        offsets = new.text_offsets if new.text_offsets is not None else [self._start] * len(new.token_ids)
        for start, one in zip(offsets, chat_logprobs(new.token_ids, new.logprobs, self._top).content, strict=True):
            short = EventLogprob.of(one.token, one.logprob, one.top_logprobs)
            self._tokens.append(EncodedToken(start, msgspec.json.encode(short), msgspec.json.encode(one)))

    def take(self, text: str) -> list[EncodedToken]:
        """Remove and return the tokens of a text that the parser returned. Earlier tokens, of tags, are dropped."""
        header = self._text.find(MESSAGE)  # of gpt-oss; it may contain the same text
        place = self._text.find(text, header + len(MESSAGE) if header >= 0 else 0)
        if place < 0:
            place = max(self._text.find(text), 0)
        begin, end = self._start + place, self._start + place + len(text)
        taken = [token for token in self._tokens if begin <= token.start < end]
        self._tokens = [token for token in self._tokens if token.start >= end]
        self._text, self._start = self._text[place + len(text) :], end
        return taken

    def take_all(self) -> list[EncodedToken]:
        """Remove and return all tokens."""
        taken, self._tokens = self._tokens, []
        self._text, self._start = "", self._start + len(self._text)
        return taken


def joined(encoded: list[bytes]) -> Raw:
    """Return a list of values that are encoded already."""
    return Raw(b"[" + b",".join(encoded) + b"]") if encoded else EMPTY
