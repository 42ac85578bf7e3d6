"""HTTP/1.1 connections of the load client: one POST at a time, kept open between requests.

The parser is httptools, as in the server. A general HTTP client would cost more than the server that it measures: see
"Load client" in docs/decisions.md.
"""

import asyncio
import dataclasses
import ssl
import urllib.parse
from collections.abc import Callable, Mapping
from contextlib import suppress

import httptools

from jpaged.errors import JPagedError, RequestError

MAX_ERROR_BYTES = 2_000  # kept bytes of an error's body
REFUSED = 300            # lowest status that is an error


class LoadError(JPagedError):
    """A request failed: no connection, an error, or an answer that cannot be read."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A URL that requests are posted to."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def parse(
        cls, url: str, *, tls: ssl.SSLContext | None = None, headers: Mapping[str, str] | None = None
    ) -> "Endpoint":
        """Parse a URL. tls: for https; None trusts the system's certificates. Raises RequestError."""
        parts = urllib.parse.urlsplit(url)
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or not port:
            raise RequestError("base_url", url, "must be like http://127.0.0.1:8000")
        tls = None if parts.scheme == "http" else tls or ssl.create_default_context()
        for name, value in (headers or {}).items():
            if not (name.isascii() and name.isprintable() and value.isascii() and value.isprintable()):
                raise RequestError("header", f"{name}=...", "must have only printable ASCII characters")
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        return cls(parts.hostname, port, path or "/", tls, dict(headers or {}))

    def head(self, length: int, extra: Mapping[str, str]) -> bytes:
        """Return the request line and the headers for a body of `length` bytes."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        fields = {
            "host": f"{host}:{self.port}", "content-type": "application/json", "content-length": str(length),
            "accept": "*/*", **self.headers, **extra,
        }  # fmt: skip
        lines = [f"POST {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


class Connection(asyncio.Protocol):
    """One connection. Calls a callback with body data as they arrive, in the event loop."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._on_data: Callable[[bytes], None] | None = None
        self._done: asyncio.Future[None] | None = None
        self._answered = False
        self._error = bytearray()

    @property
    def answered(self) -> bool:
        """True if any byte of the current request's answer has arrived."""
        return self._answered

    async def post(self, head: bytes, body: bytes, on_data: Callable[[bytes], None]) -> None:
        """Send a request, and return at the end of its answer. on_data: called with body bytes, unless it is an error.

        Raises LoadError. Cancelling the call closes the connection.
        """
        assert self._transport is not None
        self._on_data, self._answered, self._error = on_data, False, bytearray()
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(head + body)
        try:
            await self._done
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._done = self._on_data = None

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True

    def data_received(self, data: bytes) -> None:
        self._answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            # An exception in on_data is the context of the parser's error.
            self._fail(str(error.__context__ or f"the answer is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the server closed the connection{f' ({exc})' if exc else ''}")

    # -- httptools' callbacks

    def on_body(self, data: bytes) -> None:
        if self._parser.get_status_code() >= REFUSED:
            self._error += data[: MAX_ERROR_BYTES - len(self._error)]
        elif self._on_data is not None:
            self._on_data(data)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        if self._done is None or self._done.done():
            return
        if status >= REFUSED:
            self._done.set_exception(LoadError(f"status {status}: {self._error.decode(errors='replace')}"))
        else:
            self._done.set_result(None)

    def _fail(self, why: str) -> None:
        self.close()
        if self._done is not None and not self._done.done():
            self._done.set_exception(LoadError(why))


class ConnectionPool:
    """Connections to one endpoint. Idle connections are reused."""

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint
        self._idle: list[Connection] = []

    async def post(self, body: bytes, on_data: Callable[[bytes], None], headers: Mapping[str, str]) -> None:
        """Post a body. Raises LoadError.

        The server may close an idle connection at any time. If a reused connection fails before any byte of the answer,
        the request is sent again over another one.
        """
        head = self.endpoint.head(len(body), headers)
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_open:
                continue
            try:
                await self._post(connection, head, body, on_data)
                return
            except LoadError:
                if connection.answered:
                    raise
        await self._post(await self._connect(), head, body, on_data)

    async def _post(self, connection: Connection, head: bytes, body: bytes, on_data: Callable[[bytes], None]) -> None:
        try:
            await connection.post(head, body, on_data)
        finally:
            if connection.is_open:
                self._idle.append(connection)

    async def _connect(self) -> Connection:
        loop, to = asyncio.get_running_loop(), self.endpoint
        try:
            _, connection = await loop.create_connection(Connection, to.host, to.port, ssl=to.tls)
        except OSError as error:
            raise LoadError(f"cannot connect to {to.host}:{to.port}: {error.strerror or error}") from None
        return connection

    def close(self) -> None:
        for connection in self._idle:
            with suppress(OSError):
                connection.close()
        self._idle.clear()
