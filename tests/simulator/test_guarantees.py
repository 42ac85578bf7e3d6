"""Guarantees of scheduler and KV manager over whole loads: oversubscribed pools, fairness, KV waste, memory."""

import dataclasses
import pathlib
import sys
from collections.abc import Callable

import numpy as np
import pytest

from jpaged.engine.engine import SchedulingOptions
from jpaged.engine.scheduling.waiting_queue import POLICIES, PRIORITY_SECONDS, TOKEN_SECONDS
from jpaged.simulator.cost import CostModel
from jpaged.simulator.load import Arrival, ArrivalTimes, GeneratedLoad, LengthDistribution
from jpaged.simulator.results import SimulationResult
from jpaged.simulator.simulation import SimulationOptions, simulate
from jpaged.simulator.step_load import EngineShape

pytestmark = pytest.mark.slow  # whole loads, in seconds each; tests/engine has the mechanisms

COST = CostModel(fixed=5e-3, per_token=2e-5, per_kv_token=1e-7)
BLOCK, ROWS, MOST = 16, 48, 1024
PRIORITIES = ((0, 2.0), (1, 1.0), (3, 1.0))


def load(
    num_requests, prompt, output, *, max_model_len=MOST, rate=float("inf"), times="poisson", **fields
) -> GeneratedLoad:
    return GeneratedLoad(
        num_requests=num_requests,
        times=ArrivalTimes(times, rate),
        prompt_tokens=LengthDistribution("prompt_tokens", prompt),
        output_tokens=LengthDistribution("output_tokens", output),
        max_model_len=max_model_len,
        **fields,
    )


def shape(num_blocks, rows=ROWS, budget=512, max_model_len=MOST) -> EngineShape:
    return EngineShape(num_blocks, BLOCK, rows, budget, max_model_len)


