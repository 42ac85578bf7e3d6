"""Runs of the simulator: all arrivals are served, equal seeds give equal runs, queue lengths agree with theory."""

import dataclasses
import itertools
import statistics

import pytest

from jpaged.engine.engine import SchedulingOptions
from jpaged.errors import RequestError
from jpaged.simulator.cost import CostModel
from jpaged.simulator.load import Arrival, ArrivalTimes, GeneratedLoad, LengthDistribution
from jpaged.simulator.simulation import SimulationOptions, simulate
from jpaged.simulator.step_load import EngineShape

SHAPE = EngineShape(num_blocks=600, block_size=16, max_num_seqs=24, max_num_batched_tokens=256, max_model_len=512)
SMALL_POOL = dataclasses.replace(SHAPE, num_blocks=64)
COST = CostModel(fixed=5e-3, per_token=2e-5, per_kv_token=1e-7)
MOVING = dataclasses.replace(COST, per_moved_block=1e-5)


def options(**fields) -> SimulationOptions:
    return SimulationOptions(**{"shape": SHAPE, "cost": COST, **fields})


def load(rate: float = 20.0, prompt="lognormal:90:0.7", output="lognormal:40:0.7", **fields) -> GeneratedLoad:
    given = {
        "num_requests": 600,
        "times": ArrivalTimes("poisson", rate),
        "prompt_tokens": LengthDistribution("prompt_tokens", prompt),
        "output_tokens": LengthDistribution("output_tokens", output),
        "max_model_len": 512,
    }
    return GeneratedLoad(**{**given, **fields})


@pytest.mark.slow
def test_the_same_seed_is_the_same_run():
    fields = {"num_requests": 200, "prefixes": 3, "prefix_tokens": 32}
    two = options(num_replicas=2, routing="prefix-affine")
    first, again, other = (simulate(load(seed=seed, **fields), two).as_json() for seed in (1, 1, 2))
    assert first == again
    assert first["seconds"] != other["seconds"]


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        pytest.param({}, {}, marks=pytest.mark.slow),
        ({"max_tokens": 200}, {}),                                  # the scheduler does not know when requests end
        ({"num_replicas": 3, "routing": "least-loaded"}, {"prefixes": 5, "prefix_tokens": 40}),
        ({"concurrency": 30}, {"rate": float("inf")}),
        pytest.param({"shape": SMALL_POOL}, {}, marks=pytest.mark.slow),                 # preempts
        ({"shape": SMALL_POOL, "max_tokens": 300}, {}),
        ({"shape": dataclasses.replace(SHAPE, num_blocks=128, windows=(None, 48))}, {}),
        pytest.param({"prefix_caching": False}, {"prefixes": 2, "prefix_tokens": 64}, marks=pytest.mark.slow),
        ({"scheduling": SchedulingOptions("shortest_first"), "max_tokens": 200}, {}),
        ({"scheduling": SchedulingOptions("priority"), "shape": SMALL_POOL}, {"priorities": ((0, 1.0), (3, 1.0))}),
        pytest.param({"host_blocks": 500, "cost": MOVING, "shape": SMALL_POOL}, {}, marks=pytest.mark.slow),
        ({"host_blocks": 50, "cost": MOVING, "shape": dataclasses.replace(SHAPE, num_blocks=96, windows=(48, None))},
         {"prefixes": 9, "prefix_tokens": 48}),
    ],
)  # fmt: skip
def test_everything_that_arrives_is_served(fields, more):
    """No request and no token is lost or counted twice. Compare with the load, and with each request's own record."""
    arrivals = list(load(**more))
    started, ended = {}, {}

    def watch(event, request, time):
        seen = started if event == "start" else ended
        assert request.request_id not in seen, f"{event} twice"
        seen[request.request_id] = (request, time)

    result = simulate(arrivals, options(**fields), watch=watch)
    assert result.finished_requests == len(started) == len(ended) == len(arrivals)
    assert result.prompt_tokens == sum(a.prompt_tokens for a in arrivals)
    assert result.output_tokens == sum(a.output_tokens for a in arrivals)
    for number, arrival in enumerate(arrivals):
        request, end = ended[str(number)]
        assert len(request.token_ids) >= arrival.prompt_tokens + arrival.output_tokens
        assert request.prompt_len == arrival.prompt_tokens
        assert arrival.time <= request.arrived <= started[str(number)][1] < end
    # Every token was counted once: the first ones of requests, and the gaps between the others.
    distributions = result.first_token.shares, result.inter_token.shares
    assert all(shares[-1] == 1 for shares in distributions)
    assert result.useful_tokens >= result.prompt_tokens - result.prefix_hit_tokens
    if fields.get("shape") is not None and result.preemptions:
        assert result.recomputed_tokens > 0
    if not fields.get("prefix_caching", True):
        assert result.prefix_hit_tokens == 0
    elif more.get("prefixes"):
        assert result.prefix_hit_tokens > 0.5 * result.started_prompt_tokens * 40 / (40 + 90)


