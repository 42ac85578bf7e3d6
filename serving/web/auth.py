"""Checks keys: an API key on every route except `OPEN_PATHS`, an admin key on the routes of `routes_admin`."""

import hashlib
import hmac
from collections.abc import Callable, Iterable
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from jpaged.requester import current_client
from jpaged.serving.web.error_responses import APIError, error_response

ADMIN = "/admin/"
OWNER = "jpaged.key"  # entry of a request's ASGI scope: the hash of its valid key
# For load balancers and orchestrators, which have no key. The answers contain nothing about requests or the model.
OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})


class RequireKey:
    """ASGI middleware that answers 401 to a request without a valid key.

    Every key's hash is compared, in constant time, so that the response time reveals nothing about the keys.

    guards: returns True for a path that requires one of these keys.
    name:   of the key, for error messages.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], guards: Callable[[str], bool], name: str):
        self._app = app
        self._guards = guards
        self._name = name
        self._hashes = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request: pass it on, or answer 401."""
        if scope["type"] == "lifespan" or not self._guards(scope["path"]) or self._known(scope):
            await self._app(scope, receive, send)
            return
        problem = "the request has a wrong" if any(_keys(scope)) else "the request has no"
        message = f"{problem} {self._name}: send Authorization: Bearer KEY, or x-api-key: KEY"
        error = APIError(HTTPStatus.UNAUTHORIZED, message, code=f"invalid_{self._name.lower().replace(' ', '_')}")
        await error_response(error, scope)(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        """Return True if the request has a valid key. Stores its hash in the scope, as the client's identity."""
        known = False
        for digest in map(_hash, _keys(scope)):
            for one in self._hashes:
                if hmac.compare_digest(digest, one):
                    known = True
                    scope[OWNER] = one
                    current_client.set(one.hex())
        return known


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _keys(scope: Scope) -> list[bytes]:
    """Return the keys of a request: in `Authorization: Bearer`, and in `x-api-key`, the header of Anthropic's API."""
    headers = dict(reversed(scope["headers"]))  # the first one of a name counts
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    keys = [key.strip()] if scheme.lower() == b"bearer" else []
    return [*keys, headers[b"x-api-key"].strip()] if b"x-api-key" in headers else keys
