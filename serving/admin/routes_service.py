"""The routes for operators: /health, /ping, /ready, /load and /version."""

import logging
from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jpaged.errors import EngineError
from jpaged.serving.schemas.answers import ServerLoad, Version
from jpaged.serving.server_state import Server
from jpaged.serving.web.error_responses import APIError
from jpaged.version import __version__

logger = logging.getLogger("jpaged.serving")


async def health(request: Request) -> Response:
    """Answer 200 while the engine is ready, runs and makes progress, else 503."""
    server: Server = request.app.state.server
    try:
        await server.engine.check_health()
    except EngineError as error:
        logger.error("unhealthy: %s", error)
        raise APIError(HTTPStatus.SERVICE_UNAVAILABLE, "the engine does not run", code="engine_error") from None
    if not server.engine.is_ready:
        return Response("programs are still being compiled\n", HTTPStatus.SERVICE_UNAVAILABLE, {"Retry-After": "1"})
    return Response()


async def ready(request: Request) -> Response:
    """Answer 200 while the server is healthy and accepts requests, 503 while it drains, pauses or has no weights."""
    server: Server = request.app.state.server
    refuses = request.app.state.intake.draining or server.engine.weights_problem is not None
    if refuses or await server.engine.is_paused():
        return Response("no new requests\n", HTTPStatus.SERVICE_UNAVAILABLE, {"Retry-After": "1"})
    return await health(request)


async def load(request: Request) -> Response:
    """Return the number of requests that run or wait, for load balancers."""
    server: Server = request.app.state.server
    stats = server.engine.stats()
    return _json(ServerLoad(stats.num_running + stats.num_waiting))


async def version(request: Request) -> Response:
    """Return jpaged's version."""
    return _json(Version(__version__))


def _json(data: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")
