"""The server's process: binds the address before the model loads, and serves until a signal.

Imported late: resource, which Windows lacks.
"""

import asyncio
import dataclasses
import errno
import faulthandler
import gc
import logging
import os
import pathlib
import signal
import socket
import ssl
import stat
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from jpaged.errors import EngineError, JPagedError
from jpaged.serving.web.body_process import kill_children
from jpaged.serving.web.connection import ConnectionLimits, bounded_connection
from jpaged.serving.web.log_format import line_of, say

logger = logging.getLogger("jpaged.serving")

MAX_OPEN_FILES = 65_536
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
FATAL_SECONDS = 2  # to tell clients that the engine has ended; some do not read, or still send
CLOSE_SECONDS = 2  # to answer the last requests and to close the engine, after the shutdown timeout


class AddressError(JPagedError):
    """The server cannot listen on the address."""


def take_address(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Bind a socket to host and port (0: any free port). Raises AddressError, which names the flag.

    The socket does not listen yet, so clients are refused until the model is ready. Binding early reports a port that
    is in use before the model loads.
    """
    if not 0 <= port <= 65535:
        raise AddressError(f"cannot listen on port {port}: {flag} takes 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        hint = f"try another {flag}"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            hint = "this machine does not have that address: try another --host"
        raise AddressError(f"cannot listen on {host}:{port} ({error.strerror or error}): {hint}") from None
    return bound


def take_unix_socket(path: pathlib.Path) -> socket.socket:
    """Bind a Unix socket for its owner and group. Replaces a file that no process listens on. Raises AddressError."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise AddressError(f"cannot listen on {path}: another process does (--uds)")
            path.unlink()
        before = os.umask(0o117)
        try:
            made.bind(str(path))
        finally:
            os.umask(before)
    except OSError as error:
        raise AddressError(f"cannot listen on {path} ({error.strerror or error}): try another --uds") from None
    return made


class ServedEngine(Protocol):
    """An engine whose programs may still be compiled, and that may end by itself."""

    def when_fatal(self, callback: Callable[[EngineError], None]) -> None:
        """Call a function once if the engine ends by itself. It may run on another thread."""
        ...

    @property
    def is_ready(self) -> bool:
        """True when all programs are compiled."""
        ...

    def wait_until_ready(self) -> None:
        """Wait until all programs are compiled. Raises EngineError if one cannot be compiled."""
        ...


def _announce(url: str, engine: ServedEngine | None) -> None:
    """Print that the server is ready: now, or when all programs are compiled."""
    if engine is None or engine.is_ready:
        say(f"ready: {url}")
        return
    say(f"serving: {url} (requests may wait while programs are compiled)")

    def wait() -> None:
        with suppress(EngineError):  # the log has it
            engine.wait_until_ready()
            say(f"ready: {url}")

    threading.Thread(target=wait, name="jpaged-ready", daemon=True).start()


@dataclasses.dataclass(frozen=True, slots=True)
class SidePort:
    """A further application, the address that it listens on, and the seconds that its requests may take to finish."""

    app: ASGIApp
    address: socket.socket
    shutdown_timeout: int = 1


class _SideServer(uvicorn.Server):
    """Serves a further application, also while the main server drains. The main server handles the signals."""

    def __init__(self, port: SidePort):
        super().__init__(
            uvicorn.Config(
                port.app,
                http=bounded_connection(ConnectionLimits()),
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                timeout_graceful_shutdown=port.shutdown_timeout,
            )
        )
        self._address = port.address
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self.serve(sockets=[self._address]))

    async def stop(self) -> None:
        self.should_exit = True
        if self._task is not None:
            await self._task

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _Server(uvicorn.Server):
    """A uvicorn server that calls `ready` when it accepts requests, and ends with status 0 after SIGINT or SIGTERM."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], sides: "Sequence[_SideServer]"):
        """sides: run as long as this server, and on its event loop."""
        super().__init__(config)
        self._ready = ready
        self._sides = sides
        self._signals = 0
        self.fatal = False  # the engine has ended

    def end(self, error: EngineError) -> None:
        """Stop, because the engine has ended. Its requests have failed. Any thread may call it."""
        logger.critical("the server stops: %s", error)
        self.fatal = True
        for server in (self, *self._sides):
            server.config.timeout_graceful_shutdown = min(server.config.timeout_graceful_shutdown or 0, FATAL_SECONDS)
        self._stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            for side in self._sides:
                await side.start()
            # Modules, the model and programs live as long as the server. With them, a full garbage collection stopped
            # every request for 180 ms. When they are frozen, it takes 1 ms.
            gc.collect()
            gc.freeze()
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        running = len(self.server_state.tasks)
        if running:
            limit = self.config.timeout_graceful_shutdown
            say(f"stopping: waits up to {limit} s for {running} running requests; Ctrl-C ends it now")
        await super().shutdown(sockets)
        for side in self._sides:
            await side.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop. A second signal ends the process at once, with status 1."""
        self._signals += 1
        if self._signals > 1:
            kill_children()
            os.write(2, f"{line_of('stopped at once by a second signal', logging.WARNING)}\n".encode())
            os._exit(1)
        self._stop()

    def _stop(self) -> None:
        """Begin to stop. If threads keep the process alive beyond its timeout, show their stacks and end it."""
        if not self.should_exit:  # faulthandler's timer is a thread in C, and does not need Python's global lock
            seconds = (self.config.timeout_graceful_shutdown or 0) + CLOSE_SECONDS
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        # A process that a script starts with `&` ignores SIGINT. With this handler, `kill -INT` stops it.
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def leave_signals_to_the_leader() -> None:
    """Ignore a first SIGINT or SIGTERM, and end at a second one: for a process that ends when its leader closes."""

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        waits = "waiting for process 0 to finish its requests; a second signal ends this process at once"
        os.write(2, f"{line_of(waits)}\n".encode())

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)


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
    limits: ConnectionLimits | None = None,
    engine: ServedEngine | None = None,
    tls: ssl.SSLContext | None = None,
    metrics: SidePort | None = None,
    keeper: SidePort | None = None,
    has_page: bool = False,
    announces: bool = True,
    owns_address: bool = True,
) -> int:
    """Serve until SIGINT or SIGTERM. Then refuse new requests, and give running ones `shutdown_timeout` seconds.

    engine:  its programs may still be compiled. None: it is ready, and never ends by itself.
    tls:     for https. None: http.
    metrics: serve metrics on a port of their own as well, without TLS.
    keeper:  serve what other front ends forward.
    has_page: the application has a page at /ui: print its address.
    announces: print where the server listens, and when it stops.
    owns_address: remove the file of a Unix socket at the end.

    Returns the exit status: 0 after a signal, 1 if the engine has ended by itself. If a thread still parses, tokenises,
    compiles or renders `CLOSE_SECONDS` after the timeout, the process ends with status 1.
    """
    _raise_open_files()
    config = uvicorn.Config(
        app,
        http=bounded_connection(limits),
        ws="none",
        timeout_graceful_shutdown=shutdown_timeout,
        access_log=False,  # `HTTPObserver` writes it
        log_config=None,
        log_level="warning",
        server_header=False,
        backlog=2048,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )
    name = address.getsockname()
    sides = [_SideServer(port) for port in (metrics, keeper) if port is not None]

    def ready() -> None:
        if not announces:
            return
        if metrics is not None:
            say(f"metrics: {_url(metrics.address.getsockname(), False)}/metrics")
        url = _url(name, tls is not None)
        if not isinstance(name, str) and name[0] in ANY_ADDRESS:
            say(f"listening on {name[0]} port {name[1]}: all addresses of this machine")
        if has_page and not isinstance(name, str):  # browsers open no Unix sockets
            say(f"page: {url}/ui")
        _announce(url if isinstance(name, str) else f"{url}/v1", engine)

    server = _Server(config, ready, sides)
    began = time.monotonic()
    if engine is not None:
        engine.when_fatal(server.end)
    try:
        server.run(sockets=[address])
    finally:
        if isinstance(name, str) and owns_address:
            pathlib.Path(name).unlink(missing_ok=True)
    if announces:
        say(f"stopped after {time.monotonic() - began:.1f} s")
    return 1 if server.fatal else 0


def _url(name: Any, secure: bool) -> str:
    """Return the server's address for its users. name: of its socket."""
    scheme = "https" if secure else "http"
    if isinstance(name, str):
        return f"{scheme}+unix://{name}"
    host, port = name[:2]
    host = ANY_ADDRESS.get(host, host)
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}"
