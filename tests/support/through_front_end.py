"""Runs tests of the server through a front end: `python -m pytest -p tests.support.through_front_end tests/serving`.

An application of an AsyncLLM gets a `RemoteEngine` that is connected to it. Servers that tests start as processes get
`--api-server-count 1`. What the tests assert does not change. Applications of the fake engine stay as they are: it has
no requests that could be sent to it.
"""

import asyncio
import dataclasses
from collections import Counter
from typing import Any
from unittest import mock

import pytest

counts = Counter[str](applications=0, processes=0)


class Connected:
    """Connects the front end before anything else. Not at the start, as in a server: some tests start no lifespan."""

    def __init__(self, app: Any, engine: Any):
        self._app, self._engine = app, engine

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._engine.connect()
        await self._app(scope, receive, send)


def pytest_configure() -> None:
    """Replace the functions before test modules import them."""
    # Imported late, after conftest.py: it sets what JAX reads, and checks the arrays of modules imported after it.
    from jpaged.frontend.remote.remote_engine import RemoteEngine
    from jpaged.serving import application
    from jpaged.serving.admin import tracing
    from tests.support import serve_flags
    from tests.support.front_end_pair import EngineSide

    create_app, traced = application.create_app, tracing.traced

    class FrontEnd(RemoteEngine):
        """Ends the engine, too, when the application closes it. In a server, the engine's process does that."""

        def __init__(self, engine: Any):
            self._side = EngineSide(engine)
            self._connected: asyncio.Task[None] | None = None
            super().__init__(*self._side.sockets())

        async def connect(self) -> None:
            if self._connected is None:
                self._connected = asyncio.create_task(super().connect())
            await self._connected

        def close(self) -> None:
            super().close()
            self._side.engine.close()
            self._side.close()

    def through_front_end(engine: Any) -> Any:
        return FrontEnd(engine) if hasattr(engine, "submit") else engine  # an AsyncLLM, also if it is wrapped

    def create(server: Any, options: Any = None, board: Any = None) -> Any:
        options = options or application.AppOptions()
        engine = through_front_end(server.engine)
        if not hasattr(engine, "connect"):
            return create_app(server, options, board)
        counts["applications"] += 1
        app = create_app(dataclasses.replace(server, engine=engine), options, board or engine)
        app.add_middleware(Connected, engine=engine)
        return app

    def flags() -> list[str]:
        counts["processes"] += 1
        return ["--api-server-count", "1"]

    for module, name, function in (
        (application, "create_app", create),
        (tracing, "traced", lambda engine, tracer: traced(through_front_end(engine), tracer)),
        (serve_flags, "serve_flags", flags),
    ):
        mock.patch.object(module, name, function).start()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send a worker's counts to the process that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["through_front_end"] = dict(counts)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the counts of a worker."""
    counts.update(getattr(node, "workeroutput", {}).get("through_front_end", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the counts."""
    terminalreporter.write_line(
        f"through a front end: {counts['applications']} applications, {counts['processes']} processes"
    )
