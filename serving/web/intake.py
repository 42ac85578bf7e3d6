"""Draining: the server finishes the requests that it has, and refuses new ones."""

from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from jpaged.serving.web.auth import OPEN_PATHS
from jpaged.serving.web.error_responses import RESPONSES, APIError, error_response

RETRY_SECONDS = 5  # by then a load balancer has seen that /ready fails, and sends clients elsewhere


class Draining(APIError):
    """The server accepts no new requests."""

    def __init__(self) -> None:
        self.headers = {"Retry-After": str(RETRY_SECONDS)}
        message = "the server is draining: send the request to another server, or later"
        super().__init__(HTTPStatus.SERVICE_UNAVAILABLE, message, code="draining")


class Intake:
    """The server's draining state, and the number of requests that are being answered."""

    def __init__(self) -> None:
        self.draining = False
        self.num_open = 0


class CountRequests:
    """ASGI middleware: counts the requests that ask for work, and answers 503 to them while the server drains.

    GET, HEAD, `OPEN_PATHS` and `exempt` ask for no work. While draining, clients may still delete responses and
    files, and cancel responses and batches.
    """

    def __init__(self, app: ASGIApp, intake: Intake, exempt: frozenset[str]):
        self._app = app
        self._intake = intake
        self._exempt = exempt | OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request: pass it on, or answer 503."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD") or scope["path"] in self._exempt:
            await self._app(scope, receive, send)
            return
        if self._intake.draining and not _ends_work(scope):
            await error_response(Draining(), scope)(scope, receive, send)
            return
        self._intake.num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._intake.num_open -= 1


def _ends_work(scope: Scope) -> bool:
    """Return True if the request cancels a response or a batch, or deletes a response or a file."""
    path = scope["path"]
    is_stored = path.startswith((f"{RESPONSES}/", "/v1/files/", "/v1/batches/"))
    return is_stored and (scope["method"] == "DELETE" or path.endswith("/cancel"))
