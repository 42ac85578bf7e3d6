"""Engines whose steps call native CPU kernels: two of them in threads of one process, and memory over 1,000 steps."""

import itertools
import os
import pathlib
import random
import sys
import threading

import pytest

from jpaged import SamplingParams
from pallas_kernels.native import library
from pallas_kernels.paged_attention import cpu
from tests.support.tiny_engine import SPECS, VOCAB_SIZE, alone, bits, make_engine, make_runner, run

pytestmark = pytest.mark.skipif(library.native(cpu.KERNEL).name is None, reason="native kernels cannot run here")

STEPS = 1000


@pytest.fixture(scope="module")
def runners():
    """Two runners, each with its own state."""
    runners = [make_runner(SPECS["full"], attention_implementation="cpu", swap_space=0.0) for _ in range(2)]
    yield runners
    for runner in runners:
        runner.close()


def requests(seed, count):
    """Greedy requests with answers of 20 tokens."""
    rng, params = random.Random(seed), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
    return [([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 90))], params) for _ in range(count)]


@pytest.mark.codegen
def test_two_engines_in_threads_of_one_process_give_the_answers_of_each_alone(runners):
    lists = [requests(seed, 16) for seed in (1, 2)]
    expected = [alone(make_engine(runner), given) for runner, given in zip(runners, lists, strict=True)]
    answers: dict[int, list] = {}
    start = threading.Barrier(2)

    def serve(number: int) -> None:
        start.wait()
        done = run(make_engine(runners[number]), lists[number], check=False)
        answers[number] = [bits(done[str(i)]) for i in range(16)]

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert answers == dict(enumerate(expected))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_steps_leave_no_memory(runners):
    """A leak of 1 KB a step would show. `tests/kernels/test_native_faults.py` counts single allocations."""

    def resident() -> int:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    engine, given, sizes, steps = make_engine(runners[0]), requests(3, 16), [], 0

    def count(engine) -> None:
        nonlocal steps
        steps += 1
        if steps % STEPS == 0:
            sizes.append(resident())

    while len(sizes) < 5:
        run(engine, given, check=False, after_step=count)
    # Caches and the allocator's pools grow at times. A leak grows in each 1,000 steps.
    growth = [after - before for before, after in itertools.pairwise(sizes)]
    assert min(growth) < 2**20, growth
