"""What scheduler and KV manager promise, over whole loads: at three times what the pool holds, of waste, of memory."""

import dataclasses
import pathlib
import sys

import pytest

from jpaged.simulator.cost import CostModel
from jpaged.simulator.load import ArrivalTimes, GeneratedLoad, LengthDistribution
from jpaged.simulator.simulation import SimulationOptions, simulate
from jpaged.simulator.step_load import EngineShape

COST = CostModel(fixed=5e-3, per_token=2e-5, per_kv_token=1e-7)
BLOCK, ROWS, MOST = 16, 48, 1024


def load(num_requests, prompt, output, *, max_model_len=MOST, rate=float("inf"), **fields) -> GeneratedLoad:
    return GeneratedLoad(
        num_requests=num_requests,
        times=ArrivalTimes("poisson", rate),
        prompt_tokens=LengthDistribution("prompt_tokens", prompt),
        output_tokens=LengthDistribution("output_tokens", output),
        max_model_len=max_model_len,
        **fields,
    )


def shape(num_blocks, rows=ROWS, budget=512, max_model_len=MOST) -> EngineShape:
    return EngineShape(num_blocks, BLOCK, rows, budget, max_model_len)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("prefixes", [{}, {"prefixes": 8, "prefix_tokens": 64}])
def test_three_times_oversubscribed(seed, prefixes):
    """As many requests as rows, which want three times the blocks there are. First come, first served: none starts
    later than when all that came before it have ended, and all end; computing again what preemptions lost is at most a
    fifth of the useful work."""
    arrivals = list(load(400, "lognormal:256:0.6", "lognormal:128:0.6", seed=seed, **prefixes))
    wanted = sum(-(-(a.prompt_tokens + a.output_tokens) // BLOCK) for a in arrivals) / len(arrivals) * ROWS
    started, ended = {}, {}

    def watch(event, request, time):
        (started if event == "start" else ended)[request.arrival] = time

    small = shape(round(wanted / 3))
    result = simulate(arrivals, SimulationOptions(shape=small, cost=COST, concurrency=2 * ROWS), watch=watch)
    assert result.finished_requests == 400
    assert result.kv_peak > 0.95
    assert result.recomputed_share <= 0.2, result.table()
    latest, step = 0.0, 0.03  # a step of 512 tokens and some
    for number in range(400):
        assert started[number] <= max(latest, started[number - 1] if number else 0.0) + 3 * step, number
        latest = max(latest, ended[number])


def test_waste_of_mixed_lengths_is_under_four_percent():
    arrivals = load(250, "uniform:256:700", "uniform:16:250")
    result = simulate(arrivals, SimulationOptions(shape=shape(4000), cost=COST))
    assert 0 < result.kv_waste < 0.04


def test_memory_does_not_grow_with_the_run():
    """Pieces of memory that Python holds after 4,000 requests and after 20,000."""
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
