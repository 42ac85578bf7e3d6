"""Tokenises text: short texts in one call, long ones in pieces. A piece takes milliseconds, and can be the last one.

1. A text with more characters than its tokens can stand for is refused before it is tokenised.
2. A long text is cut at places that cannot change its token ids (`cut_points.py`). Tokenising stops when the caller has
   the tokens it needs, or when its request is cancelled. Each piece releases Python's global lock.
3. A text without such places is tokenised in one piece, if it is short enough for that.

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

PIECE = 4_096  # characters: 1 to 4 ms. The tokenizer needs 100 to 200 bytes of memory for each
WHOLE = 2 * PIECE  # a text up to this length is tokenised in one call
MAX_PIECE = 131_072  # longest text between two cut points: 0.1 s, 13 to 25 MiB. More if the model takes longer prompts

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
        """The limit of a prompt. Raises RequestError if no prompt can have as many tokens as `params` keep."""
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
        side = params.truncation_side or ("right" if pooling else "left")  # a text is about its beginning
        return cls(keep, "right" if side == "right" else "left")


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedText:
    """Token ids of a text.

    complete: False: the text has more tokens than these. These are more than the limit's count.
    """

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
        # A proxy: `text_encoder` keeps the encoder as long as the tokenizer.
        self._tokenizer = weakref.proxy(tokenizer)

    def encode(
        self,
        name: str,
        text: str,
        limit: TokenLimit | None = None,
        *,
        special_tokens: bool = True,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> EncodedText:
        """Tokenise a text. The ids are those of one call of the tokenizer.

        name:           parameter that errors name.
        limit:          tokens that are needed; None: all.
        special_tokens: add the tokens that the tokenizer adds to every text.
        cancelled:      asked between two pieces.

        Raises RequestError for a text that is too long, TokenisingCancelled.
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
                    f"has {len(text):,} characters, and this model's tokenizer takes at most {most:,} at once: cut it, "
                    "or send token ids"
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
        """Tokens that the tokenizer adds before and after every text. None if they cannot be separated."""
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
        """Raise RequestError if a text has more characters than its tokens can stand for."""
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
        return max(map(len, self._tokenizer.get_vocab()), default=1)  # nothing more is known of such a tokenizer

    @functools.cached_property
    def _description(self) -> Description:
        """Facts about the tokenizer. It is not cut if a sample's ids are not the same in pieces."""
        from tokenizers import Tokenizer

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer) or getattr(self._tokenizer, "split_special_tokens", False):
            return Description(None, None)
        try:
            found = describe(backend)
            whole = self._whole(_SAMPLE, special_tokens=False)
            pieces = found.cut_points.pieces(_SAMPLE, 1, len(_SAMPLE)) if found.cut_points else [_SAMPLE]
            same = whole == [token_id for piece in pieces for token_id in self._piece(piece)]
        except (KeyError, TypeError, ValueError) as error:  # a format that is not known
            logger.info("long texts are tokenised in one piece: %r", error)
            return Description(None, None)
        return found if same else Description(None, None)

    def _whole(self, text: str, *, special_tokens: bool) -> list[int]:
        # verbose=True would warn of lengths, which the engine checks
        if special_tokens:
            return self._tokenizer.encode(text, verbose=False)
        return self._tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def _piece(self, piece: str) -> list[int]:
        """Token ids of a piece. The batch call releases the global lock, and keeps no offsets."""
        backend = self._tokenizer.backend_tokenizer
        return backend.encode_batch_fast([piece], add_special_tokens=False)[0].ids


_lock = threading.Lock()
_encoders: "weakref.WeakKeyDictionary[Any, TextEncoder]" = weakref.WeakKeyDictionary()
