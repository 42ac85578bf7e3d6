"""Follows the answer in a text that is scored: the mask of each of its tokens.

Masks depend on earlier tokens with a grammar, a reasoning budget, `min_tokens`, or bad words of several tokens. They
are those of generation. After a token that the grammar does not allow, and after the end of its answer, no token could
be drawn: from there on, each mask forbids the text's own token, so that its log-probability is -inf.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from jpaged.engine.grammar import GrammarMatcher
from jpaged.engine.output.reasoning_budget import ReasoningBudget
from jpaged.errors import EngineError, RequestError

if TYPE_CHECKING:
    from jpaged.engine.request import Request


class ScoredText:
    """Follows one text, from its first scored token on. Each token is asked for once, also after a preemption."""

    def __init__(
        self,
        request: "Request",
        matcher: GrammarMatcher | None,
        budget: ReasoningBudget | None,
        text_of: Callable[[int], bytes],
    ):
        """text_of: bytes of a token, for the budget."""
        self._request, self._matcher, self._budget = request, matcher, budget
        self._text_of = text_of
        self._ended = False  # a grammar's answer has ended, or left the grammar
        self.error: RequestError | None = None  # the grammar failed: the request must end

    def masks(self, positions: range) -> list[np.ndarray]:
        """uint32[words] for each of these positions in the text, which follow those of the last call.

        If the grammar fails, sets `error`; the masks of the other tokens then mean nothing.
        """
        return [self._next(position) for position in positions]

    def _next(self, position: int) -> np.ndarray:
        """The mask of the token at a position, after which the grammar and the budget advance by this token."""
        request, matcher, budget = self._request, self._matcher, self._budget
        if request.extras is None or request.score_from is None:
            raise EngineError(f"request {request.request_id} is not scored with masks")
        token_id = request.prompt_token_ids[position]
        count = position - request.score_from
        before = request.prompt_token_ids[max(position - request.extras.lookback, 0) : position]
        if self._ended or self.error is not None:
            return _without(request.extras.mask(before, count), token_id)
        try:
            mask = request.mask_after(before, count, matcher, budget)
            if matcher is not None:
                is_allowed = bool(mask[token_id // 32] >> np.uint32(token_id % 32) & 1)
                self._ended = not is_allowed or token_id in request.stop_ids or not matcher.accept(token_id)
        except RequestError as error:
            self.error = error
            return _without(request.extras.mask(before, count), token_id)
        if budget is not None:
            budget.append(token_id, self._text_of(token_id))
        return mask


def _without(mask: np.ndarray, token_id: int) -> np.ndarray:
    """A mask that forbids a token, and allows another one."""
    mask = mask.copy()
    mask[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if not mask.any():
        mask[0] = 1 if token_id else 2
    return mask
