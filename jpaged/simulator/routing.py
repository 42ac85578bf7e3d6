"""Which replica a request goes to. A rule sees the arrival and how many requests each replica has."""

import hashlib
from collections.abc import Sequence
from typing import Protocol

from jpaged.simulator.load import NO_PREFIX, Arrival

OVERLOAD = 1.25  # prefix_affine leaves a replica with more than so many times the mean number of requests


class Loaded(Protocol):
    """A replica as a router sees it."""

    load: int  # requests that wait or run there


class Router(Protocol):
    """A rule."""

    def choose(self, arrival: Arrival, replicas: Sequence[Loaded]) -> int:
        """Index of the replica that gets the request."""
        ...


class RoundRobin:
    """The replicas in turns, whatever they have to do."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, arrival: Arrival, replicas: Sequence[Loaded]) -> int:
        """The one after the last."""
        index = self._next % len(replicas)
        self._next = index + 1
        return index


class LeastLoaded:
    """The replica with the fewest requests that wait or run; of equals the one whose turn is longest ago."""

    def __init__(self) -> None:
        self._first = 0  # where the search begins, so that idle replicas take turns

    def choose(self, arrival: Arrival, replicas: Sequence[Loaded]) -> int:
        """The first of the least loaded ones, counted from behind the last chosen."""
        count = len(replicas)
        index = min(((self._first + i) % count for i in range(count)), key=lambda i: replicas[i].load)
        self._first = index + 1
        return index


class PrefixAffine:
    """Requests with a prefix to the replica that the prefix belongs to, so that its KV is computed there only.

    A prefix belongs to the replica whose hash with it is largest (rendezvous hashing: another number of replicas moves
    as few prefixes as can be). If that replica has more than 1.25 times the mean number of requests, plus one, the
    prefix's next one takes it, and so on: bounded loads, as in Mirrokni, Thorup and Zadimoghaddam, 2018. Requests
    without a prefix go to the least loaded replica.
    """

    def __init__(self) -> None:
        self._least = LeastLoaded()
        self._orders: dict[int, list[int]] = {}

    def choose(self, arrival: Arrival, replicas: Sequence[Loaded]) -> int:
        """The first of the prefix's replicas that is not overloaded."""
        if arrival.prefix_id == NO_PREFIX or not arrival.prefix_tokens:
            return self._least.choose(arrival, replicas)
        order = self._order(arrival.prefix_id, len(replicas))
        bound = OVERLOAD * sum(replica.load for replica in replicas) / len(replicas) + 1
        return next(index for index in order if replicas[index].load <= bound)

    def _order(self, prefix_id: int, count: int) -> list[int]:
        order = self._orders.get(prefix_id)
        if order is None:
            if len(self._orders) >= 100_000:  # a trace may have a prefix a request: memory stays bounded
                self._orders.clear()
            order = sorted(range(count), key=lambda i: hashlib.sha256(f"{prefix_id}/{i}".encode()).digest())
            self._orders[prefix_id] = order
        return order


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-affine": PrefixAffine,
}
