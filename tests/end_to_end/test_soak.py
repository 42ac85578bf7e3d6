"""Random load on a full pool for minutes: every request gets one correct answer, and at the end all blocks are free.

The load has samples, beams, salts, priorities, aborts, weight changes, and too small a host tier. The model is tiny.
"""

import collections
import os
import random
import time

import numpy as np
import pytest

from jpaged import SamplingParams
from tests.support.tiny_engine import HOST_SLOTS, SPECS, VOCAB_SIZE, alone, bits, make_engine, make_runner, poison

SECONDS = 600  # of the soak
SHORT = 20     # of the short soak in the gate
BLOCKS = {"full": 24, "windows": 40}  # little more than the largest request needs
WIDTH = {"full": 3, "windows": 2}     # most answers per request
LIVE = 16      # requests at a time, on 8 rows


def kinds(width):
    """Parameters of the kinds of requests."""
    samples = {"n": width, "temperature": 0.9}
    best = {"n": width - 1, "best_of": width, "temperature": 0.9}
    return [{}, {}, {}, samples, best, {"use_beam_search": True, "beam_width": width, "n": width - 1}]


def catalogue(rng, width):
    """Requests to draw from. Half of them share a prefix."""
    stem = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    requests = []
    for number in range(48):
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 24))]
        params = {"temperature": 0, "seed": number, "max_tokens": rng.randint(1, 40), **rng.choice(kinds(width))}
        prompt = stem[: rng.choice([0, 0, 15, 16, 17, 40])] + own
        requests.append((prompt, SamplingParams(ignore_eos=True, logprobs=2, **params)))
    return requests


def resident_bytes():
    """Resident memory of this process. Linux only."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(spec, seconds, seed=0):
    """Run the load for `seconds`, then until every request is answered. Returns the resident memory at each quarter."""
    rng = random.Random(seed)
    runner = make_runner(SPECS[spec])
    requests = catalogue(rng, WIDTH[spec])
    wanted = alone(make_engine(runner, caching=False), requests)
    engine = make_engine(runner, num_blocks=BLOCKS[spec], host_slots=HOST_SLOTS // 2, scheduling_policy="priority")
    pool = engine.scheduler.manager.pool
    live: dict[str, int] = {}
    seen: collections.Counter[str] = collections.Counter()
    used, memory, loaded = [], [], 0
    began = time.monotonic()
    while live or (now := time.monotonic() - began) < seconds:
        now = time.monotonic() - began
        while len(live) < LIVE and now < seconds:
            number = rng.randrange(len(requests))
            request_id, (prompt, params) = str(seen["asked"]), requests[number]
            prompt = {"prompt_token_ids": prompt, "cache_salt": rng.choice(["", "", "", "x"])}
            engine.add_request(request_id, prompt, params, priority=rng.randint(-1, 1))
            live[request_id] = number
            seen["asked"] += 1
        for output in engine.step():
            number = live.pop(output.request_id)  # KeyError if it was answered before
            assert output.finished
            assert bits(output) == wanted[number]
            seen["answered"] += 1
        if live and rng.random() < 0.02:
            victim = rng.choice(sorted(live))
            (output,) = engine.abort([victim])
            del live[victim]
            assert output.finished
            seen["aborted"] += 1
        if rng.random() < 0.002:
            engine.note_new_weights()  # the same weights: the answers do not change
            seen["weight changes"] += 1
        if rng.random() < 0.05:
            engine.check_integrity()
            poison(engine)
        seen["steps"] += 1
        if now < seconds:
            used.append(pool.num_used / pool.num_blocks)
            seen["steps in which requests wait"] += bool(engine.scheduler.waiting)
            loaded += 1
        if len(memory) < 4 * now / seconds:
            memory.append(resident_bytes())
    memory.append(resident_bytes())
    stats = engine.stats()
    print(
        f"{spec}, {seconds} s: {dict(seen)}\n{stats}\n"
        f"pool in use: median {np.median(used):.0%}, a tenth of the steps below {np.quantile(used, 0.1):.0%}\n"
        f"resident MiB at each quarter: {[size >> 20 for size in memory]}"
    )
    assert seen["answered"] + seen["aborted"] == seen["asked"] == stats.finished_requests
    assert pool.num_used == stats.num_waiting == stats.num_running == 0
    engine.check_integrity()
    assert engine.reset_prefix_cache()
    assert engine.stats().used_host_slots == 0
    assert stats.compiles_after_ready == 0
    assert stats.peak_used_blocks == pool.num_blocks
    # free blocks are reserved for running requests, and are too few for the next waiting request
    assert seen["steps in which requests wait"] > 0.95 * loaded
    assert np.median(used) > 0.6
    assert min(stats.preemptions, stats.blocks_to_host, stats.blocks_to_device, stats.copied_blocks) > 0
    assert stats.prefix_hit_tokens > 0
    runner.close()
    return memory


@pytest.mark.slow
def test_a_short_soak():
    soak("full", SHORT)


@pytest.mark.soak
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("spec", ["windows", "full"])
def test_soak(spec):
    memory = soak(spec, SECONDS / 2)
    assert memory[-1] < 1.1 * memory[1], "memory grows"
