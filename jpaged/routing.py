"""Routing: the choice of the engine that runs a request. The front end of several engines uses it, and the simulator.

A router sees the names of the prompt's prefixes and the load of each engine. It may be called from one thread only.
"""

import array
import math
from collections.abc import Hashable, Sequence
from typing import Protocol

OVERLOAD = 1.25  # prefix-affine avoids an engine with more than OVERLOAD * (mean number of requests) + 1 requests
MAX_KNOWN = 200_000  # prefixes that are remembered: about 30 MB. The least recently used ones are forgotten


def prefix_names(token_ids: Sequence[int], block_size: int, salt: str = "") -> tuple[int, ...]:
    """Names of the beginnings of a prompt that have 1 to 16 blocks, and then ever an eighth more.

    A prompt of 1,000,000 tokens and blocks of 16 has 87 names.
    salt: of the prefix cache: prompts with different salts share nothing. Names are valid in this process only.
    """
    names, name, begin, blocks = [], hash(salt), 0, 1
    while (end := blocks * block_size) <= len(token_ids):
        name = hash((name, array.array("i", token_ids[begin:end]).tobytes()))
        names.append(name)
        begin, blocks = end, blocks + max(1, blocks // 8)
    return tuple(names)


class Router(Protocol):
    """A routing rule."""

    def choose(self, prefixes: Sequence[Hashable], loads: Sequence[float], *, bound: float | None = None) -> int:
        """Return the index of the engine for a request.

        prefixes: names of ever longer beginnings of its prompt. Prompts that begin with the same tokens have the same
                  first names.
        loads:    requests that wait or run on each engine. Infinite: the engine must not be chosen. One is finite.
        bound:    an engine with more requests is overloaded. None: OVERLOAD * (mean of the loads) + 1.
        """
        ...

    def forget(self) -> None:
        """The engines have dropped their cached prefixes."""
        ...


class RoundRobin:
    """Uses the engines in turn, regardless of their load."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, prefixes: Sequence[Hashable], loads: Sequence[float], *, bound: float | None = None) -> int:
        """Return the engine after the last chosen one."""
        count = len(loads)
        index = next(i % count for i in range(self._next, self._next + count) if loads[i % count] < math.inf)
        self._next = index + 1
        return index

    def forget(self) -> None:
        """Do nothing: no prefix is remembered."""


class LeastLoaded:
    """Chooses the engine with the fewest waiting and running requests. On a tie, the least recently used one."""

    def __init__(self) -> None:
        self._first = 0  # index at which the search starts, so that idle engines are used in turn

    def choose(self, prefixes: Sequence[Hashable], loads: Sequence[float], *, bound: float | None = None) -> int:
        """Return the first of the least loaded engines, counted from the one after the last chosen."""
        count = len(loads)
        index = min(((self._first + i) % count for i in range(count)), key=loads.__getitem__)
        self._first = index + 1
        return index

    def forget(self) -> None:
        """Do nothing: no prefix is remembered."""


class PrefixAffine:
    """Sends requests whose prompts begin alike to one engine, so that the KV of the beginning is computed only there.

    Each prefix remembers its engines, the first one that got it first. A request goes to the first engine of its
    longest prefix that is not overloaded; then those of its shorter prefixes follow. An engine is overloaded with more
    than 1.25 times the mean number of requests, plus one. This is the rule of consistent hashing with bounded loads
    (Mirrokni, Thorup and Zadimoghaddam, 2018), with a table in place of the hash. If no prefix is known, or all engines
    that know one are overloaded, the request goes to the least loaded engine.
    """

    def __init__(self) -> None:
        self._least = LeastLoaded()
        self._engines: dict[Hashable, tuple[int, ...]] = {}  # by prefix, least recently used first

    def choose(self, prefixes: Sequence[Hashable], loads: Sequence[float], *, bound: float | None = None) -> int:
        """Return the first engine of the longest prefix that is not overloaded."""
        if bound is None:
            usable = [load for load in loads if load < math.inf]
            bound = OVERLOAD * sum(usable) / len(usable) + 1
        known = (index for prefix in reversed(prefixes) for index in self._engines.get(prefix, ()))
        chosen = next((index for index in known if loads[index] <= bound), None)
        if chosen is None:
            chosen = self._least.choose(prefixes, loads)
        self._remember(prefixes, chosen)
        return chosen

    def forget(self) -> None:
        """Forget all prefixes."""
        self._engines.clear()

    def _remember(self, prefixes: Sequence[Hashable], chosen: int) -> None:
        for prefix in reversed(prefixes):  # a short prefix is used more recently than a longer one
            engines = self._engines.pop(prefix, ())
            self._engines[prefix] = engines if chosen in engines else (*engines, chosen)
        if len(self._engines) > MAX_KNOWN:
            for prefix in list(self._engines)[: MAX_KNOWN // 10]:
                del self._engines[prefix]


ROUTERS: dict[str, type[Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_affine": PrefixAffine,
}
