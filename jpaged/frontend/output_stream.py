"""Carries the outputs of one request from the engine's thread to its reader on an event loop."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from jpaged.engine.engine import Output
from jpaged.errors import JPagedError
from jpaged.outputs import RequestOutput

Tokens = tuple[Sequence[int], Sequence[int]]  # numbers of streams, and a token of each
Results = Sequence[tuple[Any, Output | JPagedError]]  # (stream, output or error)


class Reader(Protocol):
    """Reads several streams: an event loop, or the front end in another process. Hashable."""

    def post(self, results: Results, tokens: Tokens) -> None:
        """Take the results of a step; `tokens` come before them. Any thread may call it.

        Raises RuntimeError if the reader is gone.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class LoopReader:
    """The streams of an event loop."""

    loop: asyncio.AbstractEventLoop

    def post(self, results: Results, tokens: Tokens) -> None:
        """Put outputs and errors into their streams, with one call of the loop. There are no `tokens`."""
        self.loop.call_soon_threadsafe(put_all, results)


def put_all(results: Results) -> None:
    """Put outputs and errors into their streams. Called on the event loop of the streams."""
    for stream, result in results:
        stream.put(result)


class OutputStream:
    """Holds the latest output of one request until its reader gets it.

    loop:   the event loop of its reader.
    reader: reads all streams of that loop.
    deltas: each output has only the new part. An unread output is joined with the next one.
    takes_tokens: its reader makes the text, and wants nothing but the tokens of a plain stream until its end.
    """

    takes_tokens: ClassVar[bool] = False

    def __init__(self, loop: asyncio.AbstractEventLoop, *, deltas: bool = False):
        self.loop = loop
        self.reader = LoopReader(loop)
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
