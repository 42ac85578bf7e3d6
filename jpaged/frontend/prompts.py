"""Reads the prompts of one call, and the parameters that go with each prompt."""

from collections.abc import Sequence
from typing import TypeVar, cast

import numpy as np

from jpaged.engine.input.prompt_reader import Prompt, as_array
from jpaged.errors import RequestError

T = TypeVar("T")


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return prompts as a list. A list of integers is one prompt of token ids; a 2-D array is one prompt per row."""
    if hasattr(prompts, "__array__"):
        prompts = as_array("prompts", prompts)
        return list(prompts) if prompts.ndim == 2 else [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (str, bytes)):
        return [cast(Prompt, prompts)]
    if prompts and all(isinstance(part, (int, np.integer)) for part in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def one_each(name: str, given: T | Sequence[T], count: int) -> Sequence[T]:
    """Return one value of parameter `name` per prompt. Raises RequestError unless a list has `count` values."""
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        accepted = f"{len(given)} values for {count} prompts: give one, or one for each prompt"
        raise RequestError(name, f"a list of {len(given)}", accepted)
    return given


def with_prompt_index(error: RequestError, index: int, count: int) -> RequestError:
    """Add the prompt's index to an error's message, if there are several prompts."""
    if count == 1:
        return error
    return RequestError(error.parameter, error.value, f"{error.accepted}, in prompt {index} of {count}")