def test_times_of_a_single_request():
    """Computed by hand: a prompt in chunks of 256, then one token per step, with times from the cost model."""
    result = simulate([Arrival(3.0, 300, 4)], options(cost=CostModel(fixed=1.0, per_kv_token=1e-3)))
    chunks = (1 + 0.256) + (1 + 0.300)
    decodes = [1 + 0.301, 1 + 0.302, 1 + 0.303]
    assert result.first_token.max == pytest.approx(chunks)
    assert result.inter_token.max == pytest.approx(decodes[-1])
    assert result.end_to_end.max == pytest.approx(chunks + sum(decodes))
    assert result.duration == pytest.approx(3 + chunks + sum(decodes))
    assert result.queued.max == 0
    assert result.steps == 5
    assert result.busy == pytest.approx((result.duration - 3) / result.duration)


def test_gaps_between_tokens():
    """Compare with a record of every token of every request. Includes preemptions and ends unknown to the scheduler."""
    times: dict[str, list[float]] = {}
    small = dataclasses.replace(SHAPE, num_blocks=48)

    from jpaged.simulator.replica import Replica

    take = Replica._take

    def spied(self, done, since):
        before = {request: len(request.token_ids) for request in done.step.requests if not request.ended}
        result = take(self, done, since)
        for request, length in before.items():
            if len(request.token_ids) > length:
                times.setdefault(request.request_id, []).append(self.now)
        return result

    Replica._take = spied
    try:
        result = simulate(load(rate=60), options(shape=small, max_tokens=300))
    finally:
        Replica._take = take
    assert result.preemptions > 10
    gaps = [late - early for each in times.values() for early, late in itertools.pairwise(each)]
    assert result.inter_token.mean == pytest.approx(statistics.fmean(gaps))
    assert result.inter_token.max == pytest.approx(max(gaps))
    gaps.sort()
    assert result.inter_token.p99 == pytest.approx(gaps[int(0.99 * len(gaps))], rel=0.02)
    assert sum(map(len, times.values())) == result.output_tokens


@pytest.mark.slow
def test_queues_have_the_lengths_of_theory():
    """One row and one step per request make an M/D/1 queue. Its mean wait is rho / (2 mu (1 - rho)).

    This is Pollaczek-Khinchine's formula, and Kingman's gives the same. A request that finds the engine idle starts at
    once. A request that finds it busy starts with the next step, which is planned while the step before runs.
    """
    service = 0.1
    shape = EngineShape(num_blocks=64, block_size=16, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=16)
    for rho in (0.3, 0.7):
        arrivals = load(rate=rho / service, num_requests=12_000, prompt="8", output="1", max_model_len=16, seed=3)
        result = simulate(arrivals, options(shape=shape, cost=CostModel(fixed=service), prefix_caching=False))
        # From arrival to the only token: waiting and service.
        expected = service + rho * service / (2 * (1 - rho))
        assert result.first_token.mean == pytest.approx(expected, rel=0.05), rho
        assert result.busy == pytest.approx(rho, rel=0.02)


def test_arrivals_beyond_the_queue_are_refused():
    result = simulate(load(rate=500), options(scheduling=SchedulingOptions(max_queued_requests=5)))
    assert result.refused_requests > 0
    assert result.finished_requests + result.refused_requests == 600
    assert max(point.waiting for point in result.timeline) <= 5 + 1e-9


def test_arrivals_with_too_many_tokens_are_refused():
    """As in the engine, an empty queue accepts any prompt."""
    arrivals = [Arrival(0.0, 200, 20)] + [Arrival(0.001, 100, 1)] * 4
    alone = dataclasses.replace(SHAPE, max_num_seqs=1)
    result = simulate(arrivals, options(shape=alone, scheduling=SchedulingOptions(max_queued_tokens=250)))
    assert (result.finished_requests, result.refused_requests) == (3, 2)
    result = simulate(arrivals, options(shape=alone, scheduling=SchedulingOptions(max_queued_tokens=1)))
    assert (result.finished_requests, result.refused_requests) == (2, 3)


def test_lower_priorities_come_first():
    priorities = {"priorities": ((0, 1.0), (1, 1.0))}
    waited: dict[str, dict[int, list[float]]] = {}
    for policy in ("fcfs", "priority"):
        times = waited[policy] = {0: [], 1: []}

        def watch(event, request, time, times=times):
            if event == "start":
                times[request.priority].append(time - request.arrived)

        result = simulate(load(rate=90, **priorities), options(scheduling=SchedulingOptions(policy)), watch=watch)
        assert result.finished_requests == 600
    assert statistics.mean(waited["fcfs"][0]) == pytest.approx(statistics.mean(waited["fcfs"][1]), rel=0.2)
    assert statistics.mean(waited["priority"][0]) < 0.2 * statistics.mean(waited["priority"][1])


def test_shortest_first_lowers_the_mean_wait():
    waits = [
        simulate(load(rate=90), options(scheduling=SchedulingOptions(policy))).queued.mean
        for policy in ("fcfs", "shortest_first")
    ]
    assert waits[1] < 0.9 * waits[0]


