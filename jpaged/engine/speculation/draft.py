"""Drafts of one request for one step."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """Drafts of one decode in a verify step.

    guesses: guessed tokens after the request's known tokens. The step takes those after its last sampled token. None:
             the drafter on the device makes the drafts.
    """

    count: int  # tokens to check, at least 1
    guesses: Sequence[int] | None
