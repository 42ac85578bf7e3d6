"""An application served over HTTP from a thread."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator

import uvicorn

from jpaged.serving.web.connection import ConnectionLimits, bounded_connection


@contextlib.contextmanager
def running(app, limits: ConnectionLimits | None = None, *, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Run an application in a thread. Yields its base URL."""
    with socket.create_server(("127.0.0.1", 0)) as address:
        http = bounded_connection(limits)
        made = None if tls is None else lambda *_: tls
        config = uvicorn.Config(
            app, http=http, log_level="warning", timeout_graceful_shutdown=1, ssl_context_factory=made
        )
        server = uvicorn.Server(config)

        def serve() -> None:
            with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:  # the loop that `jpaged serve` uses
                runner.run(server.serve(sockets=[address]))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"{'http' if tls is None else 'https'}://127.0.0.1:{address.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=10)
