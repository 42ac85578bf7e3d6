"""Routers choose the replica of a request. They see the arrival and each replica's number of requests."""

import hashlib
from collections.abc import Sequence
from typing import Protocol

from jpaged.simulator.load import NO_PREFIX, Arrival

OVERLOAD = 1.25  # prefix-affine avoids a replica with more than OVERLOAD * (mean number of requests) + 1 requests


class Loaded(Protocol):
    """A replica as a router sees it."""

    load: int  # requests that wait or run on it


class Router(Protocol):
    """A routing rule."""

    def choose(self, arrival: Arrival, replicas: Sequence[Loaded]) -> int:
        """Return the index of the replica for the request."""
        ...


class RoundRobin:
    """Uses the replicas in turn, regardless of their load."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, arrival: Arrival, replicas: Sequence[Loaded]) -> int:
        """Return the replica after the last chosen one."""
        index = self._next % len(replicas)
        self._next = index + 1
        return index


class LeastLoaded:
    """Chooses the replica with the fewest waiting and running requests. On a tie, the least recently used one."""

    def __init__(self) -> None:
        self._first = 0  # index at which the search starts, so that idle replicas are used in turn

    def choose(self, arrival: Arrival, replicas: Sequence[Loaded]) -> int:
        """Return the first of the least loaded replicas, counted from the one after the last chosen."""
        count = len(replicas)
        index = min(((self._first + i) % count for i in range(count)), key=lambda i: replicas[i].load)
        self._first = index + 1
        return index


class PrefixAffine:
    """Sends all requests with one prefix to one replica, so that the prefix's KV is computed only there.

    Each prefix orders the replicas by a hash of prefix and replica (rendezvous hashing). A change of the number of
    replicas then moves the fewest prefixes. A request goes to the first replica in this order that is not overloaded:
    one with at most 1.25 times the mean number of requests, plus one. These are bounded loads, as in Mirrokni, Thorup
    and Zadimoghaddam, 2018. A request without a prefix goes to the least loaded replica.
    """

    def __init__(self) -> None:
        self._least = LeastLoaded()
        self._orders: dict[int, list[int]] = {}

    def choose(self, arrival: Arrival, replicas: Sequence[Loaded]) -> int:
        """Return the first replica in the prefix's order that is not overloaded."""
        if arrival.prefix_id == NO_PREFIX or not arrival.prefix_tokens:
            return self._least.choose(arrival, replicas)
        order = self._order(arrival.prefix_id, len(replicas))
        bound = OVERLOAD * sum(replica.load for replica in replicas) / len(replicas) + 1
        return next(index for index in order if replicas[index].load <= bound)

    def _order(self, prefix_id: int, count: int) -> list[int]:
        order = self._orders.get(prefix_id)
        if order is None:
            if len(self._orders) >= 100_000:  # bounds memory: a trace may have one prefix per request
                self._orders.clear()
            order = sorted(range(count), key=lambda i: hashlib.sha256(f"{prefix_id}/{i}".encode()).digest())
            self._orders[prefix_id] = order
        return order


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-affine": PrefixAffine,
}
