"""The event loop of the simulator: arrivals, and turns of N replicas, in order of time.

1. Find the replica with the earliest next turn. Idle replicas have no next turn.
2. Route the arrivals up to that time. Between turns, the state that routers read changes only by arrivals.
3. Run the turn, which moves the replica's clock. The run ends when all replicas are idle and no arrivals are left.
"""

import dataclasses
import gc
import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from jpaged.engine.scheduling.scheduling_options import SchedulingOptions
from jpaged.engine.scheduling.waiting_queue import POLICIES
from jpaged.errors import RequestError
from jpaged.routing import ROUTERS
from jpaged.simulator.cost import CostModel
from jpaged.simulator.load import NO_PREFIX, Arrival
from jpaged.simulator.records import Recorded, Records
from jpaged.simulator.replica import Replica
from jpaged.simulator.results import SimulationResult, summarise
from jpaged.simulator.step_load import EngineShape
from jpaged.simulator.timeline import Timeline

ROUTING = {name.replace("_", "-"): router for name, router in ROUTERS.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """Options of a run, except its load."""

    shape: EngineShape
    cost: CostModel
    num_replicas: int = 1
    routing: str = "round-robin"
    prefix_caching: bool = True
    max_tokens: int | None = None       # output limit for the scheduler; None: each request's output length
    concurrency: int | None = None      # maximum requests in the system; further arrivals wait outside
    scheduling: SchedulingOptions = dataclasses.field(default_factory=SchedulingOptions)
    host_blocks: int = 0                # capacity of each replica's host tier, in blocks

    def __post_init__(self) -> None:
        for name in ("num_replicas", "concurrency", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(name, value, "must be at least 1")
        if self.scheduling.scheduling_policy not in POLICIES:
            raise RequestError("scheduling_policy", self.scheduling.scheduling_policy, f"must be {', '.join(POLICIES)}")
        for name in ("max_num_partial_prefills", "target_step_ms", "max_queued_requests", "max_queued_tokens"):
            value = getattr(self.scheduling, name)
            if value is not None and not 0 < value < math.inf:
                raise RequestError(name, value, "must be a finite number above 0")
        if self.host_blocks < 0:
            raise RequestError("host_blocks", self.host_blocks, "must be 0 or more")
        if self.host_blocks and not self.prefix_caching:
            raise RequestError("host_blocks", self.host_blocks, "a host tier needs prefix caching: turn it on")
        if self.host_blocks and not self.cost.per_moved_block:
            raise RequestError(
                "host_blocks", self.host_blocks,
                f"the cost model ({self.cost.origin}) has no time for moving a block: give --seconds-per-move, add "
                "per_moved_block=SECONDS to a model by hand, or measure with `jpaged bench steps --swap-space GiB`"
            )  # fmt: skip
        if self.routing not in ROUTING:
            raise RequestError("routing", self.routing, f"must be {', '.join(ROUTING)}")
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_model_len"):
            if getattr(self.shape, name) < 1:
                raise RequestError(name, getattr(self.shape, name), "must be at least 1")
        if self.shape.max_num_batched_tokens < self.shape.max_num_seqs:
            raise RequestError(
                "max_num_batched_tokens",
                self.shape.max_num_batched_tokens,
                f"must be at least max_num_seqs={self.shape.max_num_seqs}: every row may decode in a step",
            )


def simulate(
    arrivals: Iterable[Arrival],
    options: SimulationOptions,
    *,
    progress: Callable[[int], object] | None = None,
    watch: Callable[[str, Recorded, float], None] | None = None,
) -> SimulationResult:
    """Run a load until all its requests have ended.

    progress: called with the number of requests that ended in a turn, if any. watch: for tests; see `Records`.
    """
    records = Records(Timeline(options.num_replicas), watch)
    replicas = [
        Replica(
            options.shape,
            options.cost,
            records,
            prefix_caching=options.prefix_caching,
            max_tokens=options.max_tokens,
            scheduling=options.scheduling,
            host_blocks=options.host_blocks,
        )
        for _ in range(options.num_replicas)
    ]
    with _few_collections():
        _run(iter(arrivals), options, replicas, records, progress)
    return summarise(records, replicas, options.cost, options.shape, options.scheduling)


def _run(
    arrivals: Iterator[Arrival],
    options: SimulationOptions,
    replicas: list[Replica],
    records: Records,
    progress: Callable[[int], object] | None,
) -> None:
    router = ROUTING[options.routing]()
    # With `concurrency`: a heap of the times at which free places in the system became free.
    places = None if options.concurrency is None else [0.0] * options.concurrency
    upcoming = next(arrivals, None)
    number = 0
    while True:
        replica = min(replicas, key=_next_turn) if len(replicas) > 1 else replicas[0]
        turn = replica.next_turn
        if upcoming is not None and (places is None or places):
            time = upcoming.time if places is None else max(upcoming.time, places[0])
            if time <= turn:
                chosen = replicas[router.choose(_prefixes(upcoming), [replica.load for replica in replicas])]
                if chosen.refuses(upcoming):
                    records.refused += 1
                else:
                    chosen.add(upcoming, number, time)
                    if places is not None:
                        heapq.heappop(places)
                number += 1
                upcoming = next(arrivals, None)
                continue
        if turn == math.inf:
            return
        ended = replica.turn()
        if ended:
            if places is not None:
                for time in ended:
                    heapq.heappush(places, time)
            if progress is not None:
                progress(len(ended))


def _prefixes(arrival: Arrival) -> tuple[int, ...]:
    """Identifier of a request's prefix, for routers."""
    return (arrival.prefix_id,) if arrival.prefix_id != NO_PREFIX and arrival.prefix_tokens else ()


def _next_turn(replica: Replica) -> float:
    return replica.next_turn


@contextmanager
def _few_collections() -> Iterator[None]:
    """Run the garbage collector rarely. Requests have no cycles, and a collection would visit all of them."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(200_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
