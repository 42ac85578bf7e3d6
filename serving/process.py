"""The server's process: binds the address before the model loads, and serves until a signal."""

import faulthandler
import gc
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from jpaged.errors import EngineError, JPagedError
from jpaged.serving.connection import ConnectionLimits, bounded_connection

MAX_OPEN_FILES = 65_536
CLOSE_SECONDS = 2  # to answer the last requests and to close the engine, after the shutdown timeout


class AddressError(JPagedError):
    """The server cannot listen on the address."""


def take_address(host: str, port: int) -> socket.socket:
    """Bind a socket to host and port (0: any free port). Raises AddressError.

    The socket does not listen yet, so clients are refused until the model is ready. Binding early reports a port that
    is in use before the model loads.
    """
    if not 0 <= port <= 65535:
        raise AddressError(f"cannot listen on port {port}: --port takes 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise AddressError(f"cannot listen on {host}:{port} ({error.strerror or error}): try another --port") from None
    return bound


class StartingEngine(Protocol):
    """An engine whose programs may still be compiled."""

    @property
    def is_ready(self) -> bool:
        """Whether all programs exist."""
        ...

    def wait_until_ready(self) -> None:
        """Wait until all programs exist. Raises EngineError if one cannot be compiled."""
        ...


def _announce(url: str, engine: StartingEngine | None) -> None:
    """Print that the server is ready: now, or when all programs exist."""
    if engine is None or engine.is_ready:
        print(f"ready: {url}", flush=True)
        return
    print(f"serving: {url} (requests may wait while programs are compiled)", flush=True)

    def wait() -> None:
        with suppress(EngineError):  # the log has it
            engine.wait_until_ready()
            print(f"ready: {url}", flush=True)

    threading.Thread(target=wait, name="jpaged-ready", daemon=True).start()


class _Server(uvicorn.Server):
    """A uvicorn server that calls `ready` when it accepts requests, and ends with status 0 after SIGINT or SIGTERM."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]):
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            # The garbage collector need not visit again what lives as long as the server: modules, the model, programs.
            # Its full collections stopped every request for 180 ms, and take 1 ms without those objects.
            gc.collect()
            gc.freeze()
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        running = len(self.server_state.tasks)
        if running:
            limit = self.config.timeout_graceful_shutdown
            print(f"stopping: waits up to {limit} s for {running} running requests; Ctrl-C ends it now", flush=True)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop. If threads keep the process alive beyond its timeout, it ends hard and shows what they do.

        The timer of faulthandler is a thread in C: it ends the process also while Python's global lock is held.
        """
        if not self.should_exit:
            seconds = (self.config.timeout_graceful_shutdown or 0) + CLOSE_SECONDS
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        # A process started with SIGINT ignored keeps ignoring it: a shell ignores SIGINT in background processes.
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        handled = [signal.SIGTERM] if ignored else [signal.SIGINT, signal.SIGTERM]
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _raise_open_files() -> None:
    """Raise the limit on open files up to the system's maximum. Many systems start with 1,024."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def serve(
    app: ASGIApp,
    address: socket.socket,
    *,
    shutdown_timeout: int,
    access_log: bool,
    limits: ConnectionLimits | None = None,
    engine: StartingEngine | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. Then refuse new requests, and give running ones `shutdown_timeout` seconds.

    engine: its programs may still be compiled. None: it is ready.

    `CLOSE_SECONDS` later the process ends with status 1, if a thread still parses, tokenises, compiles or renders.
    """
    _raise_open_files()
    config = uvicorn.Config(
        app,
        http=bounded_connection(limits),
        ws="none",
        timeout_graceful_shutdown=shutdown_timeout,
        access_log=access_log,
        log_config=None,
        log_level="warning" if not access_log else "info",
        server_header=False,
        backlog=2048,
    )
    host, port = address.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    _Server(config, lambda: _announce(f"http://{shown}:{port}/v1", engine)).run(sockets=[address])
