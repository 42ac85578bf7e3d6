"""Scoring: the answer is the log-probabilities of a text's tokens. The token that the request samples is dropped."""

from typing import TYPE_CHECKING

import numpy as np

from jpaged.engine.output.scored_text import ScoredText
from jpaged.engine.request import Request
from jpaged.engine.step_plan import StepResult
from jpaged.engine.strategies.base import Strategy, StrategyContext
from jpaged.engine.strategies.sample import SampleStrategy
from jpaged.errors import EngineError
from jpaged.outputs import RequestOutput, ScoreOutput

if TYPE_CHECKING:
    from jpaged.engine.request_group import RequestGroup


class ScoreStrategy(SampleStrategy):
    """One request, whose prompt is the text."""

    def begin(self, request_group: "RequestGroup", context: StrategyContext) -> None:
        """Prepare the masks of the tokens, and add the request to the scheduler. Waits for its grammar."""
        request = request_group.first
        output = request.output
        budget, output.reasoning_budget = output.reasoning_budget, None  # it must not follow the token that is dropped
        if request.scores_processed and request.extras is not None and request.extras.changes_masks:
            matcher = None if request_group.grammar is None else request_group.grammar.result().matcher()
            output.scored_text = ScoredText(request, matcher, budget, context.writer.token_bytes)
        Strategy.begin(self, request_group, context)

    def take_scores(self, request: Request, result: StepResult, entries: slice) -> None:
        """Store the log-probabilities of the next tokens. Raises RequestError if the grammar has failed."""
        text = request.output.scored_text
        if text is not None and text.error is not None:
            raise text.error
        if result.scores is None or request.output.scores is None:
            raise EngineError(f"request {request.request_id}: the step returned no scores")
        request.output.scores.append(result.scores.some(entries))

    def output(self, request_group: "RequestGroup") -> RequestOutput:
        """The output, with a `score` if all tokens are scored."""
        output, request = super().output(request_group), request_group.first
        first, scores = request.score_from or 1, request.output.scores or []
        if sum(len(each.logprobs) for each in scores) == request.prompt_len - first:
            logprobs = np.concatenate([np.zeros(0, np.float32), *(each.logprobs for each in scores)])
            ranks = np.concatenate([np.zeros(0, np.int32), *(each.ranks for each in scores)])
            output.score = ScoreOutput(request.prompt_token_ids, first, logprobs, ranks)
        return output
