"""Carries the outputs of one request from the engine's thread to its reader on an event loop."""

import asyncio

from jpaged.engine.engine import Output
from jpaged.errors import JPagedError
from jpaged.outputs import RequestOutput


class OutputStream:
    """Holds the latest output of one request until its reader gets it.

    loop:   the reader's event loop.
    deltas: each output has only the new part. An unread output is joined with the next one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, deltas: bool = False):
        self.loop = loop
        self.deltas = deltas
        self.aborted = False  # the caller aborted the request before its prompt was tokenised
        self._unread: Output | JPagedError | None = None
        self._reader: asyncio.Future[None] | None = None  # the reader awaits it; takes half the time of asyncio.Event

    def put(self, latest: Output | JPagedError) -> None:
        """Store an output, or the error that ended the request. Called on the event loop."""
        unread = self._unread
        if self.deltas and isinstance(unread, RequestOutput) and isinstance(latest, RequestOutput):
            latest = unread.followed_by(latest)
        self._unread = latest
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Output:
        """Wait for the next output. Raises the error that ended the request. There is one reader."""
        if self._unread is None:
            self._reader = self.loop.create_future()
            await self._reader
        latest, self._unread, self._reader = self._unread, None, None
        assert latest is not None
        if isinstance(latest, JPagedError):
            raise latest
        return latest
