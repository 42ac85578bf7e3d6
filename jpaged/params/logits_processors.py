"""Custom logits processors: pure JAX functions that an engine is started with, and requests name.

A processor takes one row's logits and its own parameters as float32 scalars, and gives the row's new logits:

    def scale(logits, by):
        return logits * by

    llm = LLM(model, logits_processors={"scale": scale})
    llm.generate(prompt, SamplingParams(logits_processors={"scale": {"by": 0.5}}))

It becomes part of the program that samples, vectorised over the rows, and runs behind `logit_bias` and before the
penalties. An id at -inf may not be sampled, and is to stay there.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jpaged.errors import RequestError

MAX_PROCESSORS = 31  # a bit each, in the request table


@dataclasses.dataclass(frozen=True)
class LogitsProcessor:
    """One of an engine's processors."""

    name: str
    function: Callable[..., Any]  # (float32[vocab], *float32[]) -> float32[vocab]
    parameters: tuple[str, ...]

    def __call__(self, logits: Any, *parameters: Any) -> Any:
        return self.function(logits, *parameters)


def logits_processors(given: Any) -> tuple[LogitsProcessor, ...]:
    """The option `logits_processors`, checked: {name: function}. Raises RequestError."""
    if given is None:
        return ()
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given):
        raise RequestError("logits_processors", given, "must be a dict from names to functions")
    if len(given) > MAX_PROCESSORS:
        raise RequestError("logits_processors", f"{len(given)} functions", f"at most {MAX_PROCESSORS}")
    return tuple(_processor(name, function) for name, function in given.items())


def _processor(name: str, function: Any) -> LogitsProcessor:
    accepted = f"{name!r} must be a function of a row's logits, and behind them of parameters by name"
    try:
        first, *others = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise RequestError("logits_processors", function, accepted) from None
    positional = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    if first.kind not in positional or any(one.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for one in others):
        raise RequestError("logits_processors", function, accepted)
    return LogitsProcessor(name, function, tuple(one.name for one in others))
