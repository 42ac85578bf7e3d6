"""Prefix cache on, off, and each request alone: the same tokens and log-probabilities, bit for bit.

In float32 on CPU. All free blocks, and all slots that were never written, contain NaN.
"""

import random

import pytest

from jpaged import SamplingParams
from jpaged.errors import RequestError
from tests.support.tiny_engine import (
    BLOCK_SIZE,
    HOST_SLOTS,
    SPECS,
    VOCAB_SIZE,
    alone,
    bits,
    drain,
    make_engine,
    make_runner,
    poison,
    run,
)

pytestmark = pytest.mark.codegen

STEM = 72  # tokens; longer than a step's budget, so that stems are computed in chunks
SPLITS = sorted({edge + off for edge in range(BLOCK_SIZE, STEM + 1, BLOCK_SIZE) for off in (-1, 0, 1)} | {1, STEM})


# layers of one kind by default, all kinds of models in .ci/run
@pytest.fixture(
    scope="module",
    params=["full", *(pytest.param(name, marks=pytest.mark.slow) for name in ("windows", "unlike", "sparse"))],
)
def runner(request):
    runner = make_runner(SPECS[request.param])
    yield runner
    runner.close()


def tree_of_prompts(seed, most_answers):
    """Prompts that branch off a stem, or off each other, at all points around a block's edge. Some are parts of it."""
    rng = random.Random(seed)
    stem = [rng.randrange(VOCAB_SIZE) for _ in range(STEM)]
    prompts = []
    for split in SPLITS:
        tail = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 1, 7, 8, 9, 20]))]
        prompts.append(stem[:split] + tail)
    for parent in rng.sample(prompts, 10):  # branches of branches, and equal prompts
        cut = rng.choice([len(parent), len(parent) // BLOCK_SIZE * BLOCK_SIZE or 1])
        prompts.append(parent[:cut] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 0, 3]))])
    rng.shuffle(prompts)
    return [(prompt, sampling(rng, most_answers)) for prompt in prompts]


def sampling(rng, most_answers):
    """Greedy or seeded; with log-probabilities; sometimes several answers."""
    drawn = {"temperature": 0} if rng.random() < 0.5 else {"temperature": 0.9, "top_p": 0.95, "seed": rng.randrange(99)}
    drawn |= rng.choice([{}, {}, {"n": most_answers}])
    return SamplingParams(max_tokens=rng.choice([1, 3, 10, 20]), ignore_eos=True, logprobs=2, **drawn)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def tree(request, runner):
    """Requests, and the answer of each alone without a cache."""
    # with windows, a pool for two answers at a time would fit all other requests too
    requests = tree_of_prompts(request.param, most_answers=2 if len(runner.windows) == 1 else 1)
    return requests, alone(make_engine(runner, caching=False), requests)


# blocks for little more than one request, by the number of KV groups: cached blocks are evicted soon
STORM = {1: 18, 2: 28, 3: 42}


def storm_blocks(runner):
    return STORM[len(runner.windows)]


@pytest.mark.parametrize(
    ("caching", "room", "host"),
    [
        (True, "roomy", 0), (True, "storm", HOST_SLOTS), (False, "storm", 0), (True, "storm", 0), (False, "roomy", 0),
    ],
)
@pytest.mark.slow
def test_a_tree_of_prompts(runner, tree, caching, room, host):
    requests, wanted = tree
    blocks = storm_blocks(runner) if room == "storm" else None
    engine = make_engine(runner, caching=caching, num_blocks=blocks, host_slots=host)
    for _ in range(2):  # the second time most KV is cached
        done = run(engine, requests)
        assert [bits(done[str(i)]) for i in range(len(requests))] == wanted
    stats = engine.stats()
    # without a cache only a second answer to a prompt can find KV, if it had to wait
    assert (stats.prefix_hit_tokens > 1500) == caching
    if room == "roomy" or len(runner.windows) == 1:  # with windows, a request frees more blocks than it allocates
        assert (stats.preemptions > 0) == (room == "storm")
    if host:
        assert stats.blocks_to_device > 0


