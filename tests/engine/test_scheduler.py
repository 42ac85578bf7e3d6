"""Decisions of the scheduler: which request starts, which overtakes which, and which is preempted."""

import pytest

from jpaged.engine.engine import Engine, EngineOptions, SchedulingOptions
from jpaged.engine.kv_cache.kv_cache_manager import KVCacheManager
from jpaged.engine.kv_cache.prefix_finder import Prefix
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.scheduling.scheduler_state import SchedulerLimits
from jpaged.engine.scheduling.step_pace import StepPace
from jpaged.errors import EngineError
from jpaged.outputs import RequestMetrics
from jpaged.params.sampling import SamplingParams
from tests.engine.fake_runner import FakeRunner, alone


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def prompt_of(length: int, start: int = 0) -> list[int]:
    return [(7 * (start + i) + 3) % 97 for i in range(length)]


def run(engine: Engine) -> list[str]:
    """Step until no request is left, and check all tokens. Returns the ids in the order in which they ended."""
    ended = []
    while engine.has_work:
        for output in engine.step():
            ended.append(output.request_id)
            answer = output.outputs[0].token_ids
            assert answer == alone(output.prompt_token_ids, len(answer), 97)
        engine.check_integrity()
    return ended


def make_scheduler(num_blocks: int, *, rows: int = 4, budget: int = 64) -> Scheduler:
    return Scheduler(KVCacheManager(num_blocks, 4), SchedulerLimits(rows, budget, vocab_size=97))


def add(scheduler: Scheduler, arrival: int, prompt_len: int, max_total_tokens: int = 1000) -> Request:
    request = Request(
        request_id=str(arrival),
        prompt_token_ids=prompt_of(prompt_len, start=50 * arrival),
        params=SamplingParams(temperature=0),
        max_total_tokens=max_total_tokens,
        eos_token_ids=frozenset(),
        eos_token_id=None,
        metrics=RequestMetrics(arrival_time=0.0),
        arrival=arrival,
    )
    scheduler.add(request)
    return request


def test_a_preempted_request_waits_for_its_tokens_in_flight():
    """Nothing is collected here, so tokens that were sampled before the preemption never arrive."""
    scheduler = make_scheduler(8)
    old, young = add(scheduler, 0, 12), add(scheduler, 1, 7)
    while young.schedule.status is not RequestStatus.PREEMPTED:
        scheduler.schedule()
    assert young.schedule.num_in_flight > 0
    scheduler.finish(old, RequestStatus.ABORTED)
    assert scheduler.schedule() is None
    young.token_ids += [1] * young.schedule.num_in_flight
    young.schedule.num_in_flight = 0
    step = scheduler.schedule()
    assert step.requests == (young,)
    assert step.plan.num_decodes == 0
    assert step.plan.row_inits[0].rope_len == 7
    assert step.plan.num_tokens.tolist() == [len(young.token_ids) - step.plan.row_inits[0].num_computed]


def test_a_preempted_request_is_the_next_to_start():
    scheduler = make_scheduler(8, rows=2)
    old, young, waiting = add(scheduler, 0, 12), add(scheduler, 1, 4), add(scheduler, 2, 4)
    while young.schedule.status is not RequestStatus.PREEMPTED:
        scheduler.schedule()
    assert list(scheduler.waiting) == [young, waiting]
    assert old.schedule.status is RequestStatus.RUNNING


def test_a_selected_row_leaves_the_step_when_it_is_preempted():
    """A long prompt takes the blocks of a short request that arrived later, overtook it and decodes by now."""
    engine = Engine(FakeRunner(num_blocks=18, max_num_batched_tokens=4))
    engine.add_request("long", prompt_of(60), greedy(2))
    engine.step()
    engine.add_request("short", prompt_of(4, start=9), greedy(40))
    engine.step()
    assert engine.stats().num_running == 2
    assert run(engine) == ["long", "short"]
    assert engine.stats().preemptions == 1


def test_running_requests_stay_in_the_order_of_arrival_when_one_overtakes():
    engine = Engine(FakeRunner(num_blocks=200, max_num_batched_tokens=8, max_model_len=128))
    engine.add_request("long 0", prompt_of(60), greedy(2))
    engine.step()
    engine.add_request("long 1", prompt_of(60, start=1), greedy(2))
    engine.add_request("short", prompt_of(4, start=2), greedy(100))
    assert run(engine) == ["long 0", "long 1", "short"]


