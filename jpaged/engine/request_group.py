"""One API call: a prompt, and the requests that answer it."""

import dataclasses
from concurrent.futures import Future

from jpaged.engine.adapters.loaded_adapter import LoadedAdapter
from jpaged.engine.grammar import Grammar
from jpaged.engine.output.token_sink import TokenSink
from jpaged.engine.request import Request
from jpaged.engine.strategies.base import Strategy
from jpaged.outputs import RequestMetrics
from jpaged.params.sampling import RequestOutputKind, SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RequestGroup:
    """The requests of one API call: `n` samples of one prompt, the beams of one search, or a single answer."""

    request_id: str
    prompt: str | None            # None if the caller gave token ids
    prompt_token_ids: list[int]
    params: SamplingParams        # greedy if the prompt is pooled
    requests: list[Request]
    strategy: Strategy            # turns the results of the requests' rows into the answer
    metrics: RequestMetrics
    streams: bool = False         # emit every new token, not only the final output
    cache_salt: str = ""          # requests share blocks only if their salts are equal
    grammar: Future[Grammar] | None = None  # structured outputs; compiled when the request group is added
    adapter: Future[LoadedAdapter] | None = None  # LoRA adapter; in host memory when the request group is added
    sink: TokenSink | None = None  # takes the tokens of the stream, in place of outputs, until the answer ends
    number: int = 0  # of the request group in `sink`

    @property
    def prefix_salt(self) -> str:
        """Requests with different ones share no KV. For routers, which name prefixes themselves."""
        if self.adapter is None:
            return self.cache_salt
        return f"{self.cache_salt} {self.adapter.result().key}"

    @property
    def first(self) -> Request:
        """The request that computes the prompt."""
        return self.requests[0]

    @property
    def is_plain(self) -> bool:
        """Whether the outputs of its stream need nothing but new tokens, until the last output."""
        params = self.params
        return (
            self.streams and len(self.requests) == 1 and params.logprobs is None and params.prompt_logprobs is None
            and not params.return_sampling_mask and params.output_kind is RequestOutputKind.DELTA
        )

    @property
    def has_ended(self) -> bool:
        """Whether all its requests have ended."""
        if len(self.requests) == 1:  # read for every output: `all` over a generator takes three times as long
            return self.requests[0].schedule.status.is_end
        return all(request.schedule.status.is_end for request in self.requests)