def blocks_wanted(arrivals: list[Arrival], rows: int = ROWS) -> float:
    """Return the blocks that `rows` average requests need at the end of their answers."""
    return sum(-(-(a.prompt_tokens + a.output_tokens) // BLOCK) for a in arrivals) / len(arrivals) * rows


@pytest.mark.parametrize(
    ("policy", "seed", "more"),
    [
        ("fcfs", 0, {}),
        ("fcfs", 1, {"prefixes": 8, "prefix_tokens": 64}),
        ("priority", 2, {"priorities": PRIORITIES}),
        ("priority", 3, {"priorities": PRIORITIES, "prefixes": 8, "prefix_tokens": 64}),
        ("shortest_first", 4, {}),
        ("shortest_first", 5, {"prefixes": 8, "prefix_tokens": 64}),
    ],
)
def test_three_times_oversubscribed(policy, seed, more):
    """All rows are in use, and their requests need three times the blocks of the pool.

    All requests end, and preemptions recompute at most 20% of the useful tokens. With fcfs, a request starts at the
    latest when all requests before it have ended.
    """
    arrivals = list(load(400, "lognormal:256:0.6", "lognormal:128:0.6", seed=seed, **more))
    started, ended = {}, {}

    def watch(event, request, time):
        (started if event == "start" else ended)[request.arrival] = time

    options = SimulationOptions(
        shape=shape(round(blocks_wanted(arrivals) / 3)), cost=COST, concurrency=2 * ROWS,
        scheduling=SchedulingOptions(policy),
    )  # fmt: skip
    result = simulate(arrivals, options, watch=watch)
    assert result.finished_requests == 400
    assert result.kv_peak > 0.95
    assert result.recomputed_share <= 0.2, result.table()
    if policy == "fcfs":
        latest, step = 0.0, 0.03  # seconds of a step of 512 tokens, rounded up
        for number in range(400):
            assert started[number] <= max(latest, started[number - 1] if number else 0.0) + 3 * step, number
            latest = max(latest, ended[number])


SLOW = CostModel(fixed=0.1, per_token=1e-4)  # a few thousand steps give hours of queueing
BUDGET = 256


@dataclasses.dataclass(frozen=True)
class Overtakings:
    """Pairs of requests that started in another order than they arrived."""

    passed: np.ndarray      # bool[N, N]     [a, b]: b arrived after a, and started before it
    later: np.ndarray       # float64[N, N]  [a, b]: seconds from the arrival of a to that of b
    arrivals: list[Arrival]

    def beyond(self, bound: np.ndarray) -> int:
        """Count pairs in which b overtook a, although b arrived more than bound[a, b] seconds later."""
        return int((self.passed & (self.later > bound + 1e-9)).sum())

    def difference(self, of: Callable[[Arrival], float]) -> np.ndarray:
        """Return the value of a minus the value of b, for all pairs: float64[N, N]."""
        values = np.array([of(arrival) for arrival in self.arrivals])
        return values[:, None] - values[None, :]


def overtakings(policy: str) -> Overtakings:
    """Run a load whose queue grows to some minutes, in a pool with a third of the blocks that the rows need."""
    arrivals = list(
        load(2500, "uniform:8:200", "lognormal:40:1", rate=3.4, priorities=PRIORITIES, max_model_len=512, seed=9)
    )
    small = EngineShape(round(blocks_wanted(arrivals, 32) / 3), BLOCK, 32, BUDGET, 512)
    options = SimulationOptions(shape=small, cost=SLOW, scheduling=SchedulingOptions(policy))
    result, found = starts(arrivals, options)
    assert result.recomputed_share <= 0.2, result.table()
    assert result.queued.max > 2 * PRIORITY_SECONDS  # the queue is long enough for aging to matter
    return found


def starts(arrivals: list[Arrival], options: SimulationOptions) -> tuple[SimulationResult, Overtakings]:
    """Run a load, and compare the order of starts with the order of arrivals."""
    started = np.zeros(len(arrivals))

    def watch(event, request, time):
        if event == "start":
            started[request.arrival] = time

    result = simulate(arrivals, options, watch=watch)
    assert result.finished_requests == len(arrivals)
    order = np.arange(len(arrivals))
    times = np.array([arrival.time for arrival in arrivals])
    passed = (order[None, :] > order[:, None]) & (started[None, :] < started[:, None])
    return result, Overtakings(passed, times[None, :] - times[:, None], arrivals)


def test_no_request_is_overtaken_under_fcfs():
    assert not overtakings("fcfs").passed.any()


def test_under_fcfs_only_short_prompts_overtake_and_only_long_ones():
    """A prompt is long if it does not fit into one step."""
    arrivals = list(load(1500, "lognormal:300:1", "8", rate=3, times="gamma:6", seed=8))
    options = SimulationOptions(shape=shape(4000, rows=64, budget=BUDGET), cost=SLOW)
    _, found = starts(arrivals, options)
    assert found.passed.any()
    passed, passing = np.nonzero(found.passed)
    assert min(found.arrivals[a].prompt_tokens for a in passed) > BUDGET
    assert max(found.arrivals[b].prompt_tokens for b in passing) <= BUDGET


def test_a_priority_is_worth_a_minute():
    """No request overtakes one that arrived more than PRIORITY_SECONDS times their difference in priority earlier."""
    found = overtakings("priority")
    bound = PRIORITY_SECONDS * found.difference(lambda arrival: arrival.priority)
    assert found.beyond(bound) == 0
    assert found.beyond(0.9 * bound) > 0  # the bound is tight
    assert found.beyond(PRIORITY_SECONDS * found.difference(lambda arrival: 0)) > 0


def test_a_token_is_worth_its_seconds():
    """No request overtakes one that arrived more than TOKEN_SECONDS times their difference in length earlier."""
    found = overtakings("shortest_first")
    bound = TOKEN_SECONDS * found.difference(lambda arrival: arrival.output_tokens)
    assert found.beyond(bound) == 0
    assert found.beyond(0.9 * bound) > 0


def test_without_aging_the_bound_is_broken(monkeypatch):
    """The test of priorities can fail: a policy without aging breaks its bound for many pairs."""
    monkeypatch.setitem(POLICIES, "priority", lambda request: 1e6 * request.priority)
    found = overtakings("priority")
    assert found.beyond(PRIORITY_SECONDS * found.difference(lambda arrival: arrival.priority)) > 1000


def test_a_host_tier_saves_computing_again():
    arrivals = list(load(400, "lognormal:256:0.6", "lognormal:128:0.6", seed=6))
    small, moving = shape(round(blocks_wanted(arrivals) / 3)), dataclasses.replace(COST, per_moved_block=2e-5)
    results = [
        simulate(arrivals, SimulationOptions(shape=small, cost=moving, concurrency=2 * ROWS, host_blocks=blocks))
        for blocks in (0, 2000)
    ]
    without, tiered = results
    assert without.preemptions > 10
    assert without.recomputed_tokens > 500
    assert tiered.recomputed_tokens < 0.5 * without.recomputed_tokens
    assert tiered.blocks_to_device > 0
    assert tiered.finished_requests == without.finished_requests == 400


def test_a_target_bounds_the_time_between_tokens():
    """Requests decode while long prompts arrive. Each prompt takes many steps."""
    decodes = [Arrival(0.0, 16, 600) for _ in range(16)]
    prompts = [Arrival(0.3 + 0.25 * number, 3000, 1) for number in range(40)]
    large = shape(4000, rows=32, budget=2048, max_model_len=4096)
    target = 0.02
    paced, unpaced = (
        simulate(
            [*decodes, *prompts],
            SimulationOptions(shape=large, cost=COST, scheduling=SchedulingOptions(target_step_ms=target_ms)),
        )
        for target_ms in (1000 * target, None)
    )
    assert paced.finished_requests == unpaced.finished_requests == 56
    assert unpaced.inter_token.p99 > 2 * target
    assert paced.inter_token.p99 <= target, paced.table()


def test_waste_of_mixed_lengths_is_under_four_percent():
    arrivals = load(250, "uniform:256:700", "uniform:16:250")
    result = simulate(arrivals, SimulationOptions(shape=shape(4000), cost=COST))
    assert 0 < result.kv_waste < 0.04


def test_memory_does_not_grow_with_the_run():
    """Compare Python's allocated memory blocks after 4,000 and after 20,000 requests."""
    held = []
    count, base = 0, sys.getallocatedblocks()

    def watch(event, request, time):
        nonlocal count
        count += event == "finish"
        if event == "finish" and count in (4_000, 20_000):
            held.append(sys.getallocatedblocks())

    arrivals = load(20_000, "uniform:1:12", "uniform:1:4", prefixes=50, prefix_tokens=4, max_model_len=64)
    small = shape(200, rows=16, budget=128, max_model_len=64)
    result = simulate(arrivals, SimulationOptions(shape=small, cost=COST, concurrency=32), watch=watch)
    assert result.finished_requests == 20_000
    assert held[1] - base <= 1.2 * (held[0] - base), held


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_million_requests_in_bounded_memory():
    """256 prompt and 128 output tokens on average, 256 rows, prefix cache on."""
    resident = {}
    count = 0

    def watch(event, request, time):
        nonlocal count
        count += event == "finish"
        if event == "finish" and count in (100_000, 1_000_000):
            pages = int(pathlib.Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
            resident[count] = pages

    arrivals = load(1_000_000, "lognormal:192:0.5", "lognormal:128:0.5", prefixes=100, prefix_tokens=64)
    large = dataclasses.replace(shape(8192, rows=256, budget=2048))
    result = simulate(arrivals, SimulationOptions(shape=large, cost=COST, concurrency=320), watch=watch)
    assert result.finished_requests == 1_000_000
    assert result.prompt_tokens == pytest.approx(256e6, rel=0.01)
    assert result.output_tokens == pytest.approx(128e6, rel=0.01)
    assert resident[1_000_000] <= 1.2 * resident[100_000]
