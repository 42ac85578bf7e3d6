"""Checks keys: an API key on every route except /health, an admin key on routes below /admin."""

import hashlib
import hmac
from collections.abc import Callable, Iterable
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from jpaged.serving.error_responses import APIError, error_response

ADMIN = "/admin/"
OPEN_PATHS = frozenset({"/health"})


class RequireKey:
    """ASGI middleware that answers 401 to a request without a valid key.

    Every key's hash is compared, in constant time, so that the response time reveals nothing about the keys.

    guards: says whether a path requires one of these keys.
    name:   what error messages call the key.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], guards: Callable[[str], bool], name: str):
        self._app = app
        self._guards = guards
        self._name = name
        self._hashes = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request: pass it on, or answer 401."""
        if scope["type"] != "http" or not self._guards(scope["path"]) or self._known(scope):
            await self._app(scope, receive, send)
            return
        message = f"send the {self._name}: Authorization: Bearer KEY"
        error = APIError(HTTPStatus.UNAUTHORIZED, message, code=f"invalid_{self._name.lower().replace(' ', '_')}")
        await error_response(error)(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._hashes]
        return scheme.lower() == b"bearer" and any(matches)
