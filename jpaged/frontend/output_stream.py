"""Carries the outputs of one request from the engine's thread to its reader on an event loop."""

import asyncio

from jpaged.engine.engine import Output
from jpaged.errors import JPagedError
from jpaged.outputs import RequestOutput


class OutputStream:
    """Holds the latest output of one request until the request's reader takes it.

    loop:   the reader's event loop.
    deltas: each output has only what is new. An output that is still unread is joined with the next one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, deltas: bool = False):
        self.loop = loop
        self.deltas = deltas
        self.aborted = False  # the caller aborted the request before its prompt was tokenised
        self._latest: Output | JPagedError  # valid while `_news` is set
        self._news = asyncio.Event()

    def put(self, latest: Output | JPagedError) -> None:
        """Store an output, or the error that ended the request. Called on the event loop."""
        unread = self._latest if self.deltas and self._news.is_set() else None
        if isinstance(unread, RequestOutput) and isinstance(latest, RequestOutput):
            latest = unread.followed_by(latest)
        self._latest = latest
        self._news.set()

    async def get(self) -> Output:
        """Wait for the next output. Raises the error that ended the request."""
        await self._news.wait()
        self._news.clear()
        if isinstance(self._latest, JPagedError):
            raise self._latest
        return self._latest
