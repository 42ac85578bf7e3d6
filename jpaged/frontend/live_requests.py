"""The requests of an engine's thread, and the way of their outputs to the event loops of their readers.

Called by: `EngineLoop`, `EngineTurns` and `PauseControl`, on the engine's thread. Other threads only read its size.
Owns: the stream of each request, the tokens that no reader has yet, and the requests that wait outside of the engine
because it is paused.
Never: runs a step, or waits for a reader.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from jpaged.engine.engine import Engine, Output
from jpaged.engine.output.token_sink import TokenSink
from jpaged.errors import CapacityError, EngineError, JPagedError, RequestError
from jpaged.frontend.commands import Add
from jpaged.frontend.output_stream import Reader


class LiveRequests:
    """Requests that wait or run.

    live: streams of all requests, by request id.
    held: requests that arrived while the engine is paused, or an update of the weights waits, by request id. The engine
          does not know them.
    is_held_for_update: an update of the weights waits.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self.live: dict[str, Any] = {}
        self.held: dict[str, Add] = {}
        self.is_held_for_update = False
        self._sinks: dict[Reader, TokenSink] = {}  # of readers in other processes

    def begin(self, add: Add, *, hold: bool) -> None:
        """Add a request whose room in the queue is checked. hold: do not add it to the engine yet."""
        request_id, reader = add.request_group.request_id, add.stream.reader
        if request_id in self.live:  # two front ends may choose the same id
            error = RequestError("request_id", request_id, "is in use by a running request: choose another")
            self._post(reader, [(add.stream, error)])
            return
        self.live[request_id] = add.stream
        if add.stream.takes_tokens and add.request_group.is_plain:
            sink = self._sinks.setdefault(reader, TokenSink())
            group = dataclasses.replace(add.request_group, sink=sink, number=add.stream.number)
            add = dataclasses.replace(add, request_group=group)
        if hold or self.is_held_for_update:
            self.held[request_id] = add
        else:
            self._add(add)

    def add_held(self) -> None:
        """Add the held requests to the engine, unless an update of the weights waits."""
        for request_id in () if self.is_held_for_update else tuple(self.held):
            if add := self.held.pop(request_id, None):  # None: `post` found its event loop closed
                self._add(add)

    def abort(self, request_id: str) -> None:
        """End a request. An id that is not in use is ignored."""
        if held := self.held.pop(request_id, None):
            self._add(held)
        self.post((output.request_id, output) for output in self._engine.abort([request_id]))

    def abort_all(self) -> None:
        """End all requests that the engine has: all but the held ones."""
        running = [request_id for request_id in self.live if request_id not in self.held]
        self.post((output.request_id, output) for output in self._engine.abort(running))

    def _add(self, add: Add) -> None:
        try:
            self._engine.add(add.request_group)
        except (RequestError, CapacityError, EngineError) as error:  # concerns this request only
            self.post([(add.request_group.request_id, error)])

    def stop(self, request_id: str, index: int, num_tokens: int) -> None:
        """End an answer whose text has ended; see `Engine.stop`."""
        self.post((output.request_id, output) for output in self._engine.stop(request_id, index, num_tokens))

    def post(self, results: Iterable[tuple[str, Output | JPagedError]]) -> None:
        """Send outputs and errors, each with its request id, to their streams. Makes one call per reader."""
        by_reader: dict[Reader, list[tuple[Any, Output | JPagedError]]] = defaultdict(list)
        for request_id, result in results:
            stream = self.live[request_id]
            if isinstance(result, JPagedError) or result.finished:
                del self.live[request_id]
            by_reader[stream.reader].append((stream, result))
        for reader, pairs in by_reader.items():
            self._post(reader, pairs)

    def post_tokens(self) -> None:
        """Send the tokens of the last step to the readers that have had no output since."""
        for reader in tuple(self._sinks):
            self._post(reader, ())

    def _post(self, reader: Reader, pairs: Sequence[tuple[Any, Output | JPagedError]]) -> None:
        sink = self._sinks.get(reader)
        tokens = ((), ()) if sink is None else sink.take()
        if not (pairs or tokens[0]):
            return
        try:
            reader.post(pairs, tokens)
        except RuntimeError:  # the reader is gone: its loop is closed, or its process has ended
            gone = [request_id for request_id, stream in self.live.items() if stream.reader == reader]
            self._engine.abort(gone)
            for request_id in gone:
                del self.live[request_id]
                self.held.pop(request_id, None)
            self._sinks.pop(reader, None)
