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
        self._unread: Output | JPagedError | None = None
        self._reader: asyncio.Future[None] | None = None  # a reader waits for it: half the time of an asyncio.Event

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
