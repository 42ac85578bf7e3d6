"""Decides how many drafts each row of a step gets, so that the step yields the most tokens per second."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jpaged.engine.speculation.accept_rate import DECAY, FIRST_CHANCE, LEAST_START, OVERALL_DECAY, AcceptRate
from jpaged.engine.speculation.program_times import Program, ProgramKind, ProgramTimes, decode_size

MIN_CHANCE = 0.02  # a draft that is less likely accepted is not worth the host's work, even if its slot is free
STICK = 1.01       # the last choice wins against choices that are better by less: equal programs do not alternate
PENDING = 8        # steps to wait for the first measurement of a program that was tried
NO_DRAFTS = 0      # the choice of the decode program. Other choices are sizes of verify programs


class DraftBudget:
    """Chooses the decode program or a verify program for a step, and gives the drafts to the likeliest rows.

    A step with n rows yields n tokens with the decode program. With the verify program of T tokens it yields n tokens
    and the accepted ones of T - n drafts. The budget sorts all possible drafts by their chance, fills each program
    with the likeliest, and compares expected tokens per second.

    A verify program without a measurement counts as fast as the decode program, or as the next smaller verify program
    if that was measured. So it is tried once where it could pay. A program that has not run for long counts as faster
    than it was measured (`Estimate`), so it is tried again. The decode program is measured before any draft is made.

    The clock is the number of calls of `choose` and of `may_pay` that returned False.
    """

    def __init__(self, max_drafts: int, row_sizes: Sequence[int]):
        """Make a budget.

        max_drafts: most drafts of a row, at least 1.
        row_sizes:  rows of each decode program. The largest is the most rows of a step.
        """
        self._max_drafts = max_drafts
        self.verify_sizes: Sequence[int] = ()  # tokens of each verify program, ascending; the caller sets it
        self._row_sizes = sorted(row_sizes)
        self._choices = dict.fromkeys(self._row_sizes, NO_DRAFTS)  # the last choice, by rows of the decode program
        self._exponents = np.arange(1, max_drafts + 1)
        self._times = ProgramTimes()
        self._pending: dict[int, int] = {}  # verify size -> step until which its first measurement may arrive
        self._step = 0
        self.overall = AcceptRate()

    def new_row(self) -> AcceptRate:
        """Acceptance of a new request: the drafter's overall chance, at least LEAST_START."""
        return AcceptRate(chance=max(self.overall.chance, LEAST_START))

    def note_drafts(self, row: AcceptRate, drafted: int, accepted: int) -> None:
        """Count the drafts of one row of a verify step. Without drafts it does nothing."""
        if drafted:
            self.overall.note(drafted, accepted, OVERALL_DECAY, FIRST_CHANCE)
            prior = max(self.overall.chance, LEAST_START)
            row.note(drafted, accepted, DECAY, prior)
            row.pause_if_rejected(accepted, self._step, prior)

    def note_run(self, programs: Mapping[Program, int], seconds: float, *, had_choice: bool = True) -> None:
        """Add the `usual` seconds of a run of steps. programs: how often each ran in it. had_choice: drafts were asked.

        The size of a program is its own number of rows (DECODE) or tokens (VERIFY), not the step's.
        """
        self._times.note(programs, seconds, had_choice=had_choice)

    def usual(self, program: Program, seconds: float) -> float:
        """The seconds of a step that ran a program, without an outlier's excess. Call it for each step of a run."""
        return self._times.usual(program, seconds)

    def may_pay(self, rows: Sequence[AcceptRate]) -> bool:
        """Whether drafts could pay for these rows if every row had `max_drafts`. Ask before the host makes drafts.

        False counts as a step. Takes 10 us for 64 rows, 17 us for 256 (a Xeon of 2 shared cores).
        """
        if self.verify_sizes and 0 < len(rows) < self.verify_sizes[-1] and self._bound_pays(rows):
            return True
        self._step += 1
        return False

    def is_paused(self, row: AcceptRate) -> bool:
        """Whether a row gets no drafts for now, because its drafts were rejected. The host need not propose any."""
        return row.paused_until > self._step

    def choose(self, rows: Sequence[AcceptRate], available: Sequence[int]) -> list[int]:
        """Return the number of drafts for each row. All 0: run the decode program.

        rows: acceptance of the requests of the step. Each samples at least one token.
        available: drafts that each row has or could have, from 0 to `max_drafts`.

        Otherwise run the smallest verify program that the rows and the drafts fit into.

        Takes 11 us for 64 rows and 17 us for 256 if no drafts can pay. Otherwise 30, 45 and 125 us for 8, 64 and 256
        rows (5 drafts, 8 verify programs, a Xeon of 2 shared cores).
        """
        self._step += 1
        num_rows = len(rows)
        nothing = [0] * num_rows
        if not any(available) or num_rows >= self.verify_sizes[-1] or not self._bound_pays(rows):
            return nothing
        order, gains = self._likeliest(rows, available)
        choice = self._best(num_rows, gains)
        if choice == NO_DRAFTS:
            return nothing
        if not self._times.is_known((ProgramKind.VERIFY, choice)):
            self._pending[choice] = self._step + PENDING
        return np.bincount(order[: choice - num_rows] // self._max_drafts, minlength=num_rows).tolist()

    def _bound_pays(self, rows: Sequence[AcceptRate]) -> bool:
        """Whether some verify program could be the best. Compares an upper bound of the accepted drafts."""
        step, num_rows = self._step, len(rows)
        plain = self._times.seconds(ProgramKind.DECODE, decode_size(self._row_sizes, num_rows))
        chances = [row.chance if row.paused_until <= step else 0.0 for row in rows]
        highest = max(chances)
        if plain is None or not highest:
            return False
        most = sum(chances) * (1 - highest**self._max_drafts) / (1 - highest)
        return any(
            (num_rows + min(most, highest * (size - num_rows))) * plain > num_rows * seconds
            for size, seconds in self._verify_programs(num_rows)
        )

    def _verify_programs(self, num_rows: int) -> Iterator[tuple[int, float]]:
        """Size and hoped seconds of the verify programs for this number of rows."""
        least = self._times.seconds(ProgramKind.DECODE, decode_size(self._row_sizes, num_rows)) or 0.0
        for size in self.verify_sizes:
            hoped = self._times.hoped(ProgramKind.VERIFY, size)
            if hoped is not None:
                least = max(least, hoped)
            if size > num_rows and (hoped is not None or self._pending.get(size, 0) <= self._step):
                yield size, least if hoped is None else hoped

    def _likeliest(self, rows: Sequence[AcceptRate], available: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """All drafts in order of their chance, and the expected accepted ones of the first 0, 1, 2, ... of them.

        Returns int64[D] and float64[D + 1]. Draft i is one of row i // max_drafts.
        """
        step, count = self._step, len(rows)
        chances = np.fromiter((row.chance if row.paused_until <= step else 0.0 for row in rows), np.float64, count)
        table = chances[:, None] ** self._exponents
        table[self._exponents > np.asarray(available)[:, None]] = 0.0
        flat = table.ravel()
        order = np.argsort(-flat, kind="stable")
        sorted_chances = flat[order]
        worth = int(np.count_nonzero(sorted_chances >= MIN_CHANCE))
        return order[:worth], np.concatenate([[0.0], np.cumsum(sorted_chances[:worth])])

    def _best(self, num_rows: int, gains: np.ndarray) -> int:
        """The program with the most expected tokens per second, of those that hold more drafts than a smaller one."""
        bucket, before = decode_size(self._row_sizes, num_rows), 0
        rates = {NO_DRAFTS: num_rows / (self._times.hoped(ProgramKind.DECODE, bucket) or 1.0)}
        for size, seconds in self._verify_programs(num_rows):
            drafts = min(size - num_rows, len(gains) - 1)
            if drafts > before:
                rates[size] = (num_rows + gains[drafts]) / seconds
            before = drafts
        if self._choices[bucket] in rates:
            rates[self._choices[bucket]] *= STICK
        choice = self._choices[bucket] = max(rates, key=rates.__getitem__)
        return choice
