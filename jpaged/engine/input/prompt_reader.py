"""Turns a prompt in any accepted form into checked token ids.

Checks the length of a prompt before it does anything that takes long: there may be millions of characters or ids.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jpaged.engine.input.model_limits import ModelLimits
from jpaged.errors import RequestError
from jpaged.params.sampling import SamplingParams

Prompt = str | Mapping[str, Any] | Sequence[int] | np.ndarray
PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")
ACCEPTED = "must be a string, a list of token ids, or a dict with prompt or prompt_token_ids"
MAX_TRUNCATED = 4_000_000  # characters of a text that is to be truncated: about a second of tokenising


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A valid prompt."""

    text: str | None  # None if the caller gave token ids
    token_ids: list[int]
    cache_salt: str


class PromptReader:
    """Reads prompts. Has no state that a prompt changes, so any thread may call it."""

    def __init__(self, limits: ModelLimits, tokenizer: Any = None):
        """tokenizer: a transformers tokenizer; None: prompts must be token ids."""
        self._limits = limits
        self._tokenizer = tokenizer

    def read(self, prompt: Prompt, params: SamplingParams) -> CheckedPrompt:
        """Check and tokenise a prompt, and truncate it to truncate_prompt_tokens. Raises RequestError."""
        parts = _parts(prompt)
        text, ids = parts.get("prompt"), parts.get("prompt_token_ids")
        token_ids = self._encode(text or "", params) if ids is None else self._checked_ids(ids, params)
        return CheckedPrompt(text, token_ids, parts.get("cache_salt") or "")

    def _max_tokens(self, params: SamplingParams) -> int | None:
        """Number of prompt tokens to keep; None: all. Raises RequestError if a prompt can never have as many."""
        keep, limit = params.truncate_prompt_tokens, self._limits.max_model_len - 1
        if keep is not None and keep > limit:
            raise RequestError("truncate_prompt_tokens", keep, f"a prompt takes at most {limit:,} tokens, of "
                               f"max_model_len={limit + 1:,}: give a smaller one, or -1")  # fmt: skip
        return max(limit + 1 - (params.max_tokens or 1), 1) if keep == -1 else keep

    def _encode(self, text: str, params: SamplingParams) -> list[int]:
        if self._tokenizer is None:
            accepted = "the model has no tokenizer: give prompt_token_ids, or start with the option tokenizer"
            raise RequestError("prompt", text, accepted)
        if not text:
            raise RequestError("prompt", text, "must not be empty")
        max_model_len = self._limits.max_model_len
        keep, longest = self._max_tokens(params), max_model_len * self._longest_token
        if keep is not None:
            longest = max(longest, MAX_TRUNCATED)
        if len(text) > longest:
            # Tokenising a few million characters takes about a second, so it is not done for a prompt that cannot fit.
            accepted = f"has {len(text):,} characters, {max_model_len:,} tokens are at most {longest:,}"
            if keep is not None:
                accepted = f"has {len(text):,} characters, which is too much to truncate: cut it to {longest:,}"
            raise RequestError("prompt", text, accepted)
        token_ids = self._tokenizer.encode(text, verbose=False)  # verbose warns of lengths, which are checked here
        if keep is not None and len(token_ids) > keep:
            token_ids = self._truncated(token_ids, keep, right=params.truncation_side == "right")
        self._check_length("prompt", text, len(token_ids))
        return self._checked_ids(token_ids)

    def _truncated(self, token_ids: list[int], keep: int, *, right: bool) -> list[int]:
        """The tokens of a text, truncated. Keeps the tokens that the tokenizer adds to every text, if they fit."""
        before, after = self._special_ends
        if token_ids[: len(before)] != before or token_ids[len(token_ids) - len(after) :] != after:
            before, after = [], []
        room = keep - len(before) - len(after)
        if room < 1:
            before, after, room = [], [], keep
        inner = token_ids[len(before) : len(token_ids) - len(after)]
        return before + (inner[:room] if right else inner[-room:]) + after

    @functools.cached_property
    def _special_ends(self) -> tuple[list[int], list[int]]:
        """Tokens that the tokenizer adds before and after every text, found by encoding an empty one."""
        ends = self._tokenizer.encode("", verbose=False)
        some = self._tokenizer.encode("a", verbose=False)
        for count in range(len(ends), -1, -1):
            before, after = ends[:count], ends[count:]
            if some[:count] == before and some[len(some) - len(after) :] == after:
                return before, after
        return [], []

    @functools.cached_property
    def _longest_token(self) -> int:
        """Characters of the tokenizer's longest token."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def _checked_ids(self, ids: Any, params: SamplingParams | None = None) -> list[int]:
        """params: truncate as they say; None: the ids are truncated already."""
        name, vocab_size = "prompt_token_ids", self._limits.vocab_size
        if hasattr(ids, "__array__"):
            ids = as_array(name, ids)
            if ids.ndim != 1:
                raise RequestError(name, ids, f"must be a list of token ids, or an array of one axis, not {ids.ndim}")
        elif isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Sequence):
            raise RequestError(name, ids, "must be a list of token ids")
        keep = None if params is None else self._max_tokens(params)
        if params is not None and keep is not None:
            ids = ids[:keep] if params.truncation_side == "right" else ids[-keep:]
        self._check_length(name, ids, len(ids))
        token_ids = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        for position, token_id in enumerate(token_ids):
            if type(token_id) is not int:
                if not isinstance(token_id, np.integer):
                    raise RequestError(name, token_id, f"token {position} is not an integer")
                token_ids[position] = token_id = int(token_id)
            if not 0 <= token_id < vocab_size:
                raise RequestError(name, token_id, f"token {position}: ids of this model are 0 to {vocab_size - 1}")
        return token_ids

    def _check_length(self, name: str, value: Any, length: int) -> None:
        max_model_len = self._limits.max_model_len
        limit = max_model_len if self._limits.pooling is not None else max_model_len - 1
        if not length:
            raise RequestError(name, value, "must not be empty")
        if length > limit:
            raise RequestError(
                name,
                value,
                f"has {length:,} tokens, a prompt takes at most {limit:,}: shorten it, or start with a larger "
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
    for name in ("prompt", "cache_salt"):
        text = prompt.get(name)
        if not isinstance(text, (str, type(None))):
            raise RequestError(name, text, "must be a string")
        try:
            (text or "").encode()
        except UnicodeEncodeError as error:
            accepted = f"is not valid Unicode: {error.reason} at character {error.start}"
            raise RequestError(name, text, accepted) from None
    return prompt


def as_array(name: str, value: Any) -> np.ndarray:
    """A numpy or jax array, on the host. Raises RequestError if it has no values, because jax traces it."""
    try:
        return np.asarray(value)
    except TypeError as error:
        raise RequestError(name, value, "must hold concrete values, and not be traced by jax") from error