def test_moved_blocks_take_time():
    """Computed by hand. The pool has four blocks: a prompt moves to the host when another needs them, and back."""
    shape = EngineShape(num_blocks=4, block_size=16, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64)
    cost = CostModel(fixed=1.0, per_token=1.0, per_moved_block=0.5)
    arrivals = [Arrival(0.0, 49, 1, 0, 49), Arrival(100.0, 49, 1, 1, 49), Arrival(200.0, 49, 1, 0, 49)]
    ends = {}

    def watch(event, request, time):
        if event == "finish":
            ends[request.arrival] = time - request.arrived

    result = simulate(arrivals, options(shape=shape, cost=cost, host_blocks=8), watch=watch)
    # The block without a name is reused first. The third request fetches 3 blocks, which replace the 3 blocks of the
    # second request, and computes one token.
    assert (result.blocks_to_host, result.blocks_to_device) == (3 + 3, 3)
    assert ends == {0: 1 + 49, 1: 1 + 49 + 3 * 0.5, 2: 1 + 1 + 6 * 0.5}
    without = simulate(arrivals, options(shape=shape, cost=cost))
    assert without.host_blocks == without.blocks_to_host == 0
    assert without.end_to_end.max == 50
    dear = dataclasses.replace(cost, per_moved_block=9.0)  # 18 s to the host and back, for 16 tokens of 65 / 64 s each
    assert simulate(arrivals, options(shape=shape, cost=dear, host_blocks=8)).host_blocks == 0


def test_closed_loads_keep_their_concurrency():
    result = simulate(load(rate=float("inf")), options(concurrency=10))
    running = [point.running + point.waiting for point in result.timeline]
    assert max(running) <= 10 + 1e-9
    # Little's law: requests in the system = throughput x time in it.
    assert result.per_second(600) * result.end_to_end.mean == pytest.approx(10, rel=0.05)


@pytest.mark.slow
def test_littles_law():
    result = simulate(load(rate=30, num_requests=1000), options())
    spans, begin, area = [], 0.0, 0.0
    for point in result.timeline:
        spans.append(2 * (point.time - begin))
        begin += spans[-1]
        area += spans[-1] * (point.running + point.waiting)
    assert area / result.duration == pytest.approx(result.per_second(1000) * result.end_to_end.mean, rel=0.05)


@pytest.mark.slow
def test_two_replicas_share_the_work():
    alone = simulate(load(rate=float("inf")), options())
    for routing in ("round-robin", "least-loaded"):
        both = simulate(load(rate=float("inf")), options(num_replicas=2, routing=routing))
        assert both.duration < 0.6 * alone.duration
        assert both.output_tokens == alone.output_tokens


@pytest.mark.slow
def test_prefixes_go_where_they_are_cached():
    """The prefixes do not fit into one pool. Only with affine routing does each replica keep a share of them."""
    shape = dataclasses.replace(SHAPE, num_blocks=128)
    shared = {"prefixes": 16, "prefix_tokens": 240, "prefix_zipf": 0.0, "num_requests": 600}
    arrivals = load(rate=40, prompt="16", output="16", **shared)
    rates = {
        routing: simulate(arrivals, options(shape=shape, num_replicas=4, routing=routing)).hit_rate
        for routing in ("round-robin", "prefix-affine")
    }
    assert rates["prefix-affine"] > rates["round-robin"] + 0.15


def test_prefixes_that_are_whole_prompts_share_no_answers():
    """Requests with equal prompts do not share each other's generated tokens."""
    arrivals = [Arrival(0.0, 64, 64, 0, 64), Arrival(10.0, 64, 64, 0, 64), Arrival(20.0, 128, 8, 0, 64)]
    result = simulate(arrivals, options())
    assert result.prefix_hit_tokens == 48 + 64  # the last token of a prompt is always computed, and so is its block


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_replicas": 0}, "num_replicas"),
        ({"concurrency": 0}, "concurrency"),
        ({"scheduling": SchedulingOptions(max_queued_requests=0)}, "max_queued_requests"),
        ({"scheduling": SchedulingOptions(max_queued_tokens=-1)}, "max_queued_tokens"),
        ({"scheduling": SchedulingOptions(max_num_partial_prefills=0)}, "max_num_partial_prefills"),
        ({"scheduling": SchedulingOptions(target_step_ms=float("nan"))}, "target_step_ms"),
        ({"scheduling": SchedulingOptions("lifo")}, "must be fcfs, priority, shortest_first"),
        ({"host_blocks": -1}, "host_blocks"),
        ({"host_blocks": 9}, "has no time for moving a block"),
        ({"host_blocks": 9, "cost": MOVING, "prefix_caching": False}, "needs prefix caching"),
        ({"routing": "random"}, "round-robin"),
        ({"shape": dataclasses.replace(SHAPE, num_blocks=0)}, "num_blocks"),
        ({"shape": dataclasses.replace(SHAPE, max_num_batched_tokens=23)}, "must be at least max_num_seqs=24"),
        ({"shape": dataclasses.replace(SHAPE, num_blocks=31)}, "needs 32"),
    ],
)
def test_faulty_options_are_refused(fields, says):
    with pytest.raises(RequestError) as error:
        simulate([Arrival(0.0, 1, 1)], options(**fields))
    assert says in str(error.value)
