"""Measures scheduler and KV cache manager: a step by number of running requests, a block by size of the pool.

    python benchmarks/scheduler.py

Needs no model and no device. Prompts have 256 tokens and answers 128 tokens on average. Every request that ends is
replaced by a new one, so that some steps start a request and allocate blocks. Timed are `Scheduler.schedule` with all
that it calls, and `finish`; not the work of an engine on the tokens. Prints tables and the machine.
"""

import dataclasses
import os
import platform
import random
import statistics
import time
from collections.abc import Callable

from jpaged.engine.kv_cache.block_pool import BlockName, BlockPool, block_digest, prefix_root, token_bytes
from jpaged.engine.kv_cache.block_table import KVState
from jpaged.engine.kv_cache.kv_cache_manager import KVCacheManager
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.scheduling.scheduler_state import SchedulerLimits
from jpaged.outputs import RequestMetrics
from jpaged.params.sampling import SamplingParams

ROWS = (8, 32, 64, 128, 256, 512)
STEPS = 600
BOUND_FIXED, BOUND_EACH = 40.0, 1.0  # µs per step, and per running request


class Load:
    """An endless load of requests on a scheduler."""

    def __init__(self, rows: int, windows: tuple[int | None, ...] = (None,)):
        self._rng = random.Random(rows)
        manager = KVCacheManager(rows * 64 * len(windows), 16, windows, max_chunk=2048)
        self.scheduler = Scheduler(manager, SchedulerLimits(rows, 2048, vocab_size=50_000))
        self._params = SamplingParams(temperature=0)
        self._arrived = 0
        for _ in range(rows):
            self.add()

    def add(self) -> None:
        """One more request."""
        rng, number = self._rng, self._arrived
        prompt = [rng.randrange(50_000) for _ in range(rng.randint(1, 511))]
        total = len(prompt) + rng.randint(1, 255)
        self.scheduler.add(
            Request(
                str(number), prompt, self._params, total, frozenset(), None, RequestMetrics(0.0),
                kv=KVState(prefix_root()), arrival=number,
            )
        )  # fmt: skip
        self._arrived += 1

    def step(self) -> tuple[float, float, bool]:
        """µs of `schedule`, µs of ending requests, and whether requests started."""
        began = time.perf_counter()
        step = self.scheduler.schedule()
        planned = time.perf_counter() - began
        ended = []
        if step is not None:
            for _, request in self.scheduler.results(step):
                request.token_ids.append(7)
                if len(request.token_ids) >= request.max_total_tokens:
                    ended.append(request)
        began = time.perf_counter()
        for request in ended:
            self.scheduler.finish(request, RequestStatus.LENGTH)
        ending = time.perf_counter() - began
        for _ in ended:
            self.add()
        return planned * 1e6, ending * 1e6, step is not None and bool(step.plan.row_inits)


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """µs per step."""

    decoding: float  # median of steps that only decode
    median: float    # of all steps
    mean: float      # of all steps, ending requests included

    def __str__(self) -> str:
        return f"{self.decoding:10.1f} {self.median:10.1f} {self.mean:10.1f}"


def steps(rows: int, windows: tuple[int | None, ...] = (None,)) -> StepCosts:
    """Cost of a step while `rows` requests run."""
    load = Load(rows, windows)
    for _ in range(300):  # warm up: requests of all ages run
        load.step()
    planned, ending, starts = zip(*(load.step() for _ in range(STEPS)), strict=True)
    decoding = [time for time, starting in zip(planned, starts, strict=True) if not starting]
    mean = statistics.mean(planned) + statistics.mean(ending)
    return StepCosts(statistics.median(decoding), statistics.median(planned), mean)


def microseconds(work: Callable[[], int], rounds: int = 5) -> float:
    """Median time of one unit of work. `work` returns the number of units that it did."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        count = work()
        times.append((time.perf_counter() - began) / count * 1e6)
    return statistics.median(times)


def pool_costs(num_blocks: int) -> tuple[float, float, float, float]:
    """µs per block to allocate, name, find and free, in a pool that is otherwise full of named blocks."""
    pool, root, count = BlockPool(num_blocks), prefix_root(), 1000

    def names(first: int) -> list[BlockName]:
        tokens = [token_bytes((i,) * 16) for i in range(first, first + count)]
        return [BlockName(block_digest(root, own), root, own) for own in tokens]

    blocks = pool.allocate(num_blocks)
    for start in range(0, num_blocks, count):
        for block, name in zip(blocks[start : start + count], names(start), strict=False):
            pool.put_name(block, name)
    pool.free(blocks)
    fresh, taken = names(num_blocks), []

    def allocate() -> int:
        taken[:] = pool.allocate(count)
        return count

    def put() -> int:
        pool.put_names(taken, fresh, 0)
        return count

    def find() -> int:
        for name in fresh:
            pool.find(name)
        return count

    def free() -> int:
        pool.free(taken)
        return count

    times = [[microseconds(work, rounds=1) for work in (allocate, put, find, free)] for _ in range(9)]
    allocating, naming, finding, freeing = (statistics.median(column) for column in zip(*times, strict=True))
    return allocating, naming, finding, freeing


def main() -> None:
    """Print the tables."""
    cpu = platform.processor() or platform.machine()
    print(f"{platform.python_implementation()} {platform.python_version()}, {cpu}, {os.cpu_count()} cores\n")
    print(f"{'running':>8} {'decoding':>10} {'all steps':>10} {'mean, ends':>10} {'bound':>8}   µs a step")
    for rows in ROWS:
        print(f"{rows:8} {steps(rows)} {BOUND_FIXED + BOUND_EACH * rows:8.0f}")
    print(f"{256:8} {steps(256, (None, 512, 512))} {'':8}   three kv_groups, two with a window")
    print(f"\n{'pool':>8} {'allocate':>10} {'name':>10} {'find':>10} {'free':>10}   µs a block")
    for num_blocks in (2_000, 20_000, 200_000):
        costs = pool_costs(num_blocks)
        print(f"{num_blocks:8} " + " ".join(f"{cost:10.2f}" for cost in costs))


if __name__ == "__main__":
    main()
