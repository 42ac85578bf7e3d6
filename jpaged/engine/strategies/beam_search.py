"""Which beams go on, which are finished, and when a beam search is over: decisions only, no KV and no requests.

One step:
1. Every live beam hands in its most likely next tokens. Each makes a candidate: the beam's sum of log-probabilities
   plus the token's.
2. Of the `width` best candidates, those that end (at an end token; at `max_new_tokens` all do) become hypotheses, with
   the score  sum / length ** length_penalty,  the end token counted. The `width` best hypotheses are kept.
3. The `width` best candidates that do not end are the live beams after the step.
4. The search is over at `max_new_tokens`, or once there are `width` hypotheses and `early_stopping` says so:
   True at once; False when the best live beam, scored at its present length, is no better than the worst hypothesis;
   "never" the same, but scored at the longest length it could reach if `length_penalty` rewards length.

These are the rules of Hugging Face Transformers' `generate(num_beams=width, do_sample=False)`, and sums and scores are
float32 as there, so that what is close there is close here. It takes (1 + end tokens) * width candidates over all
beams where `num_candidates` a beam decide the same: a candidate among the `width` best has fewer than `width` better
ones in its own beam, and the `width` best of a beam that do not end lie among its first width + end tokens.
Equal sums: the candidate of the earlier beam, then the earlier one of that beam; equal scores: the older hypothesis.
"""

import bisect
import dataclasses
import math
from typing import Literal

import numpy as np

from jpaged.errors import EngineError, RequestError

MAX_PENALTY = 1e30  # of length ** |length_penalty|: float32 ends at 3e38, and a sum of log-probabilities multiplies it


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
    beam_indices: tuple[int, ...] # of each token, the live beam whose candidate it was
    cumulative_logprob: float     # their sum, in float32
    score: float                  # cumulative_logprob / len(token_ids) ** length_penalty
    finish_reason: Literal["stop", "length"] | None  # stop: at an end token. None: the search was left before it ended


class BeamSearch:
    """Beam search of one prompt; begins with one live beam, the prompt itself.

    width:          beams, from 1; also the most hypotheses that are kept.
    max_new_tokens: tokens that a hypothesis has at most, from 1.
    end_token_ids:  tokens that end a hypothesis.
    length_penalty: exponent of the length that a sum is divided by: positive rewards long hypotheses, 0 compares sums.
    early_stopping: True, False or "never"; see above. With width 1, "never" may look beyond the greedy answer.

    Raises RequestError for a value that none of this takes.
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
        if not abs(length_penalty) <= limit:  # not a number is refused as well
            raise RequestError(
                "length_penalty", length_penalty,
                f"must lie between -{limit:.1f} and {limit:.1f} for {max_new_tokens:,} new tokens, or scores overflow",
            )  # fmt: skip
        self.width = width
        self.max_new_tokens = max_new_tokens
        self.num_candidates = width + len(end_token_ids)  # that a beam has to hand in; fewer if no token is left
        self.num_tokens = 0  # of every live beam
        self.is_over = False
        self._end_token_ids = end_token_ids
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._live: list[_Path | None] = [None]
        self._sums = np.zeros(1, np.float32)  # of each live beam
        self._finished: list[_Finished] = []  # best first, at most `width`

    def advance(self, token_ids: np.ndarray, logprobs: np.ndarray) -> list[BeamStep]:
        """Take each live beam's most likely next tokens; the live beams after that, best first, none at the end.

        token_ids: int[beams, candidates]  in the order of the beams that the last call gave; at first there is one.
        logprobs:  float32[beams, candidates], most likely first. A token at -inf, or no number, cannot come.
        At least `num_candidates` candidates, or all tokens there are. Where no token can come at all, the search is
        over, and the beams stay as they were. Raises EngineError if the search is over or the shapes do not fit.
        """
        if self.is_over:
            raise EngineError("the beam search is over")
        if token_ids.shape != logprobs.shape or len(logprobs) != len(self._live):
            raise EngineError(f"{len(self._live)} beams, candidates {token_ids.shape} and {logprobs.shape}")
        sums = (self._sums[:, None] + logprobs.astype(np.float32, copy=False)).ravel()
        # Enough: at most one candidate a beam and end token is passed over.
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
        """The n best hypotheses by score, best first; before the end, live beams at their present length count too.

        Fewer if there are not so many: before the first step there are none.
        """
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
        """Whether a full set of hypotheses ends the search, the best live beam's sum being this."""
        if self._early_stopping is True:
            return True
        longest = self._early_stopping == "never" and self._length_penalty > 0
        return self._score(best_sum, self.max_new_tokens if longest else self.num_tokens) <= self._finished[-1].score


def _largest(sums: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest finite values, largest first, of equal ones the earlier first; fewer if there are.

    Only those that can be among them are sorted: of 64 * 65 values that takes a sixth of the time.
    """
    keys = np.fmin(-sums, np.inf)  # not-a-number becomes infinity
    if len(keys) > 4 * count:
        kept = np.flatnonzero(keys <= np.partition(keys, count - 1)[count - 1])
        keys = keys[kept]
    else:
        kept = np.arange(len(keys))
    order = np.argsort(keys, kind="stable")[:count]
    return kept[order[keys[order] < np.inf]]


@dataclasses.dataclass(slots=True, eq=False)  # not frozen: that would take three times as long to make
class _Path:
    """A beam as its last token and what came before: a fork shares its past, and a step does not copy it."""

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
