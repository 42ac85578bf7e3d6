"""Pooling: the answer is a vector of the prompt's last token, an embedding or class probabilities."""

from typing import TYPE_CHECKING

from jpaged.engine.engine_metrics import AnswerEnd
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.strategies.base import CollectedStep, Output, Strategy
from jpaged.engine.strategies.pooling import Pooling
from jpaged.errors import EngineError
from jpaged.outputs import ClassificationOutput, EmbeddingOutput, PoolingRequestOutput
from jpaged.params.pooling import PoolingParams

if TYPE_CHECKING:
    from jpaged.engine.request_group import RequestGroup


class PoolStrategy(Strategy):
    """One request, which ends with its prompt."""

    def __init__(self, pooling: Pooling, params: PoolingParams):
        self._pooling = pooling
        self._params = params
        self._pooled: EmbeddingOutput | ClassificationOutput | None = None

    def take(self, request: Request, collected: CollectedStep, index: int) -> RequestStatus | None:
        """Store the pooled vector, which ends the request."""
        pooled = collected.result.pooled
        if pooled is None:
            raise EngineError(f"request {request.request_id} is to be pooled, the step returned no vector")
        self._pooled = self._pooling.output(pooled[index], self._params)
        return RequestStatus.STOPPED

    def ends(self, request_group: "RequestGroup", output: Output) -> list[AnswerEnd]:
        """End of the one answer, which has no tokens."""
        return [AnswerEnd(request_group.first.schedule.status.value, None)]

    def output(self, request_group: "RequestGroup") -> PoolingRequestOutput:
        """The embedding or the probabilities; None if the request ended before its prompt did."""
        return PoolingRequestOutput(
            request_id=request_group.request_id,
            prompt=request_group.prompt,
            prompt_token_ids=request_group.prompt_token_ids,
            outputs=self._pooled,
            finished=request_group.has_ended,
            metrics=request_group.metrics,
            num_cached_tokens=request_group.first.schedule.num_cached_tokens,
        )