@pytest.mark.parametrize("host", [pytest.param(0, marks=pytest.mark.slow), HOST_SLOTS])
def test_aborts_at_any_time_leave_a_consistent_cache(runner, tree, host):
    """Most of all within a prompt: other requests find the KV that was computed before the abort."""
    requests, wanted = tree
    rng = random.Random(7)
    engine = make_engine(runner, num_blocks=storm_blocks(runner) + 8, host_slots=host, budget=12)
    todo = [number for number in range(len(requests)) for _ in range(3)]
    rng.shuffle(todo)
    ids, aborted, answered = {}, 0, 0
    in_mid_prompt = 0
    while todo or engine.has_work:
        while todo and len(ids) < 6:
            number = todo.pop()
            ids[str(len(todo))] = number
            engine.add_request(str(len(todo)), {"prompt_token_ids": requests[number][0]}, requests[number][1])
        for output in engine.step():
            assert bits(output) == wanted[ids.pop(output.request_id)]
            answered += 1
        if ids and rng.random() < 0.25:
            prefills = [r.request_id for r in engine.scheduler.running if 0 < r.schedule.num_computed < r.prompt_len]
            victim = rng.choice(prefills or sorted(ids))
            in_mid_prompt += victim in prefills
            del ids[victim]
            assert engine.abort([victim])[0].finished
            aborted += 1
        engine.check_integrity()
        poison(engine)
    assert in_mid_prompt > 0
    assert aborted > 20
    assert answered > 50
    assert aborted + answered == 3 * len(requests)
    assert engine.stats().used_blocks == engine.stats().compiles_after_ready == 0


@pytest.mark.parametrize("length", [BLOCK_SIZE, BLOCK_SIZE + 1, 4 * BLOCK_SIZE])
def test_a_fully_cached_prompt_still_computes_its_last_token(runner, length):
    prompt = list(range(length))
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=2)
    (wanted,) = alone(make_engine(runner, caching=False), [(prompt, params)])
    engine = make_engine(runner)
    for cached in (0, (length - 1) // BLOCK_SIZE * BLOCK_SIZE):
        output = run(engine, [(prompt, params)])["0"]
        assert output.num_cached_tokens == cached
        assert bits(output) == wanted


def same_step(runner):
    """Two equal prompts that start in one step: the second shares blocks that this very step computes."""
    prompt = [(11 * i + 5) % VOCAB_SIZE for i in range(4 * BLOCK_SIZE + 3)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    (wanted,) = alone(make_engine(runner, caching=False), [(prompt, params)])
    engine = make_engine(runner)
    engine.add_request("0", {"prompt_token_ids": prompt}, params)
    engine.add_request("1", {"prompt_token_ids": prompt}, params)
    engine.step()
    first, second = engine.scheduler.running
    assert first.schedule.num_computed == second.schedule.num_computed == len(prompt)
    for one, other in zip(first.kv.block_tables, second.kv.block_tables, strict=True):
        shared = [block for block in one.held if block in other.held]
        assert len(shared) == len(one.held) - 1
    poison(engine)
    done = drain(engine)
    assert done["1"].num_cached_tokens == 4 * BLOCK_SIZE
    assert bits(done["0"]) == bits(done["1"])
    assert bits(done["0"]) == wanted


def test_blocks_are_shared_in_the_step_that_computes_them(runner):
    same_step(runner)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) for name in ("triton", "xla", "mosaic_tpu")],
)
def test_blocks_are_shared_in_the_step_that_computes_them_with_every_implementation(name):
    runner = make_runner(SPECS["full"], attention_implementation=name, swap_space=0.0)
    same_step(runner)
    runner.close()


def test_poison_shows(runner):
    """The tests above can fail: a request that reads a slot that was never written ends, because its logits are NaN."""
    engine = make_engine(runner)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    engine.add_request("0", {"prompt_token_ids": list(range(20))}, params)
    engine.step()
    (request,) = engine.scheduler.running
    request.schedule.num_computed -= 12  # a written block counts as unwritten
    poison(engine)
    request.schedule.num_computed += 12
    (output,) = drain(engine).values()
    assert output.outputs[0].finish_reason == "error"
    assert "not finite" in output.outputs[0].stop_reason


def test_a_salt_hides_cached_kv(runner):
    engine = make_engine(runner)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    given = []
    for salt in ("", "a", "b", "a", ""):
        engine.add_request("0", {"prompt_token_ids": list(range(40)), "cache_salt": salt}, params)
        given.append(drain(engine)["0"].num_cached_tokens)
    assert given == [0, 0, 0, 32, 32]
    with pytest.raises(RequestError, match="cache_salt"):
        engine.add_request("0", {"prompt_token_ids": [1], "cache_salt": 5}, params)
