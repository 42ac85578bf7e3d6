"""Messages of front ends to each other, by way of the engine's process: draining, and reports for `/metrics`.

Called by: `FrontEndLink`, on the event loop of the engine's process.
Owns: whether the server drains, and the questions that are not answered yet.
Never: reads a report.
"""

import asyncio
import itertools
from collections.abc import Callable

from jpaged.frontend.remote.messages import AskReport, Draining

SECONDS = 1.0  # longest wait for the reports

Send = Callable[[object], None]


class HostBoard:
    """The front ends of one engine, as each other sees them."""

    def __init__(self) -> None:
        self._sends: list[Send] = []
        self._identities = itertools.count()
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._draining = False

    def join(self, send: Send) -> None:
        """Add a front end. send: sends it a message."""
        self._sends.append(send)
        if self._draining:
            send(Draining(True))

    def leave(self, send: Send) -> None:
        """Forget a front end."""
        if send in self._sends:
            self._sends.remove(send)

    def drain(self, draining: bool) -> None:
        """Tell all front ends."""
        self._draining = draining
        for send in tuple(self._sends):
            send(Draining(draining))

    async def reports(self, asker: Send) -> list[bytes]:
        """The reports of all front ends but the one that asks. One that does not answer is missing."""
        futures = []
        for send in self._sends:
            if send is not asker:
                identity = next(self._identities)
                self._asked[identity] = future = asyncio.get_running_loop().create_future()
                futures.append((identity, future))
                send(AskReport(identity))
        if futures:
            await asyncio.wait([future for _, future in futures], timeout=SECONDS)
        for identity, _ in futures:
            self._asked.pop(identity, None)
        return [future.result() for _, future in futures if future.done()]

    def note_report(self, identity: int, report: bytes) -> None:
        """Take a report."""
        future = self._asked.pop(identity, None)
        if future is not None and not future.done():
            future.set_result(report)
