"""GET /v1/models, /health and /version."""

import logging
from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jpaged.errors import EngineError
from jpaged.serving.error_responses import APIError
from jpaged.serving.generation import Server
from jpaged.serving.response_schema import ModelCard, ModelList
from jpaged.version import __version__

logger = logging.getLogger("jpaged.serving")


async def models(request: Request) -> Response:
    """List the names of the served model."""
    server: Server = request.app.state.server
    return _json(ModelList([_card(server, name) for name in server.model_names]))


async def model(request: Request) -> Response:
    """Return the entry of one model name."""
    server: Server = request.app.state.server
    return _json(_card(server, server.model_name(request.path_params["model"])))


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


async def version(request: Request) -> Response:
    """Return jpaged's version."""
    return JSONResponse({"version": __version__})


def _card(server: Server, name: str) -> ModelCard:
    return ModelCard(id=name, created=server.created, max_model_len=server.engine.max_model_len)


def _json(data: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")
