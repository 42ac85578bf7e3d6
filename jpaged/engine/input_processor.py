"""A prompt and its parameters in, a checked request out. What is wrong is refused here, before anything is scheduled.

Has no state of its own that a request changes, so any thread may call it.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import numpy as np

from jpaged.engine.beam_search import BeamSearch
from jpaged.engine.grammar import Grammar, GrammarCompiler, ReasoningPrefix
from jpaged.engine.pooling import Pooling, check_task
from jpaged.engine.reasoning_budget import EncodedReasoningTags, ReasoningBudget
from jpaged.engine.request import Request
from jpaged.engine.request_group import RequestGroup
from jpaged.engine.sampling_extras import SamplingExtras
from jpaged.engine.stop_strings import stop_automaton
from jpaged.errors import RequestError
from jpaged.outputs import RequestMetrics
from jpaged.params.logits_processors import LogitsProcessor
from jpaged.params.pooling import PoolingParams
from jpaged.params.reasoning_tags import PROMPT_END, ReasoningTags
from jpaged.params.sampling import SamplingParams

logger = logging.getLogger(__name__)

Prompt = str | Mapping[str, Any] | Sequence[int] | np.ndarray
PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")
ACCEPTED = "must be a text, a list of token ids, or a dict with prompt or prompt_token_ids"
MAX_PROMPT_LOGPROBS = 2**20  # of one request: about 100 MB of Python objects
MAX_PRIORITY = 2**31 - 1
MAX_TRUNCATED = 4_000_000  # characters of a text that is to be truncated: about a second of tokenising
_DEFAULTS = SamplingParams()
POOLED = SamplingParams(temperature=0, max_tokens=1, detokenize=False)  # of requests that sample nothing


@dataclasses.dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the host must know of the model to check a request."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    eos_token_ids: tuple[int, ...] = ()  # ids that end an answer; generation_config.json may add to the tokenizer's
    eos_token_id: int | None = None  # the main one: it ends an answer without being its stop_reason
    pooling: Pooling | None = None  # what is given instead of new tokens
    processors: tuple[LogitsProcessor, ...] = ()
    known_ids: np.ndarray | None = None  # bool[vocab_size]: ids that are ever sampled; None = all
    priorities: bool = False  # whether the scheduling policy goes by them


class InputProcessor:
    """Makes requests of prompts. `tokenizer` is a transformers tokenizer, or None: then only token ids are taken."""

    def __init__(self, limits: ModelLimits, tokenizer: Any = None, compiler: GrammarCompiler | None = None):
        """compiler: of grammars; None where the engine takes none."""
        self.limits = limits
        self._compiler = compiler
        self._tokenizer = tokenizer
        self._told_of_beams = False
        self._eos_token_ids = frozenset(limits.eos_token_ids)
        if limits.eos_token_id is not None:
            self._eos_token_ids |= {limits.eos_token_id}

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        *,
        stream: bool = False,
        priority: int = 0,
    ) -> RequestGroup:
        """Check a prompt with its parameters and make a request of them. Raises RequestError."""
        arrival_time = time.monotonic()
        check_task(self.limits.pooling, params)
        pooling = params if isinstance(params, PoolingParams) else None
        params = POOLED if isinstance(params, PoolingParams) else params
        self._check_params(params)
        self._check_priority(priority)
        parts = self._parts(prompt)
        text, ids = parts.get("prompt"), parts.get("prompt_token_ids")
        token_ids = self._encode(text or "", params) if ids is None else self._checked_ids(ids, params)
        self._check_prompt_logprobs(params, len(token_ids))
        longest = self.limits.max_model_len
        if pooling is not None:
            longest = len(token_ids) + 1  # the token that is not sampled is none of the model's
        elif params.max_tokens is not None:
            longest = min(longest, len(token_ids) + params.max_tokens)
        end_token_ids = frozenset() if params.ignore_eos else self._eos_token_ids
        metrics = RequestMetrics(arrival_time=arrival_time)
        extras = self._extras(params, end_token_ids)
        requests = [
            Request(
                request_id=request_id,
                prompt_token_ids=token_ids,
                params=params,
                max_total_tokens=longest,
                eos_token_ids=end_token_ids,
                eos_token_id=self.limits.eos_token_id,
                metrics=metrics,
                priority=int(priority),
                index=index,
                extras=extras,
                is_beam=params.use_beam_search,
            )
            for index in range(params.num_sequences)
        ]
        salt = parts.get("cache_salt") or ""
        group = RequestGroup(request_id, text, token_ids, params, requests, metrics, pooling, stream, salt)
        tags = cast(ReasoningTags | None, params.reasoning_tags)
        opened = tags is not None and self._has_opened(tags, token_ids, params)
        if params.thinking_token_budget is not None:
            for request in requests:
                request.output.reasoning_budget = self._reasoning_budget(tags, params.thinking_token_budget, opened=opened)
        if params.structured_outputs is not None:
            reasoning = None if tags is None else ReasoningPrefix(tags.start, tags.end, opened)
            group.grammar = self._grammar(params, reasoning)
        if params.use_beam_search:
            group.search = self._search(params, longest - len(token_ids), end_token_ids)
        return group

    def _check_prompt_logprobs(self, params: SamplingParams, prompt_len: int) -> None:
        asked = params.prompt_logprobs
        if asked is not None and (asked + 1) * prompt_len > MAX_PROMPT_LOGPROBS:
            raise RequestError(
                "prompt_logprobs", asked, f"with a prompt of {prompt_len:,} tokens they are more than "
                f"{MAX_PROMPT_LOGPROBS:,}: at most {MAX_PROMPT_LOGPROBS // prompt_len - 1} for this prompt",
            )  # fmt: skip

    def _grammar(self, params: SamplingParams, reasoning: ReasoningPrefix | None) -> Future[Grammar]:
        if self._tokenizer is None or self._compiler is None:
            accepted = "the model has no tokenizer: start with the option tokenizer"
            raise RequestError("structured_outputs", params.structured_outputs, accepted)
        return self._compiler.submit(cast(Any, params.structured_outputs), reasoning)

    def _has_opened(self, tags: ReasoningTags, token_ids: list[int], params: SamplingParams) -> bool:
        """Whether the answer to a prompt goes on with reasoning."""
        if params.structured_outputs is None and params.thinking_token_budget is None:
            return False
        if self._tokenizer is None:
            accepted = "are texts, and the model has no tokenizer: start with the option tokenizer"
            raise RequestError("reasoning_tags", (tags.start, tags.end), accepted)
        return tags.opened_by(self._tokenizer.decode(token_ids[-PROMPT_END:]))

    def _reasoning_budget(self, tags: ReasoningTags | None, budget: int, *, opened: bool) -> ReasoningBudget:
        if tags is None:
            accepted = (
                "needs the tags of reasoning: give reasoning_tags beside it, or a reasoning_parser to LLM.chat, or to "
                "the server when it starts"
            )
            raise RequestError("thinking_token_budget", budget, accepted)
        end_ids = tuple(self._tokenizer.encode(tags.end, add_special_tokens=False))
        if not end_ids or max(end_ids) >= self.limits.vocab_size:
            raise RequestError("reasoning_tags", tags.end, "the model has no tokens for this tag")
        encoded = EncodedReasoningTags(tags.start.encode(), tags.end.encode(), end_ids)
        return ReasoningBudget(encoded, budget, opened=opened)

    def _extras(self, params: SamplingParams, eos_token_ids: frozenset[int]) -> SamplingExtras | None:
        """What the request's sampling needs beside numbers. Raises RequestError where nothing could be sampled."""
        if not params.needs_extras:
            return None
        extras = SamplingExtras(
            params,
            self.limits.vocab_size,
            end_token_ids=eos_token_ids | set(params.stop_token_ids or ()),
            bad_words=[ids for word in params.bad_words or () for ids in self._bad_word(word)],
            processors=self.limits.processors,
        )
        if not extras.is_needed:
            return None
        if not extras.allows_some(self.limits.known_ids):
            name = "min_tokens" if params.min_tokens else "bad_words" if params.bad_words else "allowed_token_ids"
            raise RequestError(name, getattr(params, name), "no token would be left to sample")
        return extras

    def _bad_word(self, word: str) -> list[list[int]]:
        """The ids of a text, and of it behind a blank. (vLLM takes these only where they are as many.)

        Of blanks, such as a line break, their own ids only.
        """
        if self._tokenizer is None:
            raise RequestError("bad_words", word, "the model has no tokenizer: use logit_bias")
        texts = (word.lstrip(), " " + word.lstrip()) if word.strip() else (word,)
        sequences = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return [ids for ids in sequences if ids]

    def _search(self, params: SamplingParams, max_new_tokens: int, eos_token_ids: frozenset[int]) -> BeamSearch:
        """The search of a request for one. Raises RequestError where the device gives it too few candidates."""
        limits = self.limits
        search = BeamSearch(
            width=params.num_sequences,
            max_new_tokens=max_new_tokens,
            end_token_ids=eos_token_ids | set(params.stop_token_ids or ()),
            length_penalty=params.length_penalty,
            early_stopping=cast(Any, params.early_stopping),
        )
        needed = min(search.num_candidates, limits.vocab_size)
        if needed > limits.max_logprobs:
            raise RequestError(
                "beam_width",
                params.num_sequences,
                f"takes the {needed} most likely tokens of each beam (the width, and one for each end token), the "
                f"engine gives {limits.max_logprobs}: use fewer beams, or start with max_logprobs={needed}",
            )
        no_part = [name for name in ("top_p", "top_k", "min_p") if getattr(params, name) != getattr(_DEFAULTS, name)]
        if no_part and not self._told_of_beams:
            self._told_of_beams = True
            logger.info("%s: no part in a beam search (said once)", ", ".join(no_part))
        return search

    def _check_priority(self, priority: int) -> None:
        if isinstance(priority, bool) or not isinstance(priority, (int, np.integer)) or abs(priority) > MAX_PRIORITY:
            raise RequestError("priority", priority, f"must be an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}")
        if priority and not self.limits.priorities:
            raise RequestError("priority", priority, "the engine does not go by it: start it with the option "
                               "scheduling_policy='priority', or leave it out")  # fmt: skip

    def _check_params(self, params: SamplingParams) -> None:
        limits = self.limits
        if not isinstance(params, SamplingParams):
            raise RequestError("sampling_params", params, "must be a jpaged.SamplingParams")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > limits.max_logprobs:
                accepted = f"at most {limits.max_logprobs}, which the option max_logprobs sets"
                raise RequestError(name, getattr(params, name), accepted)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                if token_id >= limits.vocab_size:
                    raise RequestError(name, token_id, f"token ids are 0 to {limits.vocab_size - 1}")
        if params.stop:
            if self._tokenizer is None:
                raise RequestError("stop", params.stop, "is looked for in the text, and the model has no tokenizer: "
                                   "leave it out, use stop_token_ids, or start with the option tokenizer")  # fmt: skip
            stop_automaton(tuple(params.stop))  # made here, where no step waits for it

    def _parts(self, prompt: Prompt) -> Mapping[str, Any]:
        """The prompt as a dict, its field names and types checked."""
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        sequence = isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray))
        if sequence or hasattr(prompt, "__array__"):
            return {"prompt_token_ids": prompt}
        if not isinstance(prompt, Mapping):
            raise RequestError("prompt", prompt, ACCEPTED)
        for name in prompt:
            if name not in PROMPT_FIELDS:
                accepted = f"unknown field of a prompt; there are {', '.join(PROMPT_FIELDS)}"
                raise RequestError(str(name), prompt[name], accepted)
        if prompt.get("prompt") is None and prompt.get("prompt_token_ids") is None:
            raise RequestError("prompt", dict(prompt), ACCEPTED)
        for name in ("prompt", "cache_salt"):
            text = prompt.get(name)
            if not isinstance(text, (str, type(None))):
                raise RequestError(name, text, "must be a text")
            try:
                (text or "").encode()
            except UnicodeEncodeError as error:
                accepted = f"is no valid Unicode: {error.reason} at character {error.start}"
                raise RequestError(name, text, accepted) from None
        return prompt

    def _most_tokens(self, params: SamplingParams) -> int | None:
        """So many of a prompt's tokens are kept; None: all. Raises RequestError for more than a prompt can have."""
        keep, most = params.truncate_prompt_tokens, self.limits.max_model_len - 1
        if keep is not None and keep > most:
            raise RequestError("truncate_prompt_tokens", keep, f"a prompt takes at most {most:,} tokens, of "
                               f"max_model_len={most + 1:,}: give a smaller one, or -1")  # fmt: skip
        return max(most + 1 - (params.max_tokens or 1), 1) if keep == -1 else keep

    def _truncated(self, token_ids: list[int], keep: int, *, right: bool) -> list[int]:
        """The tokens of a text, those that the tokenizer puts around any text kept where there is room for more."""
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
        """What the tokenizer puts before and after a text: told apart by how a text that has none of it is encoded."""
        ends = self._tokenizer.encode("", verbose=False)
        some = self._tokenizer.encode("a", verbose=False)
        for count in range(len(ends), -1, -1):
            before, after = ends[:count], ends[count:]
            if some[:count] == before and some[len(some) - len(after) :] == after:
                return before, after
        return [], []

    def _encode(self, text: str, params: SamplingParams) -> list[int]:
        if self._tokenizer is None:
            accepted = "the model has no tokenizer: give prompt_token_ids, or start with the option tokenizer"
            raise RequestError("prompt", text, accepted)
        if not text:
            raise RequestError("prompt", text, "must not be empty")
        keep, longest = self._most_tokens(params), self.limits.max_model_len * self._longest_token
        if keep is not None:
            longest = max(longest, MAX_TRUNCATED)
        if len(text) > longest:
            # Tokenising takes about a second a few million characters: not for a prompt that can never fit.
            accepted = f"has {len(text):,} characters, {self.limits.max_model_len:,} tokens are at most {longest:,}"
            if keep is not None:
                accepted = f"has {len(text):,} characters, which is too much to truncate: cut it to {longest:,}"
            raise RequestError("prompt", text, accepted)
        token_ids = self._tokenizer.encode(text, verbose=False)  # or it warns of lengths, which are checked here
        if keep is not None and len(token_ids) > keep:
            token_ids = self._truncated(token_ids, keep, right=params.truncation_side == "right")
        self._check_length("prompt", text, len(token_ids))
        return self._checked_ids(token_ids)

    @functools.cached_property
    def _longest_token(self) -> int:
        """Characters of the tokenizer's longest token."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def _checked_ids(self, ids: Any, params: SamplingParams = _DEFAULTS) -> list[int]:
        name, vocab_size = "prompt_token_ids", self.limits.vocab_size
        if hasattr(ids, "__array__"):
            ids = as_array(name, ids)
            if ids.ndim != 1:
                raise RequestError(name, ids, f"must be a list of token ids, or an array of one axis, not {ids.ndim}")
        elif isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Sequence):
            raise RequestError(name, ids, "must be a list of token ids")
        keep = self._most_tokens(params)
        if keep is not None:
            ids = ids[:keep] if params.truncation_side == "right" else ids[-keep:]
        self._check_length(name, ids, len(ids))  # before a walk over all of them: there may be millions
        token_ids = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        for position, token_id in enumerate(token_ids):
            if type(token_id) is not int:
                if not isinstance(token_id, np.integer):
                    raise RequestError(name, token_id, f"token {position} is no integer")
                token_ids[position] = token_id = int(token_id)
            if not 0 <= token_id < vocab_size:
                raise RequestError(name, token_id, f"token {position}: ids of this model are 0 to {vocab_size - 1}")
        return token_ids

    def _check_length(self, name: str, value: Any, length: int) -> None:
        limit = self.limits.max_model_len
        most = limit if self.limits.pooling is not None else limit - 1
        if not length:
            raise RequestError(name, value, "must not be empty")
        if length > most:
            raise RequestError(
                name,
                value,
                f"has {length:,} tokens, a prompt takes at most {most:,}: shorten it, or start with a larger "
                f"max_model_len (now {limit:,}) where the model has been made for more",
            )


def as_array(name: str, value: Any) -> np.ndarray:
    """An array, of numpy or jax, on the host. Raises RequestError for one without values: a tracer of jax."""
    try:
        return np.asarray(value)
    except TypeError as error:
        raise RequestError(name, value, "must hold concrete values, and not be traced by jax") from error
