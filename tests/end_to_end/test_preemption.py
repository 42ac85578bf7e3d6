"""A preempted request that recomputes its KV, or fetches it from the host, gives the same answer, bit for bit."""

import jax
import numpy as np
import pytest

from jpaged import SamplingParams
from jpaged.engine.step_plan import TransferCosts
from jpaged.errors import ModelLoadError
from jpaged.runtime.step.block_moves import PINNED, host_slots
from tests.support.tiny_engine import HOST_SLOTS, SPECS, VOCAB_SIZE, alone, bits, make_engine, make_runner, run

pytestmark = pytest.mark.codegen

FETCH = TransferCosts(seconds_per_move=1e-9, seconds_per_token=1.0)
COMPUTE = TransferCosts(seconds_per_move=1.0, seconds_per_token=1e-9)
# Moving a block pays, but a batch of moves does not: blocks go to the host, and are not fetched.
KEEP = TransferCosts(seconds_per_move=1e-9, seconds_per_token=1.0, seconds_to_begin=1e9)


# layers of two kinds by default; layers of one kind, and sparse attention, in the gate
@pytest.fixture(
    scope="module", params=[*(pytest.param(name, marks=pytest.mark.slow) for name in ("full", "sparse")), "windows"]
)
def runner(request):
    runner = make_runner(SPECS[request.param])
    yield runner
    runner.close()


def requests_of(kind):
    """Eight requests that fit into the pool one by one, but not together. They share no blocks."""
    params = {
        "one answer": {},
        "samples": {"n": 3, "temperature": 0.9},
        "beams": {"use_beam_search": True, "beam_width": 3, "n": 2},
    }[kind]
    rng = np.random.default_rng(5)
    return [
        (
            rng.integers(0, VOCAB_SIZE, length).tolist(),
            SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2, **{"temperature": 0, "seed": length, **params}),
        )
        for length in (7, 8, 9, 15, 17, 24, 33, 40)
    ]


KINDS = ("one answer", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("samples", "beams")))


@pytest.fixture(scope="module", params=KINDS)
def work(request, runner):
    """Requests, the answer of each alone, and blocks for little more than the largest one."""
    requests = requests_of(request.param)
    blocks = {"one answer": 18, "samples": 26, "beams": 26}[request.param]
    if len(runner.windows) > 1:
        blocks = {18: 28, 26: 60}[blocks]
    return requests, alone(make_engine(runner), requests), blocks


def test_recomputed_kv_gives_the_same_answers(runner, work):
    requests, wanted, blocks = work
    for costs, slots, caching in ((None, 0, False), (COMPUTE, HOST_SLOTS, True)):
        engine = make_engine(runner, num_blocks=blocks, host_slots=slots, costs=costs, caching=caching)
        done = run(engine, requests)
        assert [bits(done[str(i)]) for i in range(len(requests))] == wanted
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.recomputed_tokens > 0
        assert stats.blocks_to_host == stats.blocks_to_device == 0  # moving does not pay


def test_fetched_kv_gives_the_same_answers(runner, work):
    requests, wanted, blocks = work
    memory_kinds = set()

    def look(engine):
        held = jax.tree.leaves(list(runner._last.mover._host.values()))
        memory_kinds.update(array.sharding.memory_kind for array in held)

    lost = {}
    for costs in (FETCH, KEEP):
        engine = make_engine(runner, num_blocks=blocks, host_slots=HOST_SLOTS, costs=costs)
        done = run(engine, requests, after_step=look)
        assert [bits(done[str(i)]) for i in range(len(requests))] == wanted
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.blocks_to_host > 0
        assert (stats.blocks_to_device > 0) == (costs is FETCH)
        assert stats.used_host_slots <= HOST_SLOTS
        lost[costs] = stats.recomputed_tokens
    if not any(params.num_sequences > 1 for _, params in requests):  # forks share blocks with running requests
        assert lost[FETCH] < lost[KEEP]
    (device,) = runner.state.table.devices()
    assert any(memory.kind == PINNED for memory in device.addressable_memories())
    assert memory_kinds == {PINNED}


def test_metrics_count_preemptions(runner):
    blocks = 18 if len(runner.windows) == 1 else 28
    engine = make_engine(runner, num_blocks=blocks)
    done = run(engine, requests_of("one answer"))
    assert sum(output.metrics.preemptions for output in done.values()) == engine.stats().preemptions > 0
    assert done["0"].metrics.preemptions == 0  # the oldest


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["priority", "shortest_first"])
def test_preemption_by_any_policy_changes_no_answer(runner, policy):
    requests = requests_of("samples")
    wanted = alone(make_engine(runner), requests)
    engine = make_engine(
        runner, num_blocks=26 if len(runner.windows) == 1 else 60, host_slots=HOST_SLOTS, scheduling_policy=policy
    )
    for number, (prompt, params) in enumerate(requests):
        priority = -number if policy == "priority" else 0
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params, priority=priority)
        for _ in range(3):
            engine.step()
    done = run(engine, [])
    assert [bits(done[str(i)]) for i in range(len(requests))] == wanted
    assert engine.stats().preemptions > 0


def test_a_host_tier_has_measured_costs(runner):
    assert runner.host_slots == HOST_SLOTS
    assert runner.transfer_costs.seconds_per_move > 0
    assert runner.transfer_costs.seconds_per_token > 0


def test_more_swap_space_than_memory_is_refused_with_the_figure():
    with pytest.raises(ModelLoadError, match=r"swap_space=1000000.0: this machine has [\d.]+ GiB of memory in all"):
        make_runner(SPECS["full"], swap_space=1e6)
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ModelLoadError, match="must be GiB of host memory"):
            host_slots(wrong, 4096)
    assert host_slots(1.0, 2**20) == 1024
