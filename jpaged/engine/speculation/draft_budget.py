"""Decides how many drafts each row of a step gets, so that the step yields the most tokens per second."""

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jpaged.engine.speculation.accept_rate import DECAY, FIRST_CHANCE, LEAST_START, OVERALL_DECAY, AcceptRate
from jpaged.engine.speculation.program_times import ProgramKind, ProgramTimes

MIN_CHANCE = 0.02     # a draft that is less likely accepted is not worth the host's work, even if its slot is free
STICK = 1.01          # the last choice wins against choices that are better by less: equal programs do not alternate
FIRST_TRIAL = 32      # steps until a program that is not the best is measured again, at this number of rows
TRIAL_GROWTH = 2      # each further pause is longer by this factor,
LONGEST_TRIAL = 16_384
BURST = 3             # a program that differs from the one before runs at least this often in a row, because the
                      # time of the first step says nothing: see `Speculation.note_seconds`
PENDING = 8           # steps to wait for the first measurement of a program that was tried
NO_DRAFTS_PAUSE = 16  # steps until a trial that found no drafts is tried again
NO_DRAFTS = 0         # the choice of the decode program. Other choices are sizes of verify programs


@dataclasses.dataclass(slots=True)
class _RowBucket:
    """Choices and trials of steps with a similar number of rows."""

    size: int                  # rows of the decode program
    choice: int = NO_DRAFTS    # the last choice
    pause: int = FIRST_TRIAL
    next_trial: int = 0        # step of the next trial. 0: not set yet
    trial: int | None = None   # program of the last trial, until it is the choice
    running: int = NO_DRAFTS   # program of the last step
    burst: int = 0             # further steps that run the same program


