"""Turns a prompt in any accepted form into checked token ids.

Checks the length of a prompt before any slow work, because there may be millions of characters or ids.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jpaged.engine.input.model_limits import ModelLimits
from jpaged.errors import RequestError
from jpaged.params.sampling import SamplingParams
from jpaged.text.encoder import TokenLimit, text_encoder

Cancelled = Callable[[], bool]
Prompt = str | Mapping[str, Any] | Sequence[int] | np.ndarray
PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt", "prediction", "token_type_ids")
ACCEPTED = "must be a string, a list of token ids, or a dict with prompt or prompt_token_ids"


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A valid prompt."""

    text: str | None  # None if the caller gave token ids
    token_ids: list[int]
    cache_salt: str
    prediction: tuple[int, ...] = ()  # expected answer; empty if the engine does not speculate
    type_1_from: int | None = None  # position of the first token of type 1; None: there is none

    @property
    def token_type_ids(self) -> list[int]:
        """Type of each token."""
        count = len(self.token_ids)
        first = count if self.type_1_from is None else self.type_1_from
        return [0] * first + [1] * (count - first)


class PromptReader:
    """Reads prompts. Has no state that a prompt changes, so any thread may call it."""

    def __init__(self, limits: ModelLimits, tokenizer: Any = None):
        """tokenizer: a transformers tokenizer; None: prompts must be token ids."""
        self._limits = limits
        self._tokenizer = tokenizer

    def read(
        self, prompt: Prompt, params: SamplingParams, cancelled: Cancelled = lambda: False,
        prompt_name: str | None = None,
    ) -> CheckedPrompt:  # fmt: skip
        """Check and tokenise a prompt, and truncate it to truncate_prompt_tokens.

        cancelled:   called while a long text is tokenised. Raises RequestError, and TokenisingCancelled.
        prompt_name: of `PoolingParams`.
        """
        parts = _parts(prompt)
        text, ids = parts.get("prompt"), parts.get("prompt_token_ids")
        if ids is None:
            before = "" if self._limits.pooling is None else self._limits.pooling.prompt(prompt_name)
            token_ids = self._encode(before + text if text else "", params, cancelled)
        elif prompt_name:
            raise RequestError("prompt_name", prompt_name, "goes with a text, not with prompt_token_ids: leave it out")
        else:
            token_ids = self._checked_ids(ids, params)
        prediction = self._prediction(parts.get("prediction"), cancelled)
        type_1_from = self._type_1_from(parts.get("token_type_ids"), ids, len(token_ids), params)
        return CheckedPrompt(text, token_ids, parts.get("cache_salt") or "", prediction, type_1_from)

    def _type_1_from(self, given: Any, ids: Any, kept: int, params: SamplingParams) -> int | None:
        """Check the token types of a pair of texts. ids: the prompt. kept: number of its tokens after truncation."""
        name, pooling = "token_type_ids", self._limits.pooling
        if given is None:
            return None
        if ids is None:
            raise RequestError(name, given, "goes with prompt_token_ids, not with a text: leave it out")
        if pooling is None or pooling.token_types < 2:
            raise RequestError(name, given, "the model has no token types: leave it out")
        is_list = isinstance(given, (Sequence, np.ndarray)) and not isinstance(given, (str, bytes, bytearray))
        if not is_list or len(given) != len(ids):
            raise RequestError(name, given, f"must be a list of {len(ids)} numbers, one for each token")
        types = [int(one) if isinstance(one, (int, np.integer)) else -1 for one in given]
        if not set(types) <= {0, 1} or types != sorted(types):
            raise RequestError(name, given, "must be 0 for the tokens of the first text, then 1 for the second")
        dropped = len(types) - kept if self._limit(params).truncate == "left" else 0
        first = max(types.count(0) - dropped, 0)
        return first if first < kept else None

    def _prediction(self, given: Any, cancelled: Cancelled) -> tuple[int, ...]:
        """Check an expected answer, and tokenise its beginning: as many tokens as a request has at most."""
        name, limits = "prediction", self._limits
        if given is None:
            return ()
        if limits.pooling is not None:
            raise RequestError(name, given, "is for models that generate; this one does not")
        if not isinstance(given, str):
            if isinstance(given, (bytes, bytearray)) or not isinstance(given, (Sequence, np.ndarray)):
                raise RequestError(name, given, "must be a string, or a list of token ids")
            return tuple(self._valid_ids(name, given[: limits.max_model_len]))
        if not limits.speculates or not given:
            return ()
        if self._tokenizer is None:
            accepted = "the model has no tokenizer: give token ids, or start with the option tokenizer"
            raise RequestError(name, given, accepted)
        limit = TokenLimit(limits.max_model_len, "right")
        encoded = text_encoder(self._tokenizer).encode(name, given, limit, special_tokens=False, cancelled=cancelled)
        return tuple(self._valid_ids(name, encoded.token_ids[: limit.count]))

    def _limit(self, params: SamplingParams) -> TokenLimit:
        pooling = self._limits.pooling is not None
        return TokenLimit.of_prompt(self._limits.max_model_len, params, pooling=pooling)

    def _encode(self, text: str, params: SamplingParams, cancelled: Cancelled) -> list[int]:
        if self._tokenizer is None:
            accepted = "the model has no tokenizer: give prompt_token_ids, or start with the option tokenizer"
            raise RequestError("prompt", text, accepted)
        if not text:
            raise RequestError("prompt", text, "must not be empty")
        limit, encoder = self._limit(params), text_encoder(self._tokenizer)
        encoded = encoder.encode("prompt", text, limit, cancelled=cancelled)
        token_ids = encoded.token_ids
        if limit.truncate is not None and len(token_ids) > limit.count:
            token_ids = _truncated(token_ids, limit, encoder.ends or ([], []))
        self._check_length("prompt", text, len(token_ids), complete=encoded.complete or limit.truncate is not None)
        return self._checked_ids(token_ids)

    @property
    def _most(self) -> int:
        """Number of tokens of the longest prompt."""
        return self._limits.max_model_len - (self._limits.pooling is None)

    def _checked_ids(self, ids: Any, params: SamplingParams | None = None) -> list[int]:
        """params: how to truncate; None means that the ids are truncated already."""
        name = "prompt_token_ids"
        if hasattr(ids, "__array__"):
            ids = as_array(name, ids)
            if ids.ndim != 1:
                raise RequestError(name, ids, f"must be a list of token ids, or an array of one axis, not {ids.ndim}")
        elif isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Sequence):
            raise RequestError(name, ids, "must be a list of token ids")
        limit = None if params is None else self._limit(params)
        if limit is not None and limit.truncate is not None:
            ids = ids[: limit.count] if limit.truncate == "right" else ids[-limit.count :]
        self._check_length(name, ids, len(ids))
        return self._valid_ids(name, ids)

    def _valid_ids(self, name: str, ids: Sequence[Any] | np.ndarray) -> list[int]:
        """Return token ids as a list of int. Raises RequestError for any other value, and for an unknown id."""
        vocab_size = self._limits.vocab_size
        token_ids = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        for position, token_id in enumerate(token_ids):
            if type(token_id) is not int:
                if not isinstance(token_id, np.integer):
                    raise RequestError(name, token_id, f"token {position} is not an integer")
                token_ids[position] = token_id = int(token_id)
            if not 0 <= token_id < vocab_size:
                raise RequestError(name, token_id, f"token {position}: ids of this model are 0 to {vocab_size - 1}")
        return token_ids

    def _check_length(self, name: str, value: Any, length: int, *, complete: bool = True) -> None:
        """complete: if False, the prompt has more than `length` tokens."""
        max_model_len, limit = self._limits.max_model_len, self._most
        if not length:
            raise RequestError(name, value, "must not be empty")
        if length > limit:
            shown = f"{length:,}" if complete else f"more than {limit:,}"
            raise RequestError(
                name,
                value,
                f"has {shown} tokens, a prompt takes at most {limit:,}: shorten it, or start with a larger "
                f"max_model_len (now {max_model_len:,}), if the model was trained for more",
            )


