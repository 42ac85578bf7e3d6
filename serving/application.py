"""The ASGI application: its routes, and the keys that they require."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from jpaged.errors import JPagedError
from jpaged.serving import routes_admin, routes_service
from jpaged.serving.auth import ADMIN, OPEN_PATHS, RequireKey
from jpaged.serving.body_process import kill_children
from jpaged.serving.error_responses import ClientDisconnected, handle_error
from jpaged.serving.generation import Server
from jpaged.serving.routes_chat import chat_completions
from jpaged.serving.routes_completions import completions
from jpaged.serving.routes_embeddings import embeddings
from jpaged.serving.stats_log import log_stats
from jpaged.serving.stopping import AnswerWhenStopped


def create_app(server: Server, *, api_keys: Sequence[str] = (), admin_keys: Sequence[str] = ()) -> Starlette:
    """Make the application of a running engine. It closes the engine when it shuts down.

    api_keys:   if not empty, every route except /health requires one of them.
    admin_keys: if not empty, there are routes below /admin. They require one of these keys, and no API key.
    """
    admin = [Route("/admin/inspect", routes_admin.inspect)] if admin_keys else []
    guards = []
    if api_keys:
        guards.append(Middleware(RequireKey, keys=api_keys, guards=_needs_api_key(bool(admin_keys)), name="API key"))
    if admin_keys:
        guards.append(Middleware(RequireKey, keys=admin_keys, guards=_is_admin, name="admin key"))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        logged = asyncio.create_task(log_stats(server.engine.stats))
        yield
        logged.cancel()
        kill_children()
        await run_in_threadpool(server.engine.close)

    app = Starlette(
        routes=[
            Route("/v1/models", routes_service.models),
            Route("/v1/models/{model:path}", routes_service.model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            Route("/health", routes_service.health),
            Route("/version", routes_service.version),
            *admin,
        ],
        middleware=[Middleware(AnswerWhenStopped), *guards],
        exception_handlers=dict.fromkeys((JPagedError, HTTPException, ClientDisconnected, Exception), handle_error),
        lifespan=lifespan,
    )
    app.state.server = server
    return app


def _needs_api_key(admin: bool) -> Callable[[str], bool]:
    """Return a function that says whether a path requires an API key. admin: there are routes below /admin."""
    return lambda path: path not in OPEN_PATHS and not (admin and _is_admin(path))


def _is_admin(path: str) -> bool:
    return path.startswith(ADMIN)
