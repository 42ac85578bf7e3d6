"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's bodies and answers. They need an admin key."""

import logging

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from jpaged.errors import RequestError
from jpaged.serving.adapters.served_adapters import ServedAdapters
from jpaged.serving.schemas.adapters import LoadAdapterRequest, UnloadAdapterRequest
from jpaged.serving.server_state import Server
from jpaged.serving.web.body import read_body

logger = logging.getLogger("jpaged.serving")


def routes() -> list[BaseRoute]:
    """Return the routes."""
    return [
        Route("/v1/load_lora_adapter", load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload_adapter, methods=["POST"]),
    ]


async def load_adapter(request: Request) -> Response:
    """Load a LoRA adapter from a folder. Answers when it is in host memory."""
    adapters = _adapters(request)
    body = await read_body(request, LoadAdapterRequest)
    await adapters.load(body.lora_name, body.lora_path, in_place=bool(body.load_inplace))
    logger.info("LoRA adapter %s is loaded", body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(request: Request) -> Response:
    """Forget a LoRA adapter. Its running requests go on."""
    adapters = _adapters(request)
    body = await read_body(request, UnloadAdapterRequest)
    if body.lora_name is None and body.lora_int_id is None:
        raise RequestError("lora_name", None, "is missing: send the name of an adapter, or its lora_int_id")
    name = adapters.unload(body.lora_name, body.lora_int_id)
    logger.info("LoRA adapter %s is unloaded", name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _adapters(request: Request) -> ServedAdapters:
    server: Server = request.app.state.server
    for name, value in request.query_params.items():
        raise RequestError(name, value, "unknown query parameter; known: none")
    if server.adapters is None:
        raise RequestError("enable_lora", False, "the server has no LoRA adapters: start it with --enable-lora")
    return server.adapters
