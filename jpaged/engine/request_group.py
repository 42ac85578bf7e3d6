"""What a user asked: one prompt, and the requests that are its answers."""

import dataclasses
from concurrent.futures import Future

import numpy as np

from jpaged.engine.beam_search import BeamSearch
from jpaged.engine.grammar import Grammar
from jpaged.engine.request import Request
from jpaged.outputs import ClassificationOutput, EmbeddingOutput, RequestMetrics
from jpaged.params.pooling import PoolingParams
from jpaged.params.sampling import SamplingParams


@dataclasses.dataclass(slots=True, eq=False)
class RequestGroup:
    """A user's request: `n` samples of one prompt, the beams of one search, or simply one answer.

    Samples run by themselves once the first has computed the prompt, which the others fork from. Beams advance
    together: when all that live have given their candidates, `search` says which go on, and with what.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    requests: list[Request]
    metrics: RequestMetrics
    pooling: PoolingParams | None = None
    stream: bool = False           # give out every token as it comes, not only the end
    cache_salt: str = ""           # requests share blocks only where it is equal
    grammar: Future[Grammar] | None = None  # what the answers must match; it is done when the request is added
    search: BeamSearch | None = None
    beams: list[Request] = dataclasses.field(default_factory=list)  # of a search: those that live, in its order
    given: dict[Request, tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=dict)  # in this step
    # of a search: what each step's beams gave, (int32[beams, K], float32[beams, K]); kept where log-probabilities are
    # asked for
    candidates: list[tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)
    pooled: EmbeddingOutput | ClassificationOutput | None = None

    @property
    def first(self) -> Request:
        """The request that computes the prompt."""
        return self.requests[0]

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens to any of its requests."""
        return all(request.schedule.status.is_end for request in self.requests)