def test_a_request_does_not_start_if_it_would_be_preempted_at_once():
    engine = Engine(FakeRunner(num_blocks=16, max_num_batched_tokens=64))
    engine.add_request("first", prompt_of(32), greedy(20))
    engine.add_request("second", prompt_of(32, start=9), greedy(4))
    assert run(engine) == ["first", "second"]
    assert engine.stats().preemptions == 0


def test_a_request_does_not_start_on_blocks_that_a_running_prompt_needs():
    engine = Engine(FakeRunner(num_blocks=16, max_num_batched_tokens=8))
    engine.add_request("first", prompt_of(60), greedy(2))
    engine.step()
    engine.add_request("second", prompt_of(8, start=9), greedy(30))
    assert run(engine) == ["first", "second"]
    assert engine.stats().preemptions == 0


@pytest.mark.parametrize(("windows", "together"), [((8, 8, 8, None), 2), ((None,) * 4, 1)])
def test_requests_are_admitted_by_what_their_windows_need(windows, together):
    """60 tokens are 15 blocks per kv_group; with a window of 8 and chunks of 8 at most 5. The pool has 64 blocks."""
    engine = Engine(FakeRunner(num_blocks=64, windows=windows, max_num_batched_tokens=8))
    prompts = {str(i): prompt_of(54, start=30 * i) for i in range(3)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, greedy(6))
    most, ended = 0, []
    while engine.has_work:
        ended += engine.step()
        engine.check_integrity()
        most = max(most, engine.stats().num_running)
    assert most == together
    assert engine.stats().preemptions == 0
    assert [output.request_id for output in ended] == ["0", "1", "2"]
    for output in ended:
        assert output.outputs[0].token_ids == alone(prompts[output.request_id], 6, 97, windows=windows)


def test_with_all_tokens_in_flight_there_is_nothing_to_compute():
    scheduler = make_scheduler(8)
    add(scheduler, 0, 4, max_total_tokens=6)
    assert [scheduler.schedule() is None for _ in range(3)] == [False, False, True]


def test_integrity_check_sees_a_lost_row():
    scheduler = make_scheduler(8)
    add(scheduler, 0, 4)
    scheduler.schedule()
    scheduler.check_integrity()
    scheduler._rows.free_rows.append(scheduler.running[0].schedule.row)
    with pytest.raises(EngineError, match="rows"):
        scheduler.check_integrity()


def test_followers_do_not_overtake_requests_with_a_higher_priority():
    options = SchedulingOptions(scheduling_policy="priority")
    engine = Engine(FakeRunner(num_blocks=256, max_num_batched_tokens=16), options=EngineOptions(scheduling=options))
    engine.add_request("low", prompt_of(32), SamplingParams(n=8, max_tokens=20, seed=1, ignore_eos=True), priority=10)
    engine.step()
    for i in range(3):
        engine.add_request(f"urgent {i}", prompt_of(10, start=50 + i), greedy(4))
    ended = []
    while engine.has_work:
        ended += [output.request_id for output in engine.step()]
    assert ended == ["urgent 0", "urgent 1", "urgent 2", "low"]


def test_one_slow_step_does_not_limit_prompts_for_ever():
    pace = StepPace(0.020, min_tokens=16)
    pace.note(16, 0.0025)
    pace.note(0, 1.0)
    for _ in range(200):
        tokens = pace.limit(2048)
        pace.note(tokens, 0.002 + 5e-6 * tokens)
    assert tokens == 2048


def test_a_step_stays_under_its_target():
    pace = StepPace(0.010, min_tokens=16)
    assert pace.limit(2048) == 16  # before any step was timed
    for _ in range(50):
        pace.note(0, 0.004)
        tokens = pace.limit(2048)
        pace.note(tokens, 0.004 + 10e-6 * tokens)
    assert 500 <= tokens <= 600


def test_a_prefix_is_looked_up_again_with_more_free_blocks_or_after_some_steps():
    """Looking up 50,000 cached tokens takes milliseconds, so it is not done in every step that a request waits."""
    scheduler = make_scheduler(40, rows=2)
    first, waiting = add(scheduler, 0, 100, 110), add(scheduler, 1, 60)
    lookups, find = [], scheduler.manager.find_prefix

    def found(request: Request) -> Prefix:
        lookups.append(request)
        return find(request)

    scheduler.manager.find_prefix = found
    for _ in range(8):
        scheduler.schedule()
    assert (first.schedule.status, waiting.schedule.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
    assert lookups.count(waiting) == 1
    scheduler.finish(first, RequestStatus.ABORTED)
    scheduler.schedule()
    assert waiting.schedule.status is RequestStatus.RUNNING