def _parts(prompt: Prompt) -> Mapping[str, Any]:
    """The prompt as a dict. Checks the names and types of its fields."""
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    sequence = isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray))
    if sequence or hasattr(prompt, "__array__"):
        return {"prompt_token_ids": prompt}
    if not isinstance(prompt, Mapping):
        raise RequestError("prompt", prompt, ACCEPTED)
    for name in prompt:
        if name not in PROMPT_FIELDS:
            accepted = f"unknown field of a prompt; the fields are {', '.join(PROMPT_FIELDS)}"
            raise RequestError(str(name), prompt[name], accepted)
    if prompt.get("prompt") is None and prompt.get("prompt_token_ids") is None:
        raise RequestError("prompt", dict(prompt), ACCEPTED)
    for name in ("prompt", "cache_salt", "prediction"):
        text = prompt.get(name)
        if name == "prediction" and not isinstance(text, str):
            continue  # token ids, which `PromptReader` checks
        if not isinstance(text, (str, type(None))):
            raise RequestError(name, text, "must be a string")
        try:
            (text or "").encode()
        except UnicodeEncodeError as error:
            accepted = f"is not valid Unicode: {error.reason} at character {error.start}"
            raise RequestError(name, text, accepted) from None
    return prompt


def _truncated(token_ids: list[int], limit: TokenLimit, ends: tuple[list[int], list[int]]) -> list[int]:
    """Return `limit.count` tokens of a text. The ends are kept if there is room for one more token.

    ends: tokens that the tokenizer adds before and after every text.
    """
    (before, after), keep = ends, limit.count
    if token_ids[: len(before)] != before or token_ids[len(token_ids) - len(after) :] != after:
        before, after = [], []
    room = keep - len(before) - len(after)
    if room < 1:
        before, after, room = [], [], keep
    inner = token_ids[len(before) : len(token_ids) - len(after)]
    return before + (inner[:room] if limit.truncate == "right" else inner[-room:]) + after


def as_array(name: str, value: Any) -> np.ndarray:
    """A numpy or jax array, on the host. Raises RequestError if it has no values, because jax traces it."""
    try:
        return np.asarray(value)
    except TypeError:
        raise RequestError(name, value, "must hold concrete values, and not be traced by jax") from None
