"""How long the host may wait before it schedules the next step."""

import pytest

from jpaged.engine.engine import Engine
from jpaged.engine.spare_time import SHARE, STEPS, SpareTime
from tests.engine.fake_runner import FakeRunner
from tests.engine.greedy_requests import greedy, prompt_of


def filled(*steps: tuple[int, float, float]) -> SpareTime:
    """After STEPS steps of 64 tokens, 10 ms and 1 ms of the host, and then `steps`."""
    spare = SpareTime()
    for step in [(64, 0.010, 0.001)] * STEPS + list(steps):
        spare.note(*step)
    return spare


def test_the_host_may_wait_for_a_share_of_the_step_without_its_own_time():
    assert filled().seconds(64) == pytest.approx(SHARE * 0.010 - 0.001)


def test_the_shortest_of_the_latest_steps_counts():
    spare = filled((64, 0.006, 0.001), (64, 0.030, 0.001))
    assert spare.seconds(64) == pytest.approx(SHARE * 0.006 - 0.001)
    for _ in range(STEPS):
        spare.note(64, 0.020, 0.001)
    assert spare.seconds(64) == pytest.approx(SHARE * 0.020 - 0.001), "older steps are forgotten"


def test_a_smaller_step_than_all_before_may_take_any_time():
    spare = filled((8, 0.002, 0.001), (8, 0.004, 0.001))
    assert spare.seconds(7) <= 0
    assert spare.seconds(63) == spare.seconds(8) == pytest.approx(SHARE * 0.002 - 0.001)


def test_nothing_is_known_after_too_few_steps():
    spare = SpareTime()
    for _ in range(STEPS - 1):
        spare.note(64, 1.0, 0.0)
    assert spare.seconds(64) == 0


def test_one_slow_step_makes_the_next_one_wait_for_nothing():
    """After the chunks of a long prompt: the first decode loads its program, or a command takes seconds meanwhile."""
    assert filled((1, 10.0, 0.001)).seconds(1) <= 0


def test_steps_before_an_idle_time_are_forgotten():
    """A request with a short context would wait for a share of the step of one with a long context."""
    engine = Engine(FakeRunner())
    for _ in range(STEPS):
        engine._spare.note(1, 10.0, 0.0)
    engine.add_request("a", prompt_of(3), greedy(8))
    engine.step()
    assert engine.spare_seconds == 0


def test_the_engine_waits_for_nothing_without_a_step_or_beside_a_waiting_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SpareTime, "seconds", lambda self, tokens: 100.0)
    engine = Engine(FakeRunner(max_num_seqs=1))
    assert engine.spare_seconds == 0
    engine.add_request("a", prompt_of(3), greedy(8))
    assert engine.spare_seconds == 0, "no step is in flight"
    engine.step()
    assert 90 < engine.spare_seconds <= 100
    engine.add_request("b", prompt_of(3), greedy(8))
    assert engine.spare_seconds == 0
    stages = Engine(FakeRunner(num_stages=2))
    stages.add_request("a", prompt_of(3), greedy(8))
    stages.step()
    assert stages.spare_seconds == 0, "the other stage needs a step"
