"""Runs tests of the server through a front end: `python -m pytest -p tests.support.through_front_end tests/serving`.

An application of an AsyncLLM, or of the fake engine, gets a `RemoteEngine` that is connected to it. Servers that tests
start as processes get `--api-server-count 1`. What the tests assert does not change.
"""

import dataclasses
import sys
from collections import Counter
from typing import Any
from unittest import mock

import pytest

counts = Counter[str](applications=0, processes=0)


def pytest_configure() -> None:
    """Replace the functions, also in modules that have imported them."""
    # Imported late, after conftest.py: it sets what JAX reads, and checks the arrays of modules imported after it.
    from jpaged.serving import application
    from jpaged.serving.admin import tracing
    from tests.support import serve_flags
    from tests.support.app_front_end import AppFrontEnd, Connected

    create_app, traced = application.create_app, tracing.traced

    def create(server: Any, options: Any = None, board: Any = None) -> Any:
        options = options or application.AppOptions()
        engine = AppFrontEnd.of(server.engine)
        if not hasattr(engine, "connect"):
            return create_app(server, options, board)
        counts["applications"] += 1
        app = create_app(dataclasses.replace(server, engine=engine), options, board or engine)
        app.add_middleware(Connected, engine=engine)
        return app

    def flags() -> list[str]:
        counts["processes"] += 1
        return ["--api-server-count", "1"]

    mock.patch.object(tracing, "traced", lambda engine, tracer: traced(AppFrontEnd.of(engine), tracer)).start()
    mock.patch.object(serve_flags, "serve_flags", flags).start()
    for module in tuple(sys.modules.values()):
        if vars(module).get("create_app") is create_app:
            mock.patch.object(module, "create_app", create).start()


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
