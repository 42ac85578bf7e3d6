"""Drafts of one request for one step."""

import dataclasses
import enum
from collections.abc import Sequence


class DraftSource(enum.Enum):
    """Where drafts come from, in the order in which the sources are asked."""

    GRAMMAR = "grammar"        # the request's grammar leaves no choice
    PREDICTION = "prediction"  # the answer that the caller predicted
    DRAFTER = "drafter"        # the drafter that the engine was started with


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """Drafts of one decode in a verify step.

    guesses: guessed tokens after the request's known tokens. The step takes those after its last sampled token. None:
             the drafter on the device makes the drafts.
    """

    count: int  # tokens to check, at least 1
    guesses: Sequence[int] | None
    source: DraftSource = DraftSource.DRAFTER