class DraftBudget:
    """Chooses the decode program or a verify program for a step, and gives the drafts to the likeliest rows.

    A step with n rows yields n tokens with the decode program. With the verify program of T tokens it yields n tokens
    and the accepted ones of T - n drafts. The budget sorts all possible drafts by their chance, fills each program
    with the likeliest, and compares expected tokens per second.

    A verify program without a measurement counts as fast as the decode program, or as the next smaller verify program
    if that was measured. So it is tried once where it could pay. A program that is not the best is measured again
    after FIRST_TRIAL steps, then after pauses that grow by TRIAL_GROWTH up to LONGEST_TRIAL. The decode program is
    measured before any draft is made.

    The clock is the number of calls of `choose` and of `may_pay` that returned False.
    """

    def __init__(self, max_drafts: int, row_sizes: Sequence[int]):
        """Make a budget.

        max_drafts: most drafts of a row, at least 1.
        row_sizes:  rows of each decode program. The largest is the most rows of a step.
        """
        self._max_drafts = max_drafts
        self.verify_sizes: Sequence[int] = ()  # tokens of each verify program, ascending; the caller sets it
        self._buckets = [_RowBucket(size) for size in sorted(row_sizes)]
        self._row_sizes = [bucket.size for bucket in self._buckets]
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

    def note_seconds(self, kind: ProgramKind, size: int, seconds: float) -> None:
        """Add the measured seconds of a step that ran one program, or of a `propose` program.

        size: rows of a DECODE or PROPOSE program, tokens of a VERIFY program; the program's size, not the step's.
        """
        self._times.note(kind, size, seconds, self._step)
        if kind is ProgramKind.VERIFY:
            self._pending.pop(size, None)

    def seconds(self, kind: ProgramKind, size: int) -> float | None:
        """Estimated seconds of a program, None if it was never measured."""
        return self._times.seconds(kind, size)

    def may_pay(self, rows: Sequence[AcceptRate]) -> bool:
        """Whether drafts could pay for these rows if every row had `max_drafts`. Ask before the host makes drafts.

        False counts as a step. Takes 10 us for 64 rows, 17 us for 256 (a Xeon of 2 shared cores).
        """
        if self.verify_sizes and 0 < len(rows) < self.verify_sizes[-1]:
            bucket = self._bucket(len(rows))
            if bucket.burst > 0 and bucket.running != NO_DRAFTS:
                return True
            if self._step + 1 >= bucket.next_trial > 0 or self._bound_pays(rows, bucket):
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
        if num_rows == 0 or num_rows >= self.verify_sizes[-1]:
            return nothing
        bucket = self._bucket(num_rows)
        before, bucket.running = bucket.running, NO_DRAFTS
        if not any(available):
            bucket.next_trial = max(bucket.next_trial, self._step + NO_DRAFTS_PAUSE)
            return nothing
        if self._times.seconds(ProgramKind.DECODE, bucket.size) is None:
            return nothing
        if not bucket.next_trial:
            bucket.next_trial = self._step + bucket.pause
        is_trial, goes_on = self._step >= bucket.next_trial, bucket.burst > 0
        if goes_on and before == NO_DRAFTS:
            bucket.burst -= 1
            return nothing
        if not is_trial and not goes_on and not self._bound_pays(rows, bucket):
            bucket.choice = NO_DRAFTS
            return nothing
        order, gains = self._likeliest(rows, available)
        if goes_on and any(size == before for size, _ in self._usable(num_rows, gains, bucket)):
            choice, bucket.burst = before, bucket.burst - 1
        else:
            choice = self._best(num_rows, gains, bucket)
            if is_trial:
                choice = self._trial(num_rows, gains, bucket, choice)
            bucket.burst = 0 if choice == before else BURST - 1
        bucket.running = choice
        if choice == NO_DRAFTS:
            return nothing
        if self._times.seconds(ProgramKind.VERIFY, choice) is None:
            self._pending[choice] = self._step + PENDING
        return np.bincount(order[: choice - num_rows] // self._max_drafts, minlength=num_rows).tolist()

    def _bucket(self, num_rows: int) -> _RowBucket:
        index = bisect.bisect_left(self._row_sizes, num_rows)
        return self._buckets[min(index, len(self._buckets) - 1)]

    def _bound_pays(self, rows: Sequence[AcceptRate], bucket: _RowBucket) -> bool:
        """Whether some verify program could be the best. Compares an upper bound of the accepted drafts."""
        plain = self._times.seconds(ProgramKind.DECODE, bucket.size)
        if plain is None:
            return False
        step, num_rows = self._step, len(rows)
        chances = [row.chance if row.paused_until <= step else 0.0 for row in rows]
        highest = max(chances)
        most = sum(chances) * (1 - highest**self._max_drafts) / (1 - highest)
        return any(
            (num_rows + min(most, highest * (size - num_rows))) * plain > num_rows * seconds
            for size, seconds in self._verify_programs(num_rows, bucket)
        )

    def _verify_programs(self, num_rows: int, bucket: _RowBucket) -> Iterator[tuple[int, float]]:
        """Size and seconds of the verify programs for this number of rows, with the drafter's time."""
        seconds = self._times.seconds
        least = seconds(ProgramKind.DECODE, bucket.size) or 0.0
        propose = seconds(ProgramKind.PROPOSE, bucket.size) or 0.0
        for size in self.verify_sizes:
            measured = seconds(ProgramKind.VERIFY, size)
            if measured is not None:
                least = max(least, measured)
            if size > num_rows and (measured is not None or self._pending.get(size, 0) <= self._step):
                yield size, (least if measured is None else measured) + propose

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

    def _usable(self, num_rows: int, gains: np.ndarray, bucket: _RowBucket) -> Iterator[tuple[int, float]]:
        """Expected tokens per second of each verify program that holds more drafts than the next smaller one."""
        before = 0
        for size, seconds in self._verify_programs(num_rows, bucket):
            drafts = min(size - num_rows, len(gains) - 1)
            if drafts > before:
                yield size, (num_rows + gains[drafts]) / seconds
            before = drafts

    def _best(self, num_rows: int, gains: np.ndarray, bucket: _RowBucket) -> int:
        """The program with the most expected tokens per second."""
        plain = self._times.seconds(ProgramKind.DECODE, bucket.size) or 1.0
        rates = {NO_DRAFTS: num_rows / plain, **dict(self._usable(num_rows, gains, bucket))}
        if bucket.choice in rates:
            rates[bucket.choice] *= STICK
        bucket.choice = max(rates, key=rates.__getitem__)
        if bucket.trial == bucket.choice:  # the trial has changed the choice: conditions change, so try more often
            bucket.trial, bucket.pause = None, FIRST_TRIAL
        return bucket.choice

    def _trial(self, num_rows: int, gains: np.ndarray, bucket: _RowBucket, best: int) -> int:
        """The program to measure again: one with a single measurement, or the one measured longest ago.

        Returns `best` if all others were measured within the pause.
        """
        due: dict[int, int] = {}  # program -> step of its last measurement
        for choice in (NO_DRAFTS, *(size for size, _ in self._usable(num_rows, gains, bucket))):
            key = _key(choice, bucket)
            last = self._times.last_step(*key)
            settled = self._times.is_settled(*key)
            if choice != best and (not settled or self._step - last >= bucket.pause):
                due[choice] = last if settled else -1
        if not due:
            bucket.next_trial = self._step + bucket.pause
            return best
        bucket.pause = min(bucket.pause * TRIAL_GROWTH, LONGEST_TRIAL)
        bucket.next_trial = self._step + bucket.pause
        bucket.trial = min(due, key=due.__getitem__)
        self._times.doubt(*_key(bucket.trial, bucket))
        return bucket.trial


def _key(choice: int, bucket: _RowBucket) -> tuple[ProgramKind, int]:
    """Kind and size of a chosen program."""
    return (ProgramKind.DECODE, bucket.size) if choice == NO_DRAFTS else (ProgramKind.VERIFY, choice)
