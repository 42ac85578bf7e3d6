"""Steps that a draft head follows: while drafts are chosen, and now and then while they are not."""

import numpy as np
import pytest

from jpaged.engine.speculation.model_drafts import HeadDrafts
from jpaged.engine.speculation.speculation import FIRST_FOLLOW, FOLLOWED_STEPS, Speculation
from tests.engine.speculation.requests import request_of

PROGRAMS = (8, 40)


@pytest.fixture
def speculation(monkeypatch) -> Speculation:
    head = HeadDrafts(block_size=4, kv_group=0, max_len=10_000)
    made = Speculation(None, 3, (8,), head)
    monkeypatch.setattr(made._budget, "may_pay", lambda rows: True)
    return made


def running():
    request = request_of(list(range(40)))
    request.schedule.row, request.schedule.num_computed, request.schedule.num_in_flight = 0, 40, 1
    return request


def followed(speculation: Speculation, request, steps: int, *, drafts: int) -> list[bool]:
    """Whether each step was followed. drafts: that the budget chooses."""
    speculation._budget.choose = lambda rows, available: [drafts] * len(rows)
    found = []
    for _ in range(steps):
        speculation.begin_step(PROGRAMS)
        list(speculation.choose([request], [3]))
        found.append(speculation.plan_head([request], np.ones(1, np.int32), np.ones(1, bool)) is not None)
    return found


def test_it_pauses_without_drafts_and_follows_again_after_growing_pauses(speculation):
    steps = followed(speculation, running(), 8 * FIRST_FOLLOW, drafts=0)
    starts = [i for i in range(1, len(steps)) if steps[i] and not steps[i - 1]]
    assert all(steps[:FOLLOWED_STEPS])
    assert starts == [FIRST_FOLLOW - 1, 3 * FIRST_FOLLOW - 1, 7 * FIRST_FOLLOW - 1]
    assert sum(steps) == pytest.approx(4 * FOLLOWED_STEPS, abs=8)


def test_it_follows_while_drafts_are_chosen(speculation):
    request = running()
    assert all(followed(speculation, request, 3 * FIRST_FOLLOW, drafts=1))
    assert sum(followed(speculation, request, FIRST_FOLLOW - 1, drafts=0)) == FOLLOWED_STEPS


def test_it_follows_no_step_before_its_programs_exist(speculation):
    request = running()
    speculation.begin_step(())
    assert speculation.plan_head([request], np.ones(1, np.int32), np.ones(1, bool)) is None
