"""Scoring: the answer is the log-probabilities of a text's tokens. The token that the request samples is dropped."""

from typing import TYPE_CHECKING

import numpy as np

from jpaged.engine.request import Request
from jpaged.engine.step_plan import StepResult
from jpaged.engine.strategies.sample import SampleStrategy
from jpaged.errors import EngineError
from jpaged.outputs import RequestOutput, ScoreOutput

if TYPE_CHECKING:
    from jpaged.engine.request_group import RequestGroup


class ScoreStrategy(SampleStrategy):
    """One request, whose prompt is the text."""

    def take_scores(self, request: Request, result: StepResult, entries: slice) -> None:
        """Store the log-probabilities of the next tokens."""
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
