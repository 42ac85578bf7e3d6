"""Makes the drafts of a step: asks the drafters, and lets the budget choose how many drafts each request gets.

Called by: `DraftScheduler`, for the drafts of a step; `Scheduler.results`, with what was accepted; `Engine`.
Owns: the drafters and the budget.
Never: changes a request's schedule.
"""

from collections.abc import Iterator, Sequence

from jpaged.engine.request import Request
from jpaged.engine.speculation.draft import Draft
from jpaged.engine.speculation.drafter import Drafter
from jpaged.engine.speculation.ngram import NgramDrafter
from jpaged.errors import EngineError
from jpaged.speculation_config import SpeculationConfig


class Speculation:
    """The drafters of an engine."""

    def __init__(self, drafter: Drafter, max_drafts: int):
        """max_drafts: most drafts per row of a step."""
        self._drafter = drafter
        self._max_drafts = max_drafts

    @classmethod
    def create(cls, config: SpeculationConfig, max_drafts: int) -> "Speculation":
        """The drafters of a configuration."""
        low, high = config.prompt_lookup_min, config.prompt_lookup_max
        if low is None or high is None:
            raise EngineError(f"method {config.method} has no drafter")
        return cls(NgramDrafter(low, high), max_drafts)

    def may_pay(self, num_rows: int, sizes: Sequence[int]) -> bool:
        """False if drafts cannot make a step of `num_rows` rows faster. sizes: `Runner.verify_sizes`."""
        return num_rows < sizes[-1]

    def choose(
        self, requests: Sequence[Request], most: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[tuple[Request, Draft]]:
        """Drafts of some of the requests. most: most drafts of each. sizes: `Runner.verify_sizes`."""
        room = sizes[-1] - len(requests)
        for request, limit in zip(requests, most, strict=True):
            in_flight = request.schedule.num_in_flight - 1  # without the token of the step that is being planned
            if limit <= 0 or room <= 0:
                continue
            guesses = self._drafter.propose(request, in_flight + min(limit, room))
            count = len(guesses) - in_flight
            if count > 0:
                room -= count
                yield request, Draft(count, guesses)

    def note_result(self, request: Request, drafts: int, accepted: int) -> None:
        """Note how many drafts of a request were accepted."""
