"""GET /admin/inspect: for the one who runs the server, with a key of their own."""

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from jpaged.serving.generation import Server


async def inspect(request: Request) -> Response:
    """What the engine holds, as `jpaged.EngineSnapshot`: ids of requests, and nothing of what they say."""
    server: Server = request.app.state.server
    snapshot = await server.engine.inspect()
    body = await run_in_threadpool(msgspec.json.encode, snapshot)  # a large pool is some megabytes
    return Response(body, headers={"Cache-Control": "no-store"}, media_type="application/json")
