"""One HTTP connection: uvicorn's, with limits on bytes, time and connections, and support for half-closed clients.

httptools has no limit on a header. It copies a growing header with each piece, which takes quadratic time.
"""

import asyncio
import dataclasses
import select
import socket
import uuid
from collections import Counter, deque
from http import HTTPStatus
from typing import Any, cast

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from jpaged.serving.web.address import address_key
from jpaged.serving.web.lingering import LingeringTransport

MAX_HEAD_BYTES = 65_536  # of a request line with its headers; and between two pieces of a body, for chunk headers
MAX_PIPELINED = 16  # requests of a connection that wait for the answers to earlier ones
PIECE = 16_384  # bytes parsed before they are counted
MAX_UNSENT = 65_536  # bytes of an answer in the kernel that are not sent: more of them wait here, where they are seen
PROBE_SECONDS = 0.05  # between two checks of a client that may have left
LEFT = getattr(select, "POLLRDHUP", 0)  # the client has closed its sending side; Linux only


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections. Beyond them a connection is closed.

    head_seconds: from the connection, or from the first byte of a request, to the end of its headers.
    body_seconds: from there to the end of the request's body.
    read_seconds: until a client that has stopped reading its answer must read again. A slow one is not cut.
    per_address:  open connections of one client address: IPv4, or the first 64 bits of IPv6.
    """

    head_seconds: float = 20.0
    body_seconds: float = 120.0
    read_seconds: float = 15.0
    per_address: int = 1_024


def bounded_connection(limits: ConnectionLimits | None = None) -> type[asyncio.Protocol]:
    """Return the protocol class for `uvicorn.Config(http=...)`. Its connections share one count for each address."""
    limits, counts = limits or ConnectionLimits(), Counter()

    def make(*args: Any, **kwargs: Any) -> BoundedConnection:
        return BoundedConnection(limits, counts, *args, **kwargs)

    return cast(type[asyncio.Protocol], make)


class _BadRequest(Exception):
    """A request that the parser accepts, and HTTP does not."""


class BoundedConnection(HttpToolsProtocol):
    """A connection that closes itself when its client is too slow, sends too much, or opens too many.

    A client that closes its sending side after a request still gets the answer. TCP does not show whether such a client
    still reads. So the server sends `100 Continue`, which clients ignore. If the client has closed the connection, its
    system answers with a reset, and the request is aborted.

    While a request waits for an earlier answer, reading is paused, which hides a disconnect. Then the socket is polled.
    """

    def __init__(self, limits: ConnectionLimits, counts: Counter[str], *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._counts = counts
        self._address: str | None = None  # counted in `counts`
        self._in_head = True
        self._bytes_without_body = 0      # received since the request began, or since the last piece of its body
        self._body: list[bytes] = []      # chunks that are not yet passed to the application
        self._open: list[RequestResponseCycle] = []  # requests without a whole answer, in their order
        self._at_end = False    # no more requests of this connection are read
        self._replays = False   # the head of a request is parsed again, without its Upgrade header
        self._questions = 0         # `100 Continue`s that were sent during this answer
        self._next_question = 0.0   # time of the event loop
        self._deadline: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(cast(asyncio.Transport, LingeringTransport(transport, self._in_request)))
        self._set_deadline(self._limits.head_seconds)
        if self.client is None:
            return
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # else the kernel takes megabytes: 10,000 tokens of a stream
            option = self.transport.get_extra_info("socket")
            option.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT)
        address = address_key(self.client[0])
        if self._counts[address] >= self._limits.per_address:
            self._refuse(503, "too many connections from this address: close some", linger=False)
            return
        self._counts[address] += 1
        self._address = address

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop(self._open)  # uvicorn notifies only the last request
        self._clear_deadline()
        self._lingering().forget()
        for timer in (self._probe, self._unread):
            if timer is not None:
                timer.cancel()
        self._probe = self._unread = None
        if self._address is not None:
            self._counts[self._address] -= 1
            if not self._counts[self._address]:
                del self._counts[self._address]
            self._address = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        for start in range(0, len(data), PIECE):
            if self.transport.is_closing() or self._at_end:
                self._lingering().discard(len(data) - start)
                return
            piece = data[start : start + PIECE]
            self._bytes_without_body += len(piece)
            self._parse(piece)
            self._pass_body()
            if len(self.pipeline) > MAX_PIPELINED:
                self._refuse(400, f"more than {MAX_PIPELINED} requests of this connection wait for their answers")
                return
            if self._bytes_without_body > MAX_HEAD_BYTES:
                self._refuse(431, f"the headers have more than {MAX_HEAD_BYTES:,} bytes")
                return
        if self._in_head and self._bytes_without_body and self._deadline is None:  # line breaks before a request
            self._set_deadline(self._limits.head_seconds)

    def _parse(self, piece: bytes) -> None:
        try:
            while piece:
                piece = self._parse_until_upgrade(piece)
        except httptools.HttpParserError as error:
            cause = error.__context__  # of the callback that raised it
            message = str(cause) if isinstance(cause, _BadRequest) else "invalid HTTP request"
            self.logger.warning("Invalid HTTP request received.")
            if not self._end_requests():
                self._refuse(400, message)

    def _parse_until_upgrade(self, piece: bytes) -> bytes:
        """Parse up to the end of a head with an Upgrade header. Returns the rest."""
        assert self.parser is not None
        try:
            self.parser.feed_data(piece)
            return b""
        except httptools.HttpParserUpgrade as upgrade:
            rest = piece[upgrade.args[0] :]
        if self._has_body():
            self._parse_again()
        return rest

    def _parse_again(self) -> None:
        """Parse the body of a request with an Upgrade header. The parser skips it, because it expects a new protocol.

        The server never upgrades. Java's client asks for HTTP/2 with every first request of a connection.
        """
        self.parser = httptools.HttpRequestParser(self)
        framing = {b"content-length", b"transfer-encoding"}
        lines = [name + b": " + value + b"\r\n" for name, value in self.headers if name in framing]
        self._replays = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(lines) + b"\r\n")
        self._replays = False

    def _has_body(self) -> bool:
        return not {b"content-length", b"transfer-encoding"}.isdisjoint(name for name, _ in self.headers)

    def on_message_begin(self) -> None:
        if self._replays:
            return
        self._in_head = True
        self._set_deadline(self._limits.head_seconds)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head and not self._replays:  # not a trailer of a chunked body
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._replays:
            return
        if len(self.pipeline) > MAX_PIPELINED:
            return  # the connection is closed after this piece
        assert self.parser is not None
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):  # RFC 9112, section 3.2
            raise _BadRequest(f"invalid HTTP request: it has {hosts} Host headers, not one")
        super().on_headers_complete()
        self._in_head = False
        self._set_deadline(self._limits.body_seconds)
        self._open.append(self.cycle)
        if self.pipeline and self._probe is None:
            self._probe = self.loop.call_later(PROBE_SECONDS, self._check_client)

    def on_body(self, body: bytes) -> None:
        self._bytes_without_body = 0
        self._body.append(body)

    def _pass_body(self) -> None:
        """Pass all received chunks to the application at once: a million chunks of one byte took seconds."""
        if self._body:
            body = b"".join(self._body)
            self._body.clear()
            super().on_body(body)

    def on_message_complete(self) -> None:
        assert self.parser is not None
        if self.parser.should_upgrade() and self._has_body():
            return  # its body is still to come
        self._pass_body()
        self._in_head = True
        self._bytes_without_body = 0
        self._clear_deadline()
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():  # an error was sent before
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def eof_received(self) -> Any:
        """Keep a half-closed connection open while its requests are answered. HTTP/1.0 has no `100 Continue`."""
        old = any(cycle.scope["http_version"] != "1.1" for cycle in self._open)
        if self._lingering().is_closing() or old or not self._end_requests():
            return None
        self._check_client()
        return True

    def _end_requests(self) -> bool:
        """Read no further requests. Returns False if no whole request waits for its answer."""
        whole = [cycle for cycle in self._open if not cycle.more_body]
        if not whole:
            return False
        self._at_end = True
        whole[-1].keep_alive = False
        self._clear_deadline()
        self._drop([cycle for cycle in self._open if cycle.more_body])
        return True

    def _drop(self, cycles: list[RequestResponseCycle]) -> None:
        """Mark requests as disconnected. They get no answer."""
        for cycle in cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        self._open = [cycle for cycle in self._open if cycle not in cycles]
        self.pipeline = deque(waiting for waiting in self.pipeline if waiting[0] not in cycles)

    def _check_client(self) -> None:
        """Close the connection if the client has reset it. Repeats every PROBE_SECONDS."""
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None
        if self.transport.is_closing() or not (self._at_end or self.pipeline):
            return
        watch = select.poll()
        watch.register(self.transport.get_extra_info("socket").fileno(), LEFT | select.POLLIN)
        unread = False
        for _, event in watch.poll(0):
            if event & ~(LEFT | select.POLLIN):  # an error or a hang-up of both sides: poll always reports these
                self.transport.abort()
                return
            unread = True  # bytes, or the client's end of sending, perhaps after bytes
        if unread or self._at_end:
            self._ask_client()
        self._probe = self.loop.call_later(PROBE_SECONDS, self._check_client)

    def _ask_client(self) -> None:
        """Send `100 Continue` after 0, 1, 3, 7 seconds and so on. A client that has closed the connection resets it."""
        first = self._open[0] if self._open else None
        if first is None or first.response_started or first.scope["http_version"] != "1.1":
            return
        if self.loop.time() >= self._next_question:
            self._next_question = self.loop.time() + 2.0**self._questions
            self._questions += 1
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def pause_writing(self) -> None:
        """Called by the transport when its buffer is full, because the client does not read."""
        self._watch_reader()
        super().pause_writing()

    def _watch_reader(self, before: int | None = None) -> None:
        """Close the connection if the client reads nothing. before: unsent bytes, `read_seconds` ago."""
        unsent = self.transport.get_write_buffer_size()
        if before is not None and unsent >= before:
            seconds = self._limits.read_seconds
            self.logger.warning("a client has read nothing for %g s: its connection is closed", seconds)
            self.transport.abort()
            return
        self._unread = self.loop.call_later(self._limits.read_seconds, self._watch_reader, unsent)

    def resume_writing(self) -> None:
        """Called by the transport when its buffer has room again."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def shutdown(self) -> None:
        """Called when the server stops. Pipelined requests that wait are dropped."""
        self._drop([cycle for cycle, _ in self.pipeline])
        if self._open:
            self._open[0].keep_alive = False
        else:
            self._lingering().close_now()

    def on_response_complete(self) -> None:
        self._questions, self._next_question = 0, 0.0
        if not self._in_head and self.cycle.response_complete:  # an error was sent before the end of the body
            self._set_deadline(self._limits.head_seconds)
        self._open = [cycle for cycle in self._open if not cycle.response_complete]
        super().on_response_complete()

    def _set_deadline(self, seconds: float) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(seconds, self._too_slow)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        cycle = self.cycle
        if self.pipeline or (cycle is not None and not cycle.response_complete and not cycle.more_body):
            self._set_deadline(self._limits.head_seconds)  # an earlier request of the connection still runs
            return
        self._refuse(408, "the request took too long to arrive")

    def _refuse(self, status: int, message: str, *, linger: bool = True) -> None:
        """Close the connection. First send an error, unless clients would take it for an earlier request's answer."""
        if self.transport.is_closing():
            return
        earlier = [cycle for cycle in self._open if self._in_head or cycle is not self.cycle]
        if not earlier and (self._in_head or not self.cycle.response_started):
            self.transport.write(_error(status, message))
        self._drop(self._open)
        if linger:
            self._lingering().linger()
        else:
            self._lingering().close_now()

    def _in_request(self) -> bool:
        return not self._in_head

    def _lingering(self) -> LingeringTransport:
        return cast(LingeringTransport, self.transport)


def _error(status: int, message: str) -> bytes:
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": None}})
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
    head += f"x-request-id: {uuid.uuid4().hex}\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
