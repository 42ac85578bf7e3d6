"""Pooling: the answer is an embedding or class probabilities, of the prompt's last token or of each token."""

from typing import TYPE_CHECKING

import numpy as np

from jpaged.engine.observe.engine_metrics import AnswerEnd
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.step_plan import StepResult
from jpaged.engine.strategies.base import CollectedStep, Output, Strategy
from jpaged.engine.strategies.pooled_outputs import Pooled, Pooling
from jpaged.errors import EngineError, LogitsError
from jpaged.outputs import PoolingRequestOutput
from jpaged.params.pooling import PoolingParams

if TYPE_CHECKING:
    from jpaged.engine.request_group import RequestGroup


class PoolStrategy(Strategy):
    """One request, which ends with its prompt."""

    def __init__(self, pooling: Pooling, params: PoolingParams):
        self._pooling = pooling
        self._params = params
        self._pooled: Pooled | None = None
        self._tokens: list[np.ndarray] = []  # float32[N, size] of each chunk, if each token has a vector

    def take_scores(self, request: Request, result: StepResult, entries: slice) -> None:
        """Store the vectors of a chunk's tokens."""
        if result.pooled_tokens is None:
            raise EngineError(f"request {request.request_id}: the step returned no vectors of tokens")
        self._tokens.append(result.pooled_tokens[entries])

    def take(self, request: Request, collected: CollectedStep, index: int) -> RequestStatus | None:
        """Store the pooled vector, which ends the request. Raises LogitsError for numbers that are not finite."""
        pooled = collected.result.pooled
        if pooled is None:
            raise EngineError(f"request {request.request_id} is to be pooled, but the step returned no vector")
        values = np.concatenate(self._tokens) if self._params.per_token else pooled[index]
        if not np.isfinite(values).all():
            raise LogitsError
        self._pooled, self._tokens = self._pooling.output(values, self._params), []
        return RequestStatus.STOPPED

    def ends(self, request_group: "RequestGroup", output: Output) -> list[AnswerEnd]:
        """End of the one answer, which has no tokens."""
        return [AnswerEnd(request_group.first.schedule.status.value, None)]

    def output(self, request_group: "RequestGroup") -> PoolingRequestOutput:
        """The vector or vectors; None if the request ended before its prompt did, or failed."""
        request, error = request_group.first, None
        if request.schedule.status is RequestStatus.FAILED:
            error = str(request.output.stop_reason or "the result could not be processed; the log says why")
        return PoolingRequestOutput(
            request_id=request_group.request_id,
            prompt=request_group.prompt,
            prompt_token_ids=request_group.prompt_token_ids,
            outputs=self._pooled,
            finished=request_group.has_ended,
            metrics=request_group.metrics,
            num_cached_tokens=request.schedule.num_cached_tokens,
            weight_version=request.output.weight_changes[-1][1],
            error=error,
        )
