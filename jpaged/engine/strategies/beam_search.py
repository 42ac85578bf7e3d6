"""Beam search decisions: which beams continue, which are finished, and when the search is over. No KV, no requests.

One step:

1. Every live beam returns its most likely next tokens. Each makes a candidate. A candidate's sum is the beam's sum of
   log-probabilities plus the token's log-probability.
2. Candidates that end become hypotheses, if they are among the `width` best. A candidate ends at an end token, and at
   `max_new_tokens`. The `width` best hypotheses are kept. Their score is `sum / length ** length_penalty`, where the
   length counts the end token.
3. The `width` best candidates that do not end are the live beams after the step.
4. The search is over at `max_new_tokens`. With `width` hypotheses it may be over earlier, depending on early_stopping:
   - True: at once.
   - False: when the best live beam, scored at its present length, is not better than the worst hypothesis.
   - "never": the same, but if `length_penalty` rewards length, the beam is scored at the longest length it could reach.

These are the rules of Hugging Face Transformers' `generate(num_beams=width, do_sample=False)`. Sums and scores are
float32 there too, so near-ties are decided alike.

Transformers takes the (1 + end tokens) * width best candidates of all beams. Here `num_candidates` per beam give the
same result. A candidate among the `width` best has fewer than `width` better ones in its own beam. The `width` best
candidates of a beam that do not end are among its first width + end tokens.

Ties: if sums are equal, the candidate of the earlier beam comes first, then the earlier one of that beam. If scores are
equal, the older hypothesis comes first.
"""

import bisect
import dataclasses
import math
from typing import Literal

import numpy as np

from jpaged.errors import EngineError, RequestError

MAX_PENALTY = 1e30  # of length ** |length_penalty|. Times a sum of log-probabilities it must stay in float32: 3e38


@dataclasses.dataclass(frozen=True, slots=True)
class BeamStep:
    """A live beam after a step."""

    parent: int     # the beam that it continues: an index into the live beams before the step
    token_id: int
    logprob: float  # of this token


@dataclasses.dataclass(frozen=True, slots=True)
class Hypothesis:
    """One answer of a beam search. Log-probabilities are natural logarithms."""

    token_ids: tuple[int, ...]    # generated; the token that ended it is the last one
    logprobs: tuple[float, ...]   # of each token
    beam_indices: tuple[int, ...] # of each token: index of the live beam that it was a candidate of
    cumulative_logprob: float     # their sum, in float32
    score: float                  # cumulative_logprob / len(token_ids) ** length_penalty
    finish_reason: Literal["stop", "length"] | None  # stop: at an end token; None: the search has not ended


