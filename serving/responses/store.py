"""Stored responses, and responses that run in the background. They are in memory only."""

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import AsyncGenerator, Coroutine
from http import HTTPStatus
from typing import Any

from jpaged.errors import CapacityError, shown
from jpaged.serving.web.error_responses import APIError

# A conversation of 8,192 tokens has about 64 KiB of JSON, so this is enough for about 4,000 of them.
MAX_BYTES = 256 * 2**20
MAX_RESPONSES = 16_384  # an entry takes about 1 KiB in addition to its JSON: 16 MiB for all
MAX_RUNNING = 256  # responses in the background: the default number of rows of an engine


class EventLog:
    """The events of a response in the background, encoded. Streams read them while it runs, and after it has ended."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._changed = asyncio.Event()  # set, and replaced, when an event comes or the log ends
        self._ended = False
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: bytes) -> None:
        """Append an event."""
        self._events.append(event)
        self.num_bytes += len(event)
        self._wake()

    def end(self) -> None:
        """End the log, and all streams that read it."""
        self._ended = True
        self._wake()

    def has_more(self, start: int) -> bool:
        """Return False if there will be no event with the sequence number `start`, or a later one."""
        return start < len(self._events) or not self._ended

    async def events(self, start: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield the events from the sequence number `start` on, until the log ends."""
        while self.has_more(start):
            if start < len(self._events):
                yield self._events[start]
                start += 1
            else:
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclasses.dataclass(slots=True)
class StoredResponse:
    """A response as JSON.

    response:     the object that clients retrieve.
    conversation: a list of all input items, with those of earlier responses.
    events:       of a response in the background; None for others.
    task:         generates the response in the background; None if there is none, or it has ended.
    """

    response: bytes
    conversation: bytes
    status: str
    events: EventLog | None = None
    task: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        """Number of bytes."""
        events = 0 if self.events is None else self.events.num_bytes
        return len(self.response) + len(self.conversation) + events


@dataclasses.dataclass(slots=True)
class _Shelf:
    """The responses of one key that have ended, least recently used first, and their bytes."""

    responses: OrderedDict[str, StoredResponse] = dataclasses.field(default_factory=OrderedDict)
    num_bytes: int = 0


class ResponseStore:
    """Responses by the key that made them and by id.

    When it is full, the key with the most bytes loses its least recently used response. Responses that still run are
    never removed: a new one is refused if `max_running` run, or if they would have more than half of the bytes.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, max_responses: int = MAX_RESPONSES, max_running: int = MAX_RUNNING):
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._max_running = max_running
        self._shelves: dict[bytes, _Shelf] = {}
        self._running: dict[tuple[bytes, str], StoredResponse] = {}
        self.num_bytes = 0      # of all responses that have ended
        self.num_responses = 0  # that have ended

    def put(self, owner: bytes, response_id: str, stored: StoredResponse) -> None:
        """Store a response that has ended. One that is larger than the whole store is dropped."""
        self._running.pop((owner, response_id), None)
        stored.task = None
        if stored.size > self._max_bytes:
            return
        shelf = self._shelves.setdefault(owner, _Shelf())
        shelf.responses[response_id] = stored
        shelf.num_bytes += stored.size
        self.num_bytes += stored.size
        self.num_responses += 1
        while self.num_bytes > self._max_bytes or self.num_responses > self._max_responses:
            largest = max(self._shelves, key=lambda one: self._shelves[one].num_bytes)
            self._remove(largest, next(iter(self._shelves[largest].responses)))

    def start(self, owner: bytes, response_id: str, stored: StoredResponse, work: Coroutine[Any, Any, None]) -> None:
        """Run a response in the background. Raises CapacityError if too many run."""
        held = sum(one.size for one in self._running.values())
        if len(self._running) >= self._max_running or held + stored.size > self._max_bytes // 2:
            work.close()
            said = f"{len(self._running)} responses run in the background, with {held:,} bytes of conversations"
            raise CapacityError(f"{said}: send the request later, or without background")
        self._running[owner, response_id] = stored
        stored.task = asyncio.create_task(work)

    def forget(self, owner: bytes, response_id: str) -> None:
        """Remove a background response whose request the engine refused."""
        del self._running[owner, response_id]

    def get(self, owner: bytes, response_id: str) -> StoredResponse:
        """Return a response. Raises APIError 404 if this key has none of that id."""
        running = self._running.get((owner, response_id))
        if running is not None:
            return running
        shelf = self._shelves.get(owner)
        if shelf is None or response_id not in shelf.responses:
            said = "no such response: it was deleted, dropped for newer ones, or never stored"
            message = f"{said} (id={shown(response_id)})"
            raise APIError(HTTPStatus.NOT_FOUND, message, param="response_id", code="response_not_found")
        shelf.responses.move_to_end(response_id)
        return shelf.responses[response_id]

    async def delete(self, owner: bytes, response_id: str) -> None:
        """Remove a response. If it runs, it is cancelled first. Raises APIError 404."""
        await self.cancel(self.get(owner, response_id))
        self._remove(owner, response_id)

    async def cancel(self, stored: StoredResponse) -> None:
        """Cancel the background task of a response, and wait until it has stored its result."""
        if stored.task is not None:
            stored.task.cancel()
            await asyncio.wait({stored.task})

    async def close(self) -> None:
        """Cancel all background tasks."""
        tasks = [one.task for one in self._running.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _remove(self, owner: bytes, response_id: str) -> None:
        shelf = self._shelves.get(owner, _Shelf())
        stored = shelf.responses.pop(response_id, None)
        if stored is None:  # dropped for newer ones
            return
        shelf.num_bytes -= stored.size
        self.num_bytes -= stored.size
        self.num_responses -= 1
        if not shelf.responses:
            del self._shelves[owner]
