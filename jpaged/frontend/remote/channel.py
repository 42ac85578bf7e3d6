"""Carries frames between the engine's process and a front end, over a pair of Unix sockets.

Called by: `host` and `remote_engine`.
Owns: what has not been sent yet.
Never: waits. A process that does not read is cut off when `MAX_UNSENT` bytes wait for it.
"""

import asyncio
import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable

from jpaged.frontend.remote.messages import FrameReader

logger = logging.getLogger(__name__)

MAX_UNSENT = 64 * 2**20  # bytes: a front end takes 2 MB/s with 256 streams that have log-probabilities


class Channel(asyncio.Protocol):
    """One side. Any thread may send. Frames arrive on the event loop."""

    def __init__(
        self, sock: socket.socket, receive: Callable[[int, bytes], None], ended: Callable[[], None],
        frames: FrameReader | None = None,
    ):  # fmt: skip
        """Make a channel that `open` opens.

        receive: takes the kind and the content of a frame. ended: called once, when the other side is gone.
        frames:  has what was read from the socket before; None: nothing was.
        """
        sock.setblocking(False)
        self._sock = sock.dup()  # to send from any thread: the event loop's transport reads from the other one
        self._sock.setblocking(False)
        self._reading = sock
        self._receive, self._ended = receive, ended
        self._frames = FrameReader() if frames is None else frames
        self._lock = threading.Lock()  # guards what follows
        self._unsent: deque[memoryview] = deque()
        self._num_unsent = 0
        self._is_open = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: asyncio.BaseTransport | None = None

    async def open(self) -> None:
        """Begin to read, on this event loop."""
        self._loop = asyncio.get_running_loop()
        self._transport, _ = await self._loop.create_unix_connection(lambda: self, sock=self._reading)
        with self._lock:
            if self._unsent:
                self._loop.add_writer(self._sock.fileno(), self._flush)
        self.data_received(b"")  # frames that were read before

    @property
    def is_open(self) -> bool:
        """False once the other side is gone, or was cut off."""
        return self._is_open

    def send(self, data: bytes) -> None:
        """Send frames, at once if the other side reads, or later. Raises RuntimeError if the other side is gone."""
        with self._lock:
            if not self._is_open:
                raise RuntimeError("the other process is gone")
            if not self._unsent:
                data_left = self._send_now(memoryview(data))
                if not data_left:
                    return
            else:
                data_left = memoryview(data)
            self._unsent.append(data_left)
            self._num_unsent += len(data_left)
            if self._num_unsent > MAX_UNSENT:
                logger.error("a process reads nothing: it is cut off with %d bytes unsent", self._num_unsent)
                self._is_open = False
            is_first = len(self._unsent) == 1
        if self._loop is not None and (is_first or not self._is_open):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._watch if self._is_open else self.close)

    def close(self) -> None:
        """End the connection. Called on the event loop."""
        if self._transport is not None:
            self._transport.close()
        self._end()

    def close_from_any_thread(self) -> None:
        """End the connection soon."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self.close)

    def _send_now(self, data: memoryview) -> memoryview:
        """Send what the socket takes. Returns the rest."""
        try:
            while data:
                data = data[self._sock.send(data) :]
        except BlockingIOError:
            pass
        except OSError:  # the event loop notices the end, and calls `connection_lost`
            return memoryview(b"")
        return data

    def _watch(self) -> None:
        with self._lock:
            if self._unsent and self._is_open and self._loop is not None:
                self._loop.add_writer(self._sock.fileno(), self._flush)

    def _flush(self) -> None:
        with self._lock:
            while self._unsent:
                rest = self._send_now(self._unsent[0])
                self._num_unsent -= len(self._unsent[0]) - len(rest)
                if rest:
                    self._unsent[0] = rest
                    return
                self._unsent.popleft()
            if self._loop is not None:
                self._loop.remove_writer(self._sock.fileno())

    def _end(self) -> None:
        with self._lock:
            self._is_open = False
            fileno = self._sock.fileno()
            if fileno < 0:
                return
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):
                    self._loop.remove_writer(fileno)
            self._sock.close()
        self._ended()

    # -- asyncio.Protocol -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Hand on the frames that are complete."""
        try:
            for kind, content in self._frames.feed(data):
                self._receive(kind, content)
        except Exception:  # a bug, or a front end that a stranger has taken over: its requests end
            logger.exception("a process sent what cannot be read: it is cut off")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the other process is gone."""
        self._end()
