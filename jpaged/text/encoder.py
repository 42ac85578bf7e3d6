"""Tokenises text: short texts in one call, long texts in pieces that take milliseconds each.

1. A text is refused before it is tokenised if its characters cannot fit into the allowed number of tokens.
2. A long text is cut at points that cannot change its token ids (`cut_points.py`). Tokenising stops once the caller has
   the tokens that it needs, or when its request is cancelled. Each piece releases the GIL.
3. A text without cut points is tokenised in one piece, unless it is too long for that.

Imported late: tokenizers, when a text is first encoded.
"""

import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, Literal

from jpaged.errors import JPagedError, RequestError
from jpaged.params.sampling import SamplingParams
from jpaged.text.cut_points import Description, describe

logger = logging.getLogger(__name__)

PIECE = 4_096  # characters: 1 to 4 ms. The tokenizer needs 100 to 200 bytes of memory per character
WHOLE = 2 * PIECE  # a text up to this length is tokenised in one call
MAX_PIECE = 131_072  # most characters between two cut points: 0.1 s, 13 to 25 MiB. Limits above 16,384 tokens raise it

_SAMPLE = "one two, three. 4 five\nsix 7 eight, nine ten.\nEleven 12 twelve"


class TokenisingCancelled(JPagedError):
    """The caller of a text no longer wants its tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLimit:
    """The part of a text's tokens that the caller needs.

    count:    number of tokens.
    truncate: "right" keeps the first tokens of a longer text, "left" the last ones. None: a longer text is an error.
    """

    count: int
    truncate: Literal["left", "right"] | None = None

    @classmethod
    def of_prompt(cls, max_model_len: int, params: SamplingParams, *, pooling: bool = False) -> "TokenLimit":
        """Return the limit of a prompt. Raises RequestError if truncate_prompt_tokens is above the longest prompt."""
        most, keep = max_model_len - (not pooling), params.truncate_prompt_tokens
        if keep is None:
            return cls(most)
        if keep > most:
            accepted = (
                f"a prompt takes at most {most:,} tokens, of max_model_len={max_model_len:,}: give a smaller one, or -1"
            )
            raise RequestError("truncate_prompt_tokens", keep, accepted)
        if keep == -1:
            keep = most if pooling else max(max_model_len - (params.max_tokens or 1), 1)
        side = params.truncation_side or ("right" if pooling else "left")  # to embed, keep a text's beginning
        return cls(keep, "right" if side == "right" else "left")


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedText:
    """Token ids of a text. complete: False if the text has more tokens; then `token_ids` exceeds the limit's count."""

    token_ids: list[int]
    complete: bool


def is_long(text: str) -> bool:
    """True for a text that takes more than some milliseconds to tokenise."""
    return len(text) > WHOLE


def text_encoder(tokenizer: Any) -> "TextEncoder":
    """Return the encoder of a tokenizer. There is one for each."""
    with _lock:
        encoder = _encoders.get(tokenizer)
        if encoder is None:
            encoder = _encoders[tokenizer] = TextEncoder(tokenizer)
        return encoder