class BeamSearch:
    """Beam search of one prompt. It begins with one live beam, the prompt itself.

    width:          number of beams, from 1; also the number of hypotheses that are kept.
    max_new_tokens: maximum number of tokens of a hypothesis, from 1.
    end_token_ids:  tokens that end a hypothesis.
    length_penalty: exponent of the length that divides a sum. Positive rewards long hypotheses, 0 compares sums.
    early_stopping: True, False or "never"; see above. With width 1, "never" may look beyond the greedy answer.

    Raises RequestError for a value out of range.
    """

    def __init__(
        self,
        *,
        width: int,
        max_new_tokens: int,
        end_token_ids: frozenset[int] = frozenset(),
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
    ):
        if width < 1:
            raise RequestError("beam_width", width, "must be an integer from 1")
        if max_new_tokens < 1:
            raise RequestError("max_tokens", max_new_tokens, "must be an integer from 1")
        if not isinstance(early_stopping, bool) and early_stopping != "never":
            raise RequestError("early_stopping", early_stopping, 'must be True, False or "never"')
        limit = math.log(MAX_PENALTY) / math.log(max(max_new_tokens, 2))
        if not abs(length_penalty) <= limit:  # refuses NaN as well
            raise RequestError(
                "length_penalty", length_penalty,
                f"must lie between -{limit:.1f} and {limit:.1f} for {max_new_tokens:,} new tokens, or scores overflow",
            )  # fmt: skip
        self.width = width
        self.max_new_tokens = max_new_tokens
        self.num_candidates = width + len(end_token_ids)  # per beam; fewer if fewer tokens are possible
        self.num_tokens = 0  # of every live beam
        self.is_over = False
        self._end_token_ids = end_token_ids
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._live: list[_Path | None] = [None]
        self._sums = np.zeros(1, np.float32)  # of each live beam
        self._finished: list[_Finished] = []  # best first, at most `width`

    def advance(self, token_ids: np.ndarray, logprobs: np.ndarray) -> list[BeamStep]:
        """Advance all live beams by one token. Returns the new live beams, best first; none if the search is over.

        token_ids: int[beams, candidates]      candidates per beam, in the order of the last call's result.
        logprobs:  float32[beams, candidates]  most likely first. A token at -inf or NaN is impossible.

        There are at least `num_candidates` candidates per beam, or all tokens of the vocabulary. If all are impossible,
        the search is over and keeps its beams. Raises EngineError if it was over already, or for wrong shapes.
        """
        if self.is_over:
            raise EngineError("the beam search is over")
        if token_ids.shape != logprobs.shape or len(logprobs) != len(self._live):
            raise EngineError(f"{len(self._live)} beams, candidates {token_ids.shape} and {logprobs.shape}")
        sums = (self._sums[:, None] + logprobs.astype(np.float32, copy=False)).ravel()
        # Enough: at most one candidate per beam and end token is skipped.
        order = _largest(sums, self.width + len(self._live) * len(self._end_token_ids))
        parents = (order // logprobs.shape[1]).tolist()
        candidates = zip(
            parents, token_ids.ravel()[order].tolist(), logprobs.ravel()[order].tolist(), sums[order].tolist(),
            strict=True,
        )  # fmt: skip
        if not order.size:
            self.is_over = True
            return []
        length = self.num_tokens + 1
        steps: list[BeamStep] = []
        live: list[_Path | None] = []
        live_sums: list[float] = []
        for rank, (parent, token_id, logprob, total) in enumerate(candidates):
            if len(live) == self.width:
                break
            is_end = token_id in self._end_token_ids
            if is_end or length == self.max_new_tokens:
                if rank < self.width:
                    path = _Path(self._live[parent], parent, token_id, logprob)
                    self._finish(_Finished(self._score(total, length), path, total, "stop" if is_end else "length"))
                continue
            steps.append(BeamStep(parent, token_id, logprob))
            live.append(_Path(self._live[parent], parent, token_id, logprob))
            live_sums.append(total)
        self.num_tokens = length
        self.is_over = not live or (len(self._finished) == self.width and self._may_stop(live_sums[0]))
        self._live = [] if self.is_over else live
        self._sums = np.array([] if self.is_over else live_sums, np.float32)
        return [] if self.is_over else steps

    def best(self, n: int) -> list[Hypothesis]:
        """Up to n hypotheses, best first; none before the first step. Live beams count, at their present length."""
        found = list(self._finished)
        if self.num_tokens:
            length, sums = self.num_tokens, self._sums.tolist()
            found += [
                _Finished(self._score(total, length), path, total, None)
                for path, total in zip(self._live, sums, strict=True)
            ]
            found.sort(key=_Finished.rank_key)
        return [item.hypothesis() for item in found[:n]]

    def _score(self, total: float, length: int) -> float:
        return float(np.float32(total) / np.float32(length**self._length_penalty))

    def _finish(self, finished: "_Finished") -> None:
        bisect.insort(self._finished, finished, key=_Finished.rank_key)
        del self._finished[self.width :]

    def _may_stop(self, best_sum: float) -> bool:
        """Whether a full set of hypotheses ends the search. best_sum: of the best live beam."""
        if self._early_stopping is True:
            return True
        longest = self._early_stopping == "never" and self._length_penalty > 0
        return self._score(best_sum, self.max_new_tokens if longest else self.num_tokens) <= self._finished[-1].score


def _largest(sums: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest finite values, largest first; on a tie the earlier one. There may be fewer.

    Sorts only values that can be among the largest: with 64 * 65 values that takes a sixth of the time.
    """
    keys = np.fmin(-sums, np.inf)  # NaN becomes infinity
    if len(keys) > 4 * count:
        kept = np.flatnonzero(keys <= np.partition(keys, count - 1)[count - 1])
        keys = keys[kept]
    else:
        kept = np.arange(len(keys))
    order = np.argsort(keys, kind="stable")[:count]
    return kept[order[keys[order] < np.inf]]


@dataclasses.dataclass(slots=True, eq=False)  # not frozen: creating it would take three times as long
class _Path:
    """A beam as a linked list of tokens, the last one first. Forks share their past, and no step copies it."""

    before: "_Path | None"
    beam_index: int
    token_id: int
    logprob: float


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Finished:
    """A hypothesis whose tokens have not been written out."""

    score: float
    path: _Path | None
    total: float
    finish_reason: Literal["stop", "length"] | None

    def rank_key(self) -> float:
        """Sorts the best first."""
        return -self.score

    def hypothesis(self) -> Hypothesis:
        """Walk back from the last token."""
        steps: list[_Path] = []
        path = self.path
        while path is not None:
            steps.append(path)
            path = path.before
        steps.reverse()
        return Hypothesis(
            token_ids=tuple(step.token_id for step in steps),
            logprobs=tuple(step.logprob for step in steps),
            beam_indices=tuple(step.beam_index for step in steps),
            cumulative_logprob=self.total,
            score=self.score,
            finish_reason=self.finish_reason,
        )
