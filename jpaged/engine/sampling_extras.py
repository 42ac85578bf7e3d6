"""What a request's sampling needs beside the fields of its row: biases, which ids it may sample, what it has so far.

Which ids may be sampled is worked out here, as packed bits: ids that were allowed, single ids that were forbidden, ends
that come too early (`min_tokens`), and the last token of a forbidden sequence whose others have just been sampled. The
device only looks bits up.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jpaged.engine.step_plan import RowExtras
from jpaged.errors import RequestError
from jpaged.params.logits_processors import LogitsProcessor
from jpaged.params.sampling import SamplingParams

if TYPE_CHECKING:
    from jpaged.engine.request import Request


class SamplingExtras:
    """Of one user's request; its answers share it. Changes nothing once made."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        *,
        end_token_ids: Iterable[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        processors: Sequence[LogitsProcessor] = (),
    ):
        """end_token_ids: what ends the request. bad_words: sequences of ids that must not be sampled.

        processors: the engine's. Raises RequestError where the request names another, or other parameters.
        """
        self._counts = params.has_penalties
        self._bias = None
        if params.logit_bias:
            ids, values = zip(*params.logit_bias.items(), strict=True)
            self._bias = np.array(ids, np.int32), np.array(values, np.float32)
        self._always = np.ones(vocab_size, bool)
        if params.allowed_token_ids is not None:
            self._always[:] = False
            self._always[list(params.allowed_token_ids)] = True
        self._sequences: dict[tuple[int, ...], list[int]] = {}  # what must not be followed by which ids
        for *before, last in bad_words:
            if before:
                self._sequences.setdefault(tuple(before), []).append(last)
            else:
                self._always[last] = False
        self._ends = np.array(sorted(set(end_token_ids)), np.int64)
        self._min_tokens = params.min_tokens if len(self._ends) else 0
        self._lengths = sorted({len(before) for before in self._sequences})
        asked = params.logits_processors or {}
        self.processors, custom = 0, [np.zeros(len(each.parameters), np.float32) for each in processors]
        for name, parameters in asked.items():
            index = next((i for i, each in enumerate(processors) if each.name == name), None)
            if index is None:
                known = ", ".join(each.name for each in processors) or "none"
                raise RequestError("logits_processors", name, f"the engine was not started with it: there is {known}")
            wanted = processors[index].parameters
            if set(parameters) != set(wanted):
                accepted = f"{name!r} takes the parameters {', '.join(wanted) or 'none'}"
                raise RequestError("logits_processors", dict(parameters), accepted)
            self.processors |= 1 << index
            custom[index][:] = [parameters[parameter] for parameter in wanted]
        self._custom = np.concatenate(custom) if asked else None
        # what the request itself knows of its tokens: where it stands in its grammar, and in its reasoning
        self.has_grammar_or_budget = params.structured_outputs is not None or params.thinking_token_budget is not None
        self._packed = pack_mask(self._always)
        self.masks = self.follows_tokens or self._min_tokens > 0 or not self._always.all()

    @property
    def follows_tokens(self) -> bool:
        """Whether what may be sampled depends on which tokens were."""
        return self.has_grammar_or_budget or bool(self._sequences)

    @property
    def is_needed(self) -> bool:
        """Whether there is anything at all."""
        return self._counts or self._bias is not None or self.masks or self.processors > 0

    def changes_at(self, num_output_tokens: int) -> bool:
        """Whether the mask of the token behind so many is another than that of the one before it."""
        return self._min_tokens > 0 and num_output_tokens == self._min_tokens

    def row_extras(self, request: "Request") -> RowExtras:
        """What a row is given that starts, or goes on, with the request's known tokens."""
        return RowExtras(
            token_ids=np.array(request.token_ids, np.int32) if self._counts else None,
            prompt_len=request.prompt_len,
            bias_ids=None if self._bias is None else self._bias[0],
            bias=None if self._bias is None else self._bias[1],
            mask=self.mask(request.token_ids, request.num_output_tokens) if self.masks else None,
            custom=self._custom,
        )

    def mask(self, token_ids: Sequence[int], num_output_tokens: int) -> np.ndarray:
        """uint32[words], not to be changed: what may be sampled behind tokens of which the last so many are output."""
        forbidden = [
            token_id
            for length in self._lengths
            if length <= num_output_tokens
            for token_id in self._sequences.get(tuple(token_ids[-length:]), ())
        ]
        is_early = num_output_tokens < self._min_tokens
        if not forbidden and not is_early:
            return self._packed
        allowed = self._always.copy()
        allowed[forbidden] = False
        if is_early:
            allowed[self._ends] = False
        return pack_mask(allowed)

    def allows_some(self, known_ids: np.ndarray | None) -> bool:
        """Whether there is always an id left to sample, of those that the engine ever samples (None: of all)."""
        left = self._always.copy() if known_ids is None else self._always & known_ids
        left[self._ends[: len(self._ends) if self._min_tokens else 0]] = False
        left[[last for lasts in self._sequences.values() for last in lasts]] = False
        return bool(left.any())


def pack_mask(allowed: np.ndarray) -> np.ndarray:
    """uint32[ceil(N / 32)] of bool[N]: bit i % 32 of word i // 32 is entry i."""
    bits = np.packbits(allowed, bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view(np.uint32)
