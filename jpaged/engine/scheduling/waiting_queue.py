"""Requests that wait for a row, in the order of a scheduling policy.

A policy ranks each request when it starts to wait, and when it gets a row. The lowest rank starts first; equal ranks
start in order of arrival. A rank never changes while a request waits, so the queue stays sorted. The policies' ranks:

fcfs:           position in the order of arrival.
priority:       arrival time + PRIORITY_SECONDS * `priority`. A request overtakes another one whose `priority` is N
                higher, if it arrives at most N * PRIORITY_SECONDS later.
shortest_first: arrival time + TOKEN_SECONDS per token that the request may still generate, by its max_tokens. A request
                overtakes another one that may generate N more tokens, if it arrives at most N * TOKEN_SECONDS later.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from jpaged.engine.request import Request

PRIORITY_SECONDS = 60.0
TOKEN_SECONDS = 0.05  # a request with 1,000 fewer tokens overtakes requests that arrived up to 50 s earlier

_rank = attrgetter("schedule.rank")


def _fcfs(request: Request) -> float:
    return request.arrival


def _priority(request: Request) -> float:
    return request.metrics.arrival_time + PRIORITY_SECONDS * request.priority


def _shortest_first(request: Request) -> float:
    left = request.max_total_tokens - len(request.token_ids)
    return request.metrics.arrival_time + TOKEN_SECONDS * left


POLICIES: dict[str, Callable[[Request], float]] = {
    "fcfs": _fcfs,
    "priority": _priority,
    "shortest_first": _shortest_first,
}


class WaitingQueue:
    """A sorted list. Removing the head and adding the largest rank take constant time."""

    def __init__(self, policy: str = "fcfs"):
        """policy: a name in POLICIES."""
        self._policy = POLICIES[policy]
        self._sorted: list[Request] = []
        self._start = 0      # index of the head; entries before it have left
        self.num_tokens = 0  # prompt tokens of all waiting requests

    def __len__(self) -> int:
        return len(self._sorted) - self._start

    def __iter__(self) -> Iterator[Request]:
        return (self._sorted[index] for index in range(self._start, len(self._sorted)))

    def __contains__(self, request: Request) -> bool:
        index = bisect_left(self._sorted, request.schedule.rank, lo=self._start, key=_rank)
        return index < len(self._sorted) and self._sorted[index] is request

    def rank(self, request: Request) -> None:
        """Set a request's rank."""
        request.schedule.rank = (self._policy(request), request.arrival)

    def add(self, request: Request) -> None:
        """Rank a request and insert it."""
        self.rank(request)
        if not self or self._sorted[-1].schedule.rank <= request.schedule.rank:
            self._sorted.append(request)
        else:
            insort(self._sorted, request, lo=self._start, key=_rank)
        self.num_tokens += request.prompt_len

    def remove(self, request: Request) -> None:
        """Remove a request from any position. Raises KeyError if it does not wait."""
        index = bisect_left(self._sorted, request.schedule.rank, lo=self._start, key=_rank)
        if index == len(self._sorted) or self._sorted[index] is not request:
            raise KeyError(request.request_id)
        self.num_tokens -= request.prompt_len
        if index == self._start:
            self._start += 1
            if self._start > 64 and 2 * self._start > len(self._sorted):
                del self._sorted[: self._start]
                self._start = 0
        else:
            del self._sorted[index]

    def head(self) -> Request:
        """The request that starts next."""
        return self._sorted[self._start]

    def after_head(self, count: int) -> list[Request]:
        """At most `count` requests after the head, in order."""
        return self._sorted[self._start + 1 : self._start + 1 + count]
