"""GET /openapi.json and /docs: the API's description, made once for each application."""

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from jpaged.serving.admin.docs_page import POLICY, docs_page
from jpaged.serving.admin.openapi import openapi


async def openapi_json(request: Request) -> Response:
    """Return the OpenAPI document of this server."""
    document, _ = await _made(request.app)
    return Response(document, media_type="application/json")


async def docs(request: Request) -> Response:
    """Return the OpenAPI document as a page, which works offline."""
    _, page = await _made(request.app)
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return Response(page, headers=headers, media_type="text/html")


async def _made(app: Starlette) -> tuple[bytes, bytes]:
    """Return document and page. They take 20 ms, at the first request for one of them."""
    if not hasattr(app.state, "described"):
        app.state.described = await run_in_threadpool(_described, app)
    return app.state.described


def _described(app: Starlette) -> tuple[bytes, bytes]:
    document = openapi(app.routes, app.state.key_rules)
    return msgspec.json.encode(document), docs_page(document).encode()
