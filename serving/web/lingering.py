"""A transport that closes so that its client can still read the answer.

A server that closes while the client still sends makes TCP reset the connection. Then most clients lose the answer,
even when it has arrived. So the server closes its sending side first, and discards what it receives for a while.
"""

import asyncio
from collections.abc import Callable
from typing import Any

LINGER_SECONDS = 5.0
LINGER_BYTES = 32 * 2**20  # twice the largest body


class LingeringTransport:
    """The transport of a connection. While the client still sends a body, `close` lingers."""

    def __init__(self, transport: asyncio.Transport, sending: Callable[[], bool]):
        """Wrap a transport. sending: returns True while the client sends a body."""
        self._transport = transport
        self._sending = sending
        self._discarded = 0
        self._end: asyncio.TimerHandle | None = None
        self.write = transport.write  # called for every token: without a detour

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """True also while the transport lingers."""
        return self._end is not None or self._transport.is_closing()

    def linger(self) -> None:
        """Close the sending side, and close the rest when the client has, or after LINGER_SECONDS."""
        if self.is_closing():
            return
        if not self._transport.can_write_eof():  # TLS
            self._transport.close()
            return
        self._end = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._transport.abort)
        self._transport.write_eof()
        self._transport.resume_reading()

    def discard(self, size: int) -> None:
        """Count `size` received bytes that are not used. Closes the connection after LINGER_BYTES."""
        self._discarded += size
        if self._discarded > LINGER_BYTES:
            self._transport.abort()

    def close(self) -> None:
        """Close the connection after all written data is sent. A second call ends the lingering."""
        if self._end is None and self._sending():
            self.linger()
        else:
            self.close_now()

    def close_now(self) -> None:
        """Close the connection after all written data is sent, without lingering."""
        self.forget()
        self._transport.close()

    def forget(self) -> None:
        """Stop the timer. For a connection that has ended."""
        if self._end is not None:
            self._end.cancel()
            self._end = None
