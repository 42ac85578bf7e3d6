"""Custom logits processors: pure JAX functions. The engine starts with them, and requests select them by name.

A processor receives one row's logits and its parameters as float32 scalars, and returns the new logits:

    def scale(logits, by):
        return logits * by

    llm = LLM(model, logits_processors={"scale": scale})
    llm.generate(prompt, SamplingParams(logits_processors={"scale": {"by": 0.5}}))

It is compiled into the `sample` program, vectorised over the rows. It runs after `logit_bias` and before the penalties.
A logit of -inf marks an id that must not be sampled; the processor must keep it at -inf.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jpaged.errors import RequestError

MAX_PROCESSORS = 31  # the request table has one bit for each


@dataclasses.dataclass(frozen=True)
class LogitsProcessor:
    """A logits processor of the engine."""

    name: str
    function: Callable[..., Any]  # (float32[vocab], *float32[]) -> float32[vocab]
    parameters: tuple[str, ...]

    def __call__(self, logits: Any, *parameters: Any) -> Any:
        return self.function(logits, *parameters)


def logits_processors(given: Any) -> tuple[LogitsProcessor, ...]:
    """Check the engine option `logits_processors`, {name: function}. Raises RequestError if it is not valid."""
    if given is None:
        return ()
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given):
        raise RequestError("logits_processors", given, "must be a dict of names and functions")
    if len(given) > MAX_PROCESSORS:
        raise RequestError("logits_processors", f"{len(given)} functions", f"at most {MAX_PROCESSORS}")
    return tuple(_processor(name, function) for name, function in given.items())


def _processor(name: str, function: Any) -> LogitsProcessor:
    accepted = f"{name!r} must be a function of a row's logits, followed by named parameters"
    try:
        first, *others = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise RequestError("logits_processors", function, accepted) from None
    positional = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    if first.kind not in positional or any(one.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for one in others):
        raise RequestError("logits_processors", function, accepted)
    return LogitsProcessor(name, function, tuple(one.name for one in others))
