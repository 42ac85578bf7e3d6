"""Assigns the log-probabilities of tokens to the text of a response. Tokens of reasoning, calls and tags have none."""

import dataclasses

import msgspec
from msgspec import Raw

from jpaged.serving.openai_api.generation import Update
from jpaged.serving.openai_api.logprob_shapes import chat_logprobs
from jpaged.serving.schemas.responses_answers import EMPTY, EventLogprob


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedToken:
    """The log-probabilities of one token as JSON: without bytes for events, and with bytes for items.

    start: number of characters of the answer before the token.
    """

    start: int
    in_event: bytes
    in_item: bytes


class WaitingTokens:
    """Tokens that were generated, and whose text the parser has not returned yet. top: most likely tokens to show."""

    def __init__(self, top: int):
        self._top = top
        self._text = ""   # that the parser has received and not returned
        self._start = 0   # characters of the answer before it
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
        """Remove and return the tokens of a text that the parser returned. Tokens before it, of tags, are dropped."""
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
