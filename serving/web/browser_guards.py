"""ASGI middleware against web pages that use a visitor's browser to reach a server of the visitor's network.

- `CheckHost`: a page whose name resolves to this machine (DNS rebinding) sends its own name as Host.
- `RequireJson`: a page may send text, a form or untyped bytes to any server unasked. JSON needs the server's permission
  (CORS). The class also refuses compressed bodies, which the readers of JSON would call malformed.
"""

import ipaddress
from collections.abc import Iterable
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from jpaged.errors import shown
from jpaged.serving.web.error_responses import APIError, error_response

LOOPBACK_HOSTS = ("localhost", "*.localhost", "127.0.0.1", "::1")
BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})


class CheckHost:
    """Answers 403 to a request whose Host header names another server. Browsers always send the header."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str]):
        """hosts: names, addresses, or `*.` with a name."""
        self._app = app
        lowered = [host.lower().strip("[]") for host in hosts]
        self._names = frozenset(host for host in lowered if not host.startswith("*."))
        self._suffixes = tuple(host[1:] for host in lowered if host.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request: pass it on, or answer 403."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1 or not all(self._accepts(host.decode("latin-1")) for host in hosts):
            message = f"the server does not answer to the host {shown(hosts[0].decode('latin-1'))}: see --allowed-hosts"
            error = APIError(HTTPStatus.FORBIDDEN, message, code="invalid_host")
            await error_response(error, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _accepts(self, host: str) -> bool:
        name = host_name(host)
        if name is None:
            return False
        if name in self._names or name.endswith(self._suffixes):
            return True
        return "127.0.0.1" in self._names and is_loopback(name)  # 127.0.0.2 and the like


def host_name(host: str) -> str | None:
    """Return the name or address of a Host header, without its port. None: the header is not valid."""
    host = host.strip().lower()
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        port = port.removeprefix(":") if port.startswith(":") or not port else "?"
        valid = bool(bracket)
    else:
        name, _, port = host.partition(":")
        valid = True
    if not valid or (port and not port.isdecimal()):
        return None
    return name.removesuffix(".") or None


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


class RequireJson:
    """Answers 415 to a body that is compressed, or not declared as JSON. Only browsers must send a Content-Type."""

    def __init__(self, app: ASGIApp, forms: frozenset[str] = frozenset()):
        """forms: paths that also take multipart/form-data, except from a browser: a page may send a form unasked."""
        self._app = app
        self._forms = forms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request: pass it on, or answer 415."""
        if scope["type"] != "http" or scope["method"] not in BODY_METHODS:
            await self._app(scope, receive, send)
            return
        message = "the body must be JSON: send Content-Type: application/json"
        encoding = b", ".join(value for name, value in scope["headers"] if name == b"content-encoding")
        compressed = encoding.strip().lower() not in (b"", b"identity")
        if compressed:
            named = shown(encoding.decode("latin-1"))
            message = f"Content-Encoding {named}: compressed bodies are not read, send the body as it is"
        elif _may_be_json(scope["headers"]) or (scope["path"] in self._forms and _is_form(scope["headers"])):
            await self._app(scope, receive, send)
            return
        error = APIError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, code="unsupported_media_type")
        response = error_response(error, scope)
        if compressed:
            response.headers["accept-encoding"] = "identity"  # RFC 9110, 15.5.16
        await response(scope, receive, send)


def _is_form(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return True for multipart/form-data without Origin, which no browser sends."""
    fields = list(headers)
    types = [value for name, value in fields if name == b"content-type"]
    is_form = len(types) == 1 and types[0].partition(b";")[0].strip().lower() == b"multipart/form-data"
    return is_form and not any(name == b"origin" for name, _ in fields)


def _may_be_json(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    types = [value for name, value in headers if name == b"content-type"]
    if not types:
        return not any(name == b"origin" for name, _ in headers)  # which browsers send with such a request
    return all(each.partition(b";")[0].strip().lower() == b"application/json" for each in types)
