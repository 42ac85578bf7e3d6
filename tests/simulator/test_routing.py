"""Routing rules: each does what its docstring says."""

import collections
import dataclasses

from jpaged.simulator.load import Arrival
from jpaged.simulator.routing import LeastLoaded, PrefixAffine, RoundRobin


@dataclasses.dataclass
class Fake:
    load: int = 0


def arrival(prefix_id: int = -1) -> Arrival:
    return Arrival(0.0, 100, 10, prefix_id, 50 if prefix_id >= 0 else 0)


def test_round_robin_takes_turns():
    router, replicas = RoundRobin(), [Fake(9), Fake(0), Fake(3)]
    assert [router.choose(arrival(), replicas) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_least_loaded_takes_the_least_loaded_in_turns():
    router, replicas = LeastLoaded(), [Fake(2), Fake(0), Fake(1), Fake(0)]
    chosen = []
    for _ in range(9):
        chosen.append(router.choose(arrival(), replicas))
        replicas[chosen[-1]].load += 1
    assert max(r.load for r in replicas) - min(r.load for r in replicas) == 0
    idle = [Fake() for _ in range(3)]
    assert len({router.choose(arrival(), idle) for _ in range(3)}) == 3


def test_a_prefix_keeps_its_replica_until_it_is_overloaded():
    router, replicas = PrefixAffine(), [Fake(4) for _ in range(4)]
    home = router.choose(arrival(7), replicas)
    assert {router.choose(arrival(7), replicas) for _ in range(10)} == {home}
    replicas[home].load = 7  # the mean is 4.75: up to 1.25 * 4.75 + 1 = 6.9
    second = router.choose(arrival(7), replicas)
    assert second != home
    replicas[home].load = 6
    assert router.choose(arrival(7), replicas) == home


def test_prefixes_spread_and_few_move_when_a_replica_is_added():
    def homes(count):
        router, replicas = PrefixAffine(), [Fake() for _ in range(count)]
        return [router.choose(arrival(prefix), replicas) for prefix in range(2000)]

    four, five = homes(4), homes(5)
    assert min(collections.Counter(four).values()) > 0.8 * 500
    moved = [new for old, new in zip(four, five, strict=True) if old != new]
    assert set(moved) == {4}  # rendezvous hashing: prefixes move only to the new replica
    assert len(moved) < 0.25 * 2000


def test_requests_without_a_prefix_go_to_the_least_loaded():
    router, replicas = PrefixAffine(), [Fake(3), Fake(1), Fake(2)]
    assert router.choose(arrival(), replicas) == 1
