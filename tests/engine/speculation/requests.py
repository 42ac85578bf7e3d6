"""Requests without an engine, for tests of drafters."""

from jpaged.engine.request import Request
from jpaged.outputs import RequestMetrics
from jpaged.params.sampling import SamplingParams


def request_of(prompt: list[int], root: bytes = b"", max_total_tokens: int = 4096) -> Request:
    """Return a request that has run no step. root: its prefix root."""
    request = Request(
        request_id="r",
        prompt_token_ids=prompt,
        params=SamplingParams(temperature=0),
        max_total_tokens=max_total_tokens,
        eos_token_ids=frozenset(),
        eos_token_id=None,
        metrics=RequestMetrics(arrival_time=0.0),
    )
    request.kv.prefix_root = root
    return request
