"""Engines whose steps have drafts whether or not they pay, and a drafter that is wrong at fixed places."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from unittest import mock

from jpaged.engine.speculation import speculation
from jpaged.engine.speculation.accept_rate import AcceptRate
from jpaged.engine.speculation.draft_budget import DraftBudget
from jpaged.engine.speculation.draft_switch import DraftSwitch
from jpaged.outputs import SpeculationStats

PLAIN_STEPS = 7  # on average, one step of this number has no drafts


class RandomBudget(DraftBudget):
    """Gives each row a random number of its drafts, as many as the largest verify program holds. It reads no clock.

    The order of the rows is random. Some steps have no drafts, so that plain steps follow verify steps.
    """

    def __init__(self, max_drafts: int, row_sizes: Sequence[int]):
        super().__init__(max_drafts, row_sizes)
        self._random = random.Random(0)

    def may_pay(self, rows: Sequence[AcceptRate]) -> bool:
        return bool(self._random.randrange(PLAIN_STEPS))

    def is_paused(self, row: AcceptRate) -> bool:
        return False

    def choose(self, rows: Sequence[AcceptRate], available: Sequence[int]) -> list[int]:
        room, counts = self.verify_sizes[-1] - len(rows), [0] * len(rows)
        for index in self._random.sample(range(len(rows)), len(rows)):
            # all drafts of a row as often as fewer, so that long runs of accepted drafts occur
            most = min(available[index], room)
            counts[index] = self._random.choice([most, self._random.randint(0, most)])
            room -= counts[index]
        return counts


class AlwaysOn(DraftSwitch):
    """Asks the drafter in every step. It reads no clock."""

    def is_on(self, num_rows: int) -> bool:
        return True

    def note(self, num_rows: int, cost: float) -> bool:
        return False


@contextlib.contextmanager
def always_drafting() -> Iterator[None]:
    """Engines created inside the block draft in most steps. The device's speed does not decide."""
    with mock.patch.multiple(speculation, DraftBudget=RandomBudget, DraftSwitch=AlwaysOn):
        yield


class Recorded:
    """A draft function that knows answers, and is wrong at some of their positions."""

    def __init__(self, sequences: Sequence[Sequence[int]], *, wrong: int = 9, vocab_size: int = 256):
        """sequences: prompts with their answers. wrong: distance of the positions with another token; 0: none."""
        self.sequences = [list(sequence) for sequence in sequences]
        self.wrong, self.vocab_size = wrong, vocab_size

    def __call__(self, token_ids: list[int], count: int) -> list[int]:
        known = len(token_ids)
        for sequence in self.sequences:
            if sequence[:known] == token_ids:
                return [self._draft(sequence, place) for place in range(known, min(known + count, len(sequence)))]
        return []

    def _draft(self, sequence: list[int], place: int) -> int:
        is_wrong = self.wrong and place % self.wrong == 0
        return (sequence[place] + 1) % self.vocab_size if is_wrong else sequence[place]


def check_drafts(stats: SpeculationStats | None, *, rejects: bool = True) -> None:
    """Fail if the answers show nothing about drafts: some must be accepted, and some rejected."""
    assert stats is not None
    assert stats.accepted_tokens > 0, "no draft was accepted"
    assert not rejects or stats.accepted_tokens < stats.draft_tokens, "no draft was rejected"
