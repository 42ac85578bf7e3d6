"""Greedy requests with fixed prompts, and a loop that runs an engine until they are finished."""

from jpaged.engine.engine import Engine
from jpaged.outputs import RequestOutput
from jpaged.params.sampling import SamplingParams


def greedy(max_tokens: int | None = 8, **fields) -> SamplingParams:
    """Return greedy sampling parameters."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def run(engine: Engine) -> dict[str, RequestOutput]:
    """Run the engine until no request is left. Checks integrity after every step."""
    finals = {}
    while engine.has_work:
        for output in engine.step():
            finals[output.request_id] = output
        engine.check_integrity()
    assert engine.stats().used_blocks == 0
    return finals


def prompt_of(length: int, start: int = 0) -> list[int]:
    """Return a prompt of `length` tokens. Prompts with the same start share a prefix."""
    return [(7 * (start + i) + 3) % 97 for i in range(length)]
