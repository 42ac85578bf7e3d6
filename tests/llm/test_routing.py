"""Routing rules: each does what its docstring says."""

import collections
import math
import random

from jpaged import routing
from jpaged.routing import LeastLoaded, PrefixAffine, RoundRobin, prefix_names


def test_round_robin_takes_turns():
    router = RoundRobin()
    assert [router.choose((), [9, 0, 3]) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [router.choose((), [9, math.inf, 3]) for _ in range(3)] == [2, 0, 2]


def test_least_loaded_takes_the_least_loaded_in_turns():
    router, loads = LeastLoaded(), [2, 0, 1, 0]
    for _ in range(9):
        loads[router.choose((), loads)] += 1
    assert loads == [3, 3, 3, 3]
    assert len({router.choose((), [0, 0, 0]) for _ in range(3)}) == 3


def test_a_prefix_keeps_its_engine_until_it_is_overloaded():
    router, loads = PrefixAffine(), [4, 4, 4, 4]
    home = router.choose([7], loads)
    assert {router.choose([7], loads) for _ in range(10)} == {home}
    loads[home] = 7  # the mean is 4.75: up to 1.25 * 4.75 + 1 = 6.9
    second = router.choose([7], loads)
    assert second != home
    assert {router.choose([7], loads) for _ in range(10)} == {second}
    loads[home] = 6
    assert router.choose([7], loads) == home
    loads[home] = math.inf
    assert router.choose([7], loads) == second


def test_the_longest_prefix_decides_and_a_shorter_one_if_it_is_overloaded():
    router = PrefixAffine()
    assert router.choose(["system", "first talk"], [0, 1]) == 0
    assert router.choose(["system", "second talk"], [5, 0]) == 1  # the engine of "system" is overloaded
    assert router.choose(["system", "second talk", "turn 2"], [0, 2]) == 1
    assert router.choose(["system", "third talk"], [2, 2]) == 0  # both have "system": the first one that got it
    assert router.choose(["system", "second talk", "turn 3"], [1, 9]) == 0
    assert router.choose(["other"], [1, 0]) == 1
    router.forget()
    assert router.choose(["system", "second talk"], [0, 1]) == 0


def test_prefixes_spread_evenly():
    router, loads = PrefixAffine(), [0] * 4
    homes = collections.Counter(router.choose([prefix], loads) for prefix in range(2000))
    assert set(homes.values()) == {500}


def test_prompts_without_a_known_prefix_go_to_the_least_loaded():
    router = PrefixAffine()
    assert router.choose([], [3, 1, 2]) == 1
    assert router.choose(["new"], [3, 1, 2]) == 1


def test_a_bound_divides_a_batch_evenly():
    router, loads = PrefixAffine(), [0, 0, 0]
    for _ in range(7):
        loads[router.choose(["same"], loads, bound=2)] += 1  # shares of 3
    assert sorted(loads) == [1, 3, 3]


def test_the_table_is_bounded_and_keeps_what_was_used_last(monkeypatch):
    monkeypatch.setattr(routing, "MAX_KNOWN", 100)
    router = PrefixAffine()
    router.choose(["kept"], [0, 1])
    for prefix in range(1000):
        router.choose([prefix], [1, 0])
        assert router.choose(["kept"], [1, 0]) == 0
        assert len(router._engines) <= 100


def test_names_agree_exactly_as_far_as_prompts_do():
    rng = random.Random(0)
    prompt = [rng.randrange(1000) for _ in range(4000)]
    names = prefix_names(prompt, 16)
    lengths = [16 * blocks for blocks in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18)]
    assert len(names) < 50
    for cut in (15, 16, 17, 100, 256, 300):
        other = prefix_names(prompt[:cut] + [2000] * 1000, 16)
        equal = sum(a == b for a, b in zip(names, other, strict=False))
        assert equal == sum(length <= cut for length in lengths)
        assert names[equal:] != other[equal:]
    assert prefix_names(prompt[:15], 16) == ()
    assert not set(names) & set(prefix_names(prompt, 16, salt="tenant"))
    assert len(prefix_names(range(1_000_000), 16)) == 87
