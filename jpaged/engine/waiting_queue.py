"""Requests that wait for a row, in the order of a scheduling policy.

A policy gives each request a rank when it begins to wait, in seconds on the clock of its arrival; the lowest starts
first, ties go by arrival. All waiting requests age alike, so a rank never changes and the order can be kept:

fcfs:           first come, first served: the rank is the arrival.
priority:       arrival + PRIORITY_SECONDS a step of `priority`. Nobody is passed by a request that arrives more than
                PRIORITY_SECONDS times the difference of their priorities later.
shortest_first: arrival + TOKEN_SECONDS a token that it may still generate, by its max_tokens. Nobody is passed by a
                request that arrives more than TOKEN_SECONDS times the difference of these later.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from jpaged.engine.request import Request

PRIORITY_SECONDS = 60.0
TOKEN_SECONDS = 0.05  # a request of 1,000 tokens fewer passes those that have waited 50 s less

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
    """A sorted list whose head leaves in constant time; whoever comes last joins in constant time."""

    def __init__(self, policy: str = "fcfs"):
        """policy: a name in POLICIES."""
        self._policy = POLICIES[policy]
        self._sorted: list[Request] = []
        self._start = 0  # those before it have left
        self.num_tokens = 0  # of all their prompts

    def __len__(self) -> int:
        return len(self._sorted) - self._start

    def __iter__(self) -> Iterator[Request]:
        return (self._sorted[index] for index in range(self._start, len(self._sorted)))

    def __contains__(self, request: Request) -> bool:
        index = bisect_left(self._sorted, request.schedule.rank, lo=self._start, key=_rank)
        return index < len(self._sorted) and self._sorted[index] is request

    def rank(self, request: Request) -> None:
        """Set a request's place in the policy's order."""
        request.schedule.rank = (self._policy(request), request.arrival)

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        self.rank(request)
        if not self or self._sorted[-1].schedule.rank <= request.schedule.rank:
            self._sorted.append(request)
        else:
            insort(self._sorted, request, lo=self._start, key=_rank)
        self.num_tokens += request.prompt_len

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
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
        """Who starts next."""
        return self._sorted[self._start]

    def behind_head(self, count: int) -> list[Request]:
        """At most so many that stand behind the head, in order."""
        return self._sorted[self._start + 1 : self._start + 1 + count]