class TextEncoder:
    """Tokenises texts. Any thread may call it."""

    def __init__(self, tokenizer: Any):
        """tokenizer: a transformers tokenizer."""
        self._tokenizer = weakref.proxy(tokenizer)  # a strong reference would keep the key of `_encoders` alive

    def encode(
        self,
        name: str,
        text: str,
        limit: TokenLimit | None = None,
        *,
        special_tokens: bool = True,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> EncodedText:
        """Tokenise a text. A complete result has the ids of one call of the tokenizer.

        name:           parameter name in errors.
        limit:          tokens that are needed; None: all.
        special_tokens: add the tokens that the tokenizer adds to every text.
        cancelled:      called before each piece of a long text; True stops the work.
        Raises RequestError for a text that is too long, and TokenisingCancelled.
        """
        self._check_characters(name, text, limit)
        if not is_long(text):
            return EncodedText(self._whole(text, special_tokens=special_tokens), complete=True)
        ends = self.ends if special_tokens else ([], [])
        description = self._description
        most = max(MAX_PIECE, 8 * (0 if limit is None else limit.count))
        if ends is None or description.cut_points is None:
            if len(text) > most:
                accepted = (
                    f"has {len(text):,} characters, and this model's tokenizer takes at most {most:,} at once: shorten "
                    "it, or send token ids"
                )
                raise RequestError(name, text, accepted)
            return EncodedText(self._whole(text, special_tokens=special_tokens), complete=True)
        from_end = limit is not None and limit.truncate == "left"
        parts: list[list[int]] = []
        length, complete = 0, True
        try:
            for piece in description.cut_points.pieces(text, PIECE, most, from_end=from_end):
                if limit is not None and length > limit.count:
                    complete = False
                    break
                if cancelled():
                    raise TokenisingCancelled("the request was cancelled")
                parts.append(self._piece(piece))
                length += len(parts[-1])
        except ValueError:
            accepted = (
                f"has more than {most:,} characters without a blank, a comma, a full stop or a line break after a "
                "word, which is too long to tokenise: shorten it, or send token ids"
            )
            raise RequestError(name, text, accepted) from None
        inner = [token_id for part in (reversed(parts) if from_end else parts) for token_id in part]
        return EncodedText([*ends[0], *inner, *ends[1]], complete)

    @functools.cached_property
    def ends(self) -> tuple[list[int], list[int]] | None:
        """Tokens that the tokenizer adds before and after every text. None if they cannot be determined."""
        found = None
        for text in ("a", "1 b"):
            plain = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
            full = self._tokenizer.encode(text, verbose=False)
            places = [i for i in range(len(full) - len(plain) + 1) if full[i : i + len(plain)] == plain]
            if len(places) != 1 or not plain:
                return None
            ends = full[: places[0]], full[places[0] + len(plain) :]
            if found not in (None, ends):
                return None
            found = ends
        return found

    def _check_characters(self, name: str, text: str, limit: TokenLimit | None) -> None:
        """Raise RequestError if a text has more characters than the allowed tokens can stand for."""
        if limit is None or limit.truncate is not None or len(text) <= limit.count:
            return
        per_token = self._characters_per_token
        if per_token is not None and len(text) > limit.count * per_token:
            accepted = (
                f"has {len(text):,} characters, {limit.count:,} tokens are at most {limit.count * per_token:,}: "
                "shorten it, or start with a larger max_model_len, if the model was trained for more"
            )
            raise RequestError(name, text, accepted)

    @functools.cached_property
    def _characters_per_token(self) -> int | None:
        if getattr(self._tokenizer, "backend_tokenizer", None) is not None:
            return self._description.characters_per_token
        return max(map(len, self._tokenizer.get_vocab()), default=1)  # no backend to describe: use its longest token

    @functools.cached_property
    def _description(self) -> Description:
        """Facts about the tokenizer. Empty if a sample text, cut into pieces, gets other ids than in one call."""
        from tokenizers import Tokenizer

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer) or getattr(self._tokenizer, "split_special_tokens", False):
            return Description(None, None)
        try:
            found = describe(backend)
            whole = self._whole(_SAMPLE, special_tokens=False)
            pieces = found.cut_points.pieces(_SAMPLE, 1, len(_SAMPLE)) if found.cut_points else [_SAMPLE]
            same = whole == [token_id for piece in pieces for token_id in self._piece(piece)]
        except (KeyError, TypeError, ValueError) as error:  # an unknown format
            logger.info("long texts are tokenised in one piece: %r", error)
            return Description(None, None)
        return found if same else Description(None, None)

    def _whole(self, text: str, *, special_tokens: bool) -> list[int]:
        # verbose=True would warn about long texts; the engine checks lengths itself
        if special_tokens:
            return self._tokenizer.encode(text, verbose=False)
        return self._tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def _piece(self, piece: str) -> list[int]:
        """Token ids of a piece. The batch call releases the GIL, and computes no offsets."""
        backend = self._tokenizer.backend_tokenizer
        return backend.encode_batch_fast([piece], add_special_tokens=False)[0].ids


_lock = threading.Lock()
_encoders: "weakref.WeakKeyDictionary[Any, TextEncoder]" = weakref.WeakKeyDictionary()
