"""Routers choose the engine that runs a request. The front end of several engines and the simulator use them.

A router reads the hashes of the prompt's prefixes and the load of each engine. One thread at a time may call it.
"""

import array
import math
from collections.abc import Hashable, Sequence
from typing import Protocol

OVERLOAD = 1.25  # prefix-affine avoids an engine with more than OVERLOAD * (mean number of requests) + 1 requests
MAX_KNOWN = 200_000  # capacity of the prefix table: about 30 MB. Above it, the least recently used tenth is evicted


def prefix_names(token_ids: Sequence[int], block_size: int, salt: str = "") -> tuple[int, ...]:
    """Hash a prompt's prefixes of 1, 2, ... 16 blocks, and then prefixes that are each an eighth longer.

    A prompt of 1,000,000 tokens with blocks of 16 tokens has 87 hashes. They are valid in this process only.
    salt: cache salt of the request. Prompts with different salts have different hashes.
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

        prefixes: `prefix_names` of its prompt, shortest first. Prompts with a common prefix have the same first hashes.
        loads:    waiting and running requests of each engine; infinite: do not choose it. At least one is finite.
        bound:    an engine with more requests is overloaded. None: OVERLOAD * (mean of the finite loads) + 1.
        """
        ...

    def forget(self) -> None:
        """Forget all prefixes: the engines have emptied their prefix caches."""
        ...


class RoundRobin:
    """Uses the engines in turn, regardless of their load."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, prefixes: Sequence[Hashable], loads: Sequence[float], *, bound: float | None = None) -> int:
        """Return the next usable engine after the last chosen one."""
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
        """Return the least loaded engine. On a tie, the first one after the last chosen engine."""
        count = len(loads)
        index = min(((self._first + i) % count for i in range(count)), key=loads.__getitem__)
        self._first = index + 1
        return index

    def forget(self) -> None:
        """Do nothing: no prefix is remembered."""


class PrefixAffine:
    """Sends requests with a common prefix to one engine, so that only this engine computes the prefix's KV.

    A table lists, for each prefix, the engines that have received it, oldest first. The router looks up the request's
    prefixes, longest first, and takes the first listed engine that is not overloaded. If there is none, it takes the
    least loaded engine. An engine is overloaded if it has more than 1.25 times the mean number of requests, plus one.
    This is consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018), with a table as the hash.
    """

    def __init__(self) -> None:
        self._least = LeastLoaded()
        self._engines: dict[Hashable, tuple[int, ...]] = {}  # by prefix, least recently used first

    def choose(self, prefixes: Sequence[Hashable], loads: Sequence[float], *, bound: float | None = None) -> int:
        """Return the first engine of the longest prefix that is not overloaded, else the least loaded engine."""
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
        for prefix in reversed(prefixes):  # so a long prefix is evicted before its shorter ones
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
