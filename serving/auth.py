"""Asks for an API key on every route but /health."""

import hashlib
import hmac
from collections.abc import Iterable
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from jpaged.serving.error_responses import APIError, error_response

OPEN_PATHS = frozenset({"/health"})


class RequireKey:
    """ASGI middleware. Keys are compared by their hashes, all of them, in constant time."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]):
        self._app = app
        self._hashes = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: let a request through, or answer 401."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._known(scope):
            await self._app(scope, receive, send)
            return
        error = APIError(HTTPStatus.UNAUTHORIZED, "send the API key: Authorization: Bearer KEY", code="invalid_api_key")
        await error_response(error)(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._hashes]
        return scheme.lower() == b"bearer" and any(matches)
