"""Sampling state of a request that has no column in the request table: biases, masks, tokens for the penalties.

The host computes the mask of each row, as packed bits; the device only reads it. A mask combines four rules:
- `allowed_token_ids`;
- bad words of one token;
- end tokens before `min_tokens`;
- the last token of a longer bad word, after its other tokens were sampled.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jpaged.engine.step_plan import RowExtras
from jpaged.errors import RequestError
from jpaged.params.logits_processors import LogitsProcessor
from jpaged.params.sampling import SamplingParams

if TYPE_CHECKING:
    from jpaged.engine.request import Request


class SamplingExtras:
    """Sampling extras of a request group. All its requests share them; they are immutable."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        *,
        end_token_ids: Iterable[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        processors: Sequence[LogitsProcessor] = (),
    ):
        """Prepare the extras.

        end_token_ids: ids that end the request. bad_words: sequences of ids that must not be sampled.
        processors: the engine's logits processors.

        Raises RequestError if the request names an unknown logits processor, or wrong parameters of one.
        """
        self._counts = params.has_penalties
        self._bias = None
        self._scored = params.logprob_token_ids or ()
        bias = [*((token_id, 0.0) for token_id in self._scored), *(params.logit_bias or {}).items()]
        if bias:
            ids, values = zip(*bias, strict=True)
            self._bias = np.array(ids, np.int32), np.array(values, np.float32)
        self._always = np.ones(vocab_size, bool)
        if params.allowed_token_ids is not None:
            self._always[:] = False
            self._always[np.array(params.allowed_token_ids, np.intp)] = True
        self._forbidden_after: dict[tuple[int, ...], list[int]] = {}  # last tokens of bad words, by the tokens before
        for *before, last in bad_words:
            if before:
                self._forbidden_after.setdefault(tuple(before), []).append(last)
            else:
                self._always[last] = False
        self._ends = np.array(sorted(set(end_token_ids)), np.int64)
        self.min_tokens = params.min_tokens if len(self._ends) else 0  # before this many tokens, the mask has no ends
        self._lengths = sorted({len(before) for before in self._forbidden_after})
        self.processors, self._custom = _processor_arguments(params.logits_processors or {}, processors)
        self.has_grammar_or_budget = params.structured_outputs is not None or params.thinking_token_budget is not None
        self._packed = pack_mask(self._always)
        self.masks = self.follows_tokens or self.min_tokens > 0 or not self._always.all()

    @property
    def follows_tokens(self) -> bool:
        """True if the mask depends on the tokens sampled before."""
        return self.has_grammar_or_budget or bool(self._forbidden_after)

    @property
    def changes_masks(self) -> bool:
        """True if not all tokens have the same mask."""
        return self.follows_tokens or self.min_tokens > 0

    @property
    def is_needed(self) -> bool:
        """True if the row needs extras on the device."""
        return self._counts or self._bias is not None or self.masks or self.processors > 0

    @property
    def lookback(self) -> int:
        """Number of tokens before the next one that its mask depends on, apart from grammars and budgets."""
        return max(self._lengths, default=0)

    def row_extras(self, request: "Request") -> RowExtras:
        """Return the extras to upload when a row starts, or resumes, with the request's known tokens."""
        known, prompt_len = request.token_ids, request.prompt_len
        if request.score_from is not None:  # the tokens after `score_from` count as sampled, once they are scored
            known, prompt_len = known[: request.schedule.num_scored], request.score_from
        return RowExtras(
            token_ids=np.array(known, np.int32) if self._counts else None,
            prompt_len=prompt_len,
            bias_ids=None if self._bias is None else self._bias[0],
            bias=None if self._bias is None else self._bias[1],
            scores_bias_ids=bool(self._scored),
            mask=self.mask(known, len(known) - prompt_len) if self.masks else None,
            custom=self._custom,
        )

    def mask(self, token_ids: Sequence[int], num_output_tokens: int) -> np.ndarray:
        """Return the mask, uint32[words], of the token after `token_ids`. It may be shared: do not change it.

        num_output_tokens: number of output tokens at the end of `token_ids`.
        """
        forbidden = [
            token_id
            for length in self._lengths
            if length <= num_output_tokens
            for token_id in self._forbidden_after.get(tuple(token_ids[-length:]), ())
        ]
        is_early = num_output_tokens < self.min_tokens
        if not forbidden and not is_early:
            return self._packed
        allowed = self._always.copy()
        allowed[forbidden] = False
        if is_early:
            allowed[self._ends] = False
        return pack_mask(allowed)

    def allows_some(self, known_ids: np.ndarray | None) -> bool:
        """True if every mask allows some id. known_ids: bool[vocab_size], ids that may be sampled; None: all."""
        left = self._always.copy() if known_ids is None else self._always & known_ids
        left[self._ends[: len(self._ends) if self.min_tokens else 0]] = False
        left[[last for lasts in self._forbidden_after.values() for last in lasts]] = False
        return bool(left.any())


def _processor_arguments(
    requested: Mapping[str, Mapping[str, float]], processors: Sequence[LogitsProcessor]
) -> tuple[int, np.ndarray | None]:
    """Return (bit flags of the requested processors, parameters of all processors as one float32 array or None).

    Raises RequestError for an unknown processor, and for wrong parameters.
    """
    flags, arguments = 0, [np.zeros(len(each.parameters), np.float32) for each in processors]
    for name, values in requested.items():
        index = next((i for i, each in enumerate(processors) if each.name == name), None)
        if index is None:
            known = ", ".join(each.name for each in processors) or "none"
            raise RequestError("logits_processors", name, f"must be one that the engine was started with: {known}")
        parameters = processors[index].parameters
        if set(values) != set(parameters):
            accepted = f"{name!r} takes the parameters {', '.join(parameters) or 'none'}"
            raise RequestError("logits_processors", dict(values), accepted)
        flags |= 1 << index
        arguments[index][:] = [values[parameter] for parameter in parameters]
    return flags, np.concatenate(arguments) if requested else None


def pack_mask(allowed: np.ndarray) -> np.ndarray:
    """Pack bool[N] into uint32[ceil(N / 32)]: entry i is bit i % 32 of word i // 32."""
    bits = np.packbits(allowed, bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view(np.uint32)


def unpack_mask(words: np.ndarray) -> np.ndarray:
    """The ids, int32, whose bits are set in uint32[words]. Reads only words that are not 0: most are."""
    used = np.flatnonzero(words)
    word, bit = np.nonzero(np.unpackbits(words[used].view(np.uint8), bitorder="little").reshape(-1, 32))
    return (32 * used[word] + bit).astype(np.int32)
