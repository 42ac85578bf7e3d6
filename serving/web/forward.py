"""Hands a request to another front end, and its answer back: for what one front end keeps for all of them.

The first front end keeps stored responses, files and batches: it is the keeper. It listens on a Unix socket in a folder
that only its user may open. `Forward` is the ASGI application of the others for these routes, and `ForwardedClient`
wraps the keeper's.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable
from http import HTTPStatus

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpaged.serving.web.error_responses import APIError, ClientDisconnected
from jpaged.serving.web.request_context import current

CLIENT = b"x-jpaged-client"  # header from one front end to another: host and port of the client
# Headers of one connection only, and those that both front ends' observers set.
NOT_FORWARDED = {b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"expect", b"upgrade", CLIENT}
NOT_RETURNED = NOT_FORWARDED - {b"content-length"} | {b"x-request-id", b"request-id", b"date", b"server"}
PIECE = 2**16  # bytes that are read at a time

logger = logging.getLogger("jpaged.serving")

Headers = list[tuple[bytes, bytes]]


class Forward:
    """An ASGI application. A request that the keeper cannot answer, because it is starting again, gets 503."""

    def __init__(self, path: str):
        """path: of the keeper's socket."""
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError:
            raise _restarting() from None
        try:
            await self._exchange(scope, receive, send, reader, writer)
        finally:
            writer.close()

    async def _exchange(
        self, scope: Scope, receive: Receive, send: Send, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:  # fmt: skip
        answer = _Answer(has_body=scope["method"] != "HEAD")
        answer.parser = parser = httptools.HttpResponseParser(answer)
        try:
            writer.write(_head(scope))
            async for piece in _body(receive):
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        except OSError:
            raise _restarting() from None
        gone = asyncio.create_task(_disconnected(receive))
        try:
            while not answer.is_complete:
                read = asyncio.create_task(reader.read(PIECE))
                await asyncio.wait({read, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not read.done():  # the client is gone: closing the connection tells the keeper
                    read.cancel()
                    if answer.is_started:
                        return
                    raise ClientDisconnected
                data = read.result()
                if not data:
                    if answer.is_started:  # the client's connection ends before the answer does
                        logger.error("the front end that keeps responses has ended in the middle of an answer")
                        return
                    raise _restarting()
                parser.feed_data(data)
                for message in answer.take():
                    await send(message)
        finally:
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await gone


class _Answer:
    """Turns the parser's calls into ASGI messages."""

    def __init__(self, *, has_body: bool) -> None:
        self.is_complete = self.is_started = False
        self._has_body = has_body
        self._headers: Headers = []
        self._messages: list[Message] = []
        self.parser: httptools.HttpResponseParser | None = None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        if (lower := name.lower()) not in NOT_RETURNED:
            self._headers.append((lower, value))

    def on_headers_complete(self) -> None:
        """Start the answer."""
        self.is_started = True
        assert self.parser is not None
        status = self.parser.get_status_code()
        self._messages.append({"type": "http.response.start", "status": status, "headers": self._headers})
        if not self._has_body:
            self.on_message_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._messages.append({"type": "http.response.body", "body": body, "more_body": True})

    def on_message_complete(self) -> None:
        """End the answer."""
        self.is_complete = True
        self._messages.append({"type": "http.response.body", "body": b"", "more_body": False})

    def take(self) -> Iterable[Message]:
        """Return the messages since the last call."""
        messages, self._messages = self._messages, []
        return messages


class ForwardedClient:
    """ASGI middleware of the keeper: the client of a forwarded request is the one that sent it first."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request of another front end."""
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            host, _, port = headers.get(CLIENT, b"").decode("latin-1").rpartition(" ")
            scope = {**scope, "client": (host, int(port or 0))}
            scope["headers"] = [(name, value) for name, value in scope["headers"] if name != CLIENT]
        await self._app(scope, receive, send)


def _head(scope: Scope) -> bytes:
    """The first lines of a request. The body is chunked, because it may have been read and changed."""
    target = scope.get("raw_path") or scope["path"].encode()
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    context = current.get()
    host, port = scope.get("client") or ("", 0)
    headers: Headers = [(name, value) for name, value in scope["headers"] if name not in NOT_FORWARDED]
    if context is not None:
        headers = [(name, value) for name, value in headers if name != b"x-request-id"]
        headers.append((b"x-request-id", context.request_id.encode()))
    headers += [(CLIENT, f"{host} {port}".encode()), (b"transfer-encoding", b"chunked"), (b"connection", b"close")]
    lines = [scope["method"].encode() + b" " + target + b" HTTP/1.1", *(b"%b: %b" % header for header in headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    """The pieces of a request's body. Raises ClientDisconnected."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body"):
            return


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _restarting() -> APIError:
    message = "the front end that keeps responses, files and batches is starting again: try again in a few seconds"
    return APIError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="restarting")
