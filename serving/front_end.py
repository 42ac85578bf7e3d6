"""A front end: a process with the HTTP server, and no engine. `FrontEnds` starts it, and writes its settings to stdin.

Imported late: the server and the tokenizer, while the engine's process loads the model.
"""

import dataclasses
import pickle
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from jpaged.errors import EngineError, JPagedError

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from jpaged.cli.serve import Serve
    from jpaged.frontend.remote.remote_engine import RemoteEngine


BAD_FLAGS = 2  # exit status


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontEndSettings:
    """Settings of a front end. Numbers are of file descriptors that it inherits."""

    serve: "Serve"        # the flags of the command line
    channel: int
    questions: int
    address: int
    metrics_address: int | None  # None: it does not serve --metrics-port
    keeper_address: int | None   # it keeps responses, files and batches, and others forward to this socket
    keeper: str | None           # path of that socket, for the others
    announces: bool              # prints where the server listens


def main() -> int:
    """Serve until SIGTERM, or until the engine's process ends. Returns the exit status."""
    try:
        settings = pickle.load(sys.stdin.buffer)  # noqa: S301 - the parent wrote it
    except (EOFError, pickle.UnpicklingError):  # the parent ended before it had written all
        return 1
    assert isinstance(settings, FrontEndSettings)
    from jpaged.frontend.remote.remote_engine import RemoteEngine
    from jpaged.text.transformers_import import import_transformers

    serve = settings.serve
    try:
        application = serve.prepare(keeps=settings.keeper is None, keeper=settings.keeper)
    except JPagedError as error:
        print(f"jpaged: {error}", file=sys.stderr)
        return BAD_FLAGS
    import_transformers()  # here, and not with the tokenizer of the welcome: it takes seconds
    import_module("jpaged.serving.application")
    try:
        engine = RemoteEngine(socket.socket(fileno=settings.channel), socket.socket(fileno=settings.questions))
    except EngineError:  # the engine could not be built: its process says why
        return 1
    app = application(engine, engine)
    connect_first(app, engine)
    return serve.serve_app(
        app, engine, socket.socket(fileno=settings.address), _inherited(settings.metrics_address),
        keeper_address=_inherited(settings.keeper_address), announces=settings.announces, owns_address=False,
    )  # fmt: skip


def _inherited(fileno: int | None) -> socket.socket | None:
    return None if fileno is None else socket.socket(fileno=fileno)


def connect_first(app: "Starlette", engine: "RemoteEngine") -> None:
    """Connect to the engine on the event loop that serves."""
    lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def connected(app: "Starlette") -> AsyncGenerator[None]:
        await engine.connect()
        async with lifespan(app):
            yield

    app.router.lifespan_context = connected


if __name__ == "__main__":
    from jpaged.serving import front_end  # the class of the settings is that module's, and not __main__'s

    sys.exit(front_end.main())
