"""GET /admin/inspect: the engine's state, for the operator of the server. It requires an admin key."""

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from jpaged.serving.generation import Server


async def inspect(request: Request) -> Response:
    """Return the engine's state, as `jpaged.EngineSnapshot`. It contains request ids, and no prompts or answers."""
    server: Server = request.app.state.server
    snapshot = await server.engine.inspect()
    body = await run_in_threadpool(msgspec.json.encode, snapshot)  # a large pool takes several megabytes
    return Response(body, headers={"Cache-Control": "no-store"}, media_type="application/json")
