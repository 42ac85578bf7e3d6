"""The switch between decoding with and without a drafter, and what a drafter costs while it is off."""

import dataclasses
import itertools

import numpy as np
import pytest

from jpaged.engine.speculation import speculation as speculation_module
from jpaged.engine.speculation.draft_switch import MUCH, TRIAL, DraftSwitch
from jpaged.engine.speculation.model_drafts import HeadDrafts
from jpaged.engine.speculation.program_times import Estimate
from jpaged.engine.speculation.speculation import HEAD_SKIPPED, RUN, SKIPPED, Speculation
from tests.engine.speculation.requests import request_of

SIZES, BLOCK = (8, 40), 4


def costs(switch: DraftSwitch, runs: int, *, off: float, on: float, rows: int = 3) -> list[bool]:
    """Whether each run was made with the drafter, if these are the costs."""
    modes = []
    for _ in range(runs):
        modes.append(switch.is_on(rows))
        switch.note(rows, on if modes[-1] else off)
    return modes


def test_plain_decoding_is_measured_first():
    assert costs(DraftSwitch([8]), 2, off=1.0, on=0.9) == [False, True]


@pytest.mark.parametrize("on", [0.5, 0.9, 1.05, 1.2, 3.0])
def test_the_worse_way_costs_little(on):
    modes = costs(DraftSwitch([8]), 1000, off=1.0, on=on)
    spent = sum(on if is_on else 1.0 for is_on in modes[100:]) / 900
    assert spent < 1.03 * min(on, 1.0)
    assert 0 < sum(modes[100:]) < 900  # both are tried again


def test_it_follows_a_change():
    switch = DraftSwitch([8])
    costs(switch, 200, off=1.0, on=1.2)
    assert sum(costs(switch, 200, off=1.0, on=0.6)) > 120
    assert sum(costs(switch, 200, off=1.0, on=1.2)) < 60


def test_each_number_of_rows_has_its_own_mode():
    switch = DraftSwitch([32, 8])
    costs(switch, 50, off=1.0, on=0.5, rows=8)
    assert (switch.is_on(1), switch.is_on(8), switch.is_on(9), switch.is_on(33)) == (True, True, False, False)


def test_one_slow_run_does_not_turn_it_off():
    switch = DraftSwitch([8])
    costs(switch, 20, off=1.0, on=0.7)
    assert switch.is_on(8)
    switch.note(8, 50.0)
    assert switch.is_on(8)


@dataclasses.dataclass
class Plan:
    """The fields of a step plan that `note_step` reads."""

    rows: list[int]
    drafts: object = None
    prompt_tokens: tuple[int, ...] = ()
    num_decodes: int = 0

    @property
    def total_tokens(self) -> int:
        return 2 * len(self.rows) if self.drafts else len(self.rows)


class Steps:
    """An engine's calls, with one step in flight, for one row with a draft head."""

    def __init__(self, *, drafter: bool = False):
        head = None if drafter else HeadDrafts(block_size=BLOCK, kv_group=0, max_len=10_000)
        self.speculation = Speculation(Asked() if drafter else None, 3, (8,), head)  # type: ignore[arg-type]
        self.request = request_of(list(range(40)))
        self.request.schedule.row, self.request.schedule.num_computed = 0, 40
        self.request.schedule.num_in_flight = 1
        self.in_flight: Plan | None = None

    def step(self, seconds: float, *, sizes=SIZES, prompt: bool = False) -> bool:
        """Plan a step, and collect the one before. Returns whether the head follows the planned step."""
        speculation = self.speculation
        speculation.begin_step(sizes, 1)
        if speculation.may_draft([self.request]):
            list(speculation.choose([self.request], [3]))
        followed = speculation._head is not None and (
            speculation.plan_head([self.request], np.ones(1, np.int32), np.ones(1, bool)) is not None
        )
        if self.in_flight is not None:
            speculation.note_step(self.in_flight, seconds, None)  # type: ignore[arg-type]
        self.in_flight = Plan([0], prompt_tokens=(1,) if prompt else ())
        return followed


class Asked:
    """A drafter that counts."""

    def __init__(self):
        self.count = 0

    def propose(self, request, count):
        self.count += 1
        return ()


def test_a_head_follows_no_step_while_it_is_off():
    """Following costs time, and here no draft is ever accepted."""
    steps = Steps()
    followed: list[bool] = []
    for _ in range(4000):
        followed.append(steps.step(1.25 if followed and followed[-1] else 1.0))
    starts = [i for i in range(1, len(followed)) if followed[i] and not followed[i - 1]]
    lengths = [followed.index(False, start) - start for start in starts]
    assert starts[0] == 1 + SKIPPED + RUN
    assert set(lengths) == {HEAD_SKIPPED + BLOCK + TRIAL * RUN}  # the first run may begin in the middle of a block
    assert len(starts) <= 10


def test_a_trial_that_costs_much_ends_early():
    modes = costs(DraftSwitch([8]), 1000, off=1.0, on=2 * MUCH)
    assert not any(a and b for a, b in itertools.pairwise(modes))


@pytest.mark.parametrize(("new", "runs"), [(0, 61), (1, 61), (4, 15), (8, 4)])
def test_a_new_request_is_tried_sooner(new, runs):
    """The drafter costs 1.2. It looks better by DRIFT a run, and by FIRST_DRIFT if all requests are new."""
    switch = DraftSwitch([8])
    switch._modes[8].costs = {False: Estimate(1.0, count=50), True: Estimate(1.2, count=50)}
    switch.note_new(8, new)
    assert costs(switch, 100, off=1.0, on=1.2, rows=8).index(True) == pytest.approx(runs, abs=1)


def test_it_pauses_before_its_programs_exist():
    steps = Steps()
    assert not any(steps.step(1.0, sizes=()) for _ in range(100))
    assert not any(steps.step(1.0) for _ in range(SKIPPED + RUN))  # the steps before did not count


def test_steps_with_prompts_are_not_measured(monkeypatch):
    steps, noted = Steps(), []
    monkeypatch.setattr(steps.speculation._switch, "note", lambda rows, cost: noted.append(cost))
    for number in range(100):
        steps.step(1.0, prompt=number % RUN == 0)
    assert not noted
    for _ in range(1 + SKIPPED + 3 * RUN):
        steps.step(1.0)
    assert noted == [1.0] * 3


def test_the_host_looks_nothing_up_while_it_is_off():
    steps = Steps(drafter=True)
    for _ in range(1 + SKIPPED + RUN):
        steps.step(1.0)
    drafter = steps.speculation._drafter
    assert isinstance(drafter, Asked)
    assert drafter.count == 0
    for _ in range(1000):
        steps.step(1.2 if steps.speculation._is_on else 1.0)
    assert 0 < drafter.count < 100


def test_a_grammar_has_drafts_while_it_is_off(monkeypatch):
    steps = Steps(drafter=True)
    monkeypatch.setattr(steps.request.output, "matcher", Forced())
    steps.speculation._budget.verify_sizes = SIZES
    steps.speculation._budget.usual((speculation_module.ProgramKind.DECODE, 8), 1.0)
    steps.speculation.begin_step(SIZES, 1)
    assert not steps.speculation._is_on
    assert steps.speculation.may_draft([steps.request])
    (drafted,) = steps.speculation.choose([steps.request], [3])
    assert drafted[1].guesses == [7, 8, 9]


class Forced:
    """A matcher that leaves no choice for three tokens."""

    def forced_tokens(self):
        return [7, 8, 9]
