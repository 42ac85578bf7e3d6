"""The engine's side: adds the requests of front ends, and sends them the outputs.

Called by: the engine's process, on its event loop. `RemoteReader.post` runs on the engine's thread.
Owns: which request belongs to which front end.
Never: makes text, or waits for a front end.

A front end that ends loses its requests: they are aborted at once, and their blocks are free.
"""

import asyncio
import contextlib
import dataclasses
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

from jpaged.engine.engine import Output
from jpaged.errors import EngineError, JPagedError
from jpaged.frontend.output_stream import Results as StreamResults
from jpaged.frontend.output_stream import Tokens
from jpaged.frontend.remote.board import HostBoard
from jpaged.frontend.remote.channel import Channel
from jpaged.frontend.remote.hosted import Hosted
from jpaged.frontend.remote.messages import (
    MESSAGE,
    Abort,
    Answer,
    Begin,
    Call,
    Draining,
    Fatal,
    Reported,
    Results,
    Stop,
    frame,
    message_of_front_end,
    portable,
    token_frame,
)
from jpaged.frontend.remote.questions import answer_questions, failed
from jpaged.frontend.remote.welcome import CALLS, Welcome
from jpaged.requester import current_client

logger = logging.getLogger(__name__)


class RemoteReader:
    """The streams of a front end, as the engine's thread sees them."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.streams: dict[int, _Stream] = {}  # requests that have not ended, by number

    def post(self, results: StreamResults, tokens: Tokens) -> None:
        """Send the results of a step in one message. Raises RuntimeError if the front end is gone."""
        assert self.channel is not None
        data = token_frame(*tokens) if tokens[0] else b""
        for stream, result in results:
            if isinstance(result, JPagedError) or result.finished:
                self.streams.pop(stream.number, None)
        if results:
            data += frame(Results(tuple((stream.number, _sendable(result)) for stream, result in results)))
        self.channel.send(data)


def _sendable(result: Output | JPagedError) -> Output | JPagedError:
    return portable(result) if isinstance(result, JPagedError) else result


@dataclasses.dataclass(eq=False, slots=True)
class _Stream:
    """A request of a front end."""

    reader: RemoteReader
    number: int
    request_id: str
    takes_tokens: bool
    left: threading.Event = dataclasses.field(default_factory=threading.Event)  # the front end does not want it
    task: asyncio.Task[None] | None = None  # adds it; None once the engine has it


class FrontEndLink:
    """The engine's side of the connection to one front end."""

    def __init__(
        self, engine: Hosted, sock: socket.socket, questions: socket.socket, ended: Callable[[], None],
        board: HostBoard | None = None,
    ):  # fmt: skip
        """ended: called once, on the event loop, when the front end is gone and its requests are aborted.

        board: of all front ends. None: there is only this one.
        """
        self._board = board or HostBoard()
        self._to_front_end = self._send  # one object, by which the board knows this front end
        answer_questions(engine, questions)
        self._engine = engine
        self._ended = ended
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reader = RemoteReader()
        self._streams = self._reader.streams
        self._channel = self._reader.channel = Channel(sock, self._receive, self._gone)

    async def open(self) -> None:
        """Greet the front end, and take its requests."""
        self._channel.send(frame(Welcome.of(self._engine)))
        await self._channel.open()
        self._board.join(self._to_front_end)

    def tell_fatal(self, error: EngineError) -> None:
        """Tell the front end that the engine has ended. Any thread may call it."""
        with contextlib.suppress(RuntimeError):
            self._channel.send(frame(Fatal(portable(error))))

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def _receive(self, kind: int, content: bytes) -> None:
        if kind != MESSAGE:
            raise ValueError(f"a front end sent a frame of kind {kind}")
        match message_of_front_end(content):
            case Begin() as begin:
                stream = _Stream(self._reader, begin.number, begin.request_id, begin.takes_tokens)
                self._streams[begin.number] = stream
                stream.task = self._start(self._begin(begin, stream))
            case Abort(number):
                self._leave(number)
            case Stop(number, index, num_tokens):
                if stream := self._streams.get(number):
                    self._engine.stop_answer(stream.request_id, index, num_tokens)
            case Draining(draining):
                self._board.drain(draining)
            case Reported(identity, report):
                self._board.note_report(identity, report)
            case Call(identity, "reports"):
                self._start(self._reports(identity))
            case Call() as call:
                self._start(self._call(call))

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _begin(self, begin: Begin, stream: _Stream) -> None:
        current_client.set(begin.client)  # of this task
        try:
            await self._engine.submit(
                stream, begin.prompt, begin.params, begin.request_id, begin.priority, begin.refuse_cut,
                begin.lora_request, has_left=stream.left.is_set,
            )  # fmt: skip
        except JPagedError as error:
            self._refuse(begin, error)
        except Exception as error:
            logger.exception("request %s could not be added", begin.request_id)
            self._refuse(begin, EngineError(f"{type(error).__name__}: {error}"))
        else:
            stream.task = None
            self._send(Results(((begin.number, None),)))

    def _refuse(self, begin: Begin, error: JPagedError) -> None:
        self._streams.pop(begin.number, None)
        self._send(Results(((begin.number, portable(error)),)))

    def _leave(self, number: int) -> None:
        """Forget a request, and end it if it runs."""
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        stream.left.set()
        if stream.task is not None:
            stream.task.cancel()
        self._engine.abort_now(stream.request_id)

    async def _call(self, call: Call) -> None:
        try:
            if call.name not in CALLS:
                raise EngineError(f"a front end may not call {call.name}")
            method = getattr(self._engine, call.name)
            if CALLS[call.name]:
                value = await method(*call.arguments, **call.keywords)
            else:
                value = await asyncio.to_thread(method, *call.arguments, **call.keywords)
            answer = Answer(call.identity, value)
        except Exception as error:
            answer = failed(call, error)
        self._send(answer)

    async def _reports(self, identity: int) -> None:
        self._send(Answer(identity, await self._board.reports(self._to_front_end)))

    def _send(self, message: object) -> None:
        with contextlib.suppress(RuntimeError):  # the front end is gone: `_gone` follows
            self._channel.send(frame(message))

    def _gone(self) -> None:
        self._board.leave(self._to_front_end)
        for task in tuple(self._tasks):
            task.cancel()
        for number in tuple(self._streams):
            self._leave(number)
        self._ended()
