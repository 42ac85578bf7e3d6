"""The server's other front ends, which answer the same clients in processes of their own.

Draining goes to all of them, and `/metrics` and `/admin/status` count the requests of all. A server of one process has
no peers.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, Self

import msgspec

from jpaged.metrics import Histogram
from jpaged.serving.admin.metrics import REQUEST_SECONDS, HTTPCounts
from jpaged.serving.web.intake import Intake


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """A front end's message to the others, as JSON. num_open: requests that it is answering."""

    num_open: int
    requests: list[tuple[str, str, str, int]]             # as `HTTPCounts.requests`, with the count at the end
    seconds: list[tuple[str, str, list[int], float]]      # as `HTTPCounts.seconds`: counts of the buckets, and the sum

    @classmethod
    def of(cls, num_open: int, http: HTTPCounts) -> Self:
        """Make a report."""
        seconds = [(*key, each.counts.copy(), each.sum) for key, each in http.seconds.copy().items()]
        return cls(num_open, [(*key, count) for key, count in http.requests.copy().items()], seconds)

    @property
    def http(self) -> HTTPCounts:
        """The requests that it has answered."""
        counts = HTTPCounts(Counter({(route, method, status): count for route, method, status, count in self.requests}))
        for route, method, buckets, total in self.seconds:
            histogram = counts.seconds[route, method] = Histogram(REQUEST_SECONDS)
            histogram.counts, histogram.sum = buckets, total
        return counts


class Board(Protocol):
    """Carries reports, and the draining state: `RemoteEngine`."""

    async def reports(self) -> Sequence[bytes]:
        """The reports of all other front ends."""
        ...

    def share(self, report: Callable[[], bytes], drain: Callable[[bool], None]) -> None:
        """report: makes this front end's report. drain: called when any front end begins or ends to drain."""
        ...

    def tell_draining(self, draining: bool) -> None:
        """Let all front ends drain, this one too, or end it."""
        ...


class Peers:
    """The other front ends, as one of them sees them."""

    def __init__(self, board: Board | None, intake: Intake, http: HTTPCounts):
        """board: None for a server of one process."""
        self._board, self._intake = board, intake
        if board is not None:
            board.share(lambda: msgspec.json.encode(Report.of(intake.num_open, http)), self._note_draining)

    async def reports(self) -> Sequence[Report]:
        """The reports of the others. One that is starting again is missing."""
        if self._board is None:
            return ()
        return [msgspec.json.decode(report, type=Report) for report in await self._board.reports()]

    def set_draining(self, *, draining: bool) -> None:
        """Begin or end to drain, in all front ends."""
        self._intake.draining = draining
        if self._board is not None:
            self._board.tell_draining(draining)

    def _note_draining(self, draining: bool) -> None:
        self._intake.draining = draining
