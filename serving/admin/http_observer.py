"""Observes every HTTP request: gives it an id, counts it, and writes its line of the access log."""

import logging
import time

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpaged.requester import current_client
from jpaged.serving.admin.metrics import ServerMetrics
from jpaged.serving.web.error_responses import MESSAGES, error_response
from jpaged.serving.web.request_context import RequestContext, current

logger = logging.getLogger("jpaged.access")

UNKNOWN = "none"  # handler of a request that no route answers, or that has no valid key


class HTTPObserver:
    """ASGI middleware, the outermost one: every answer gets the header X-Request-Id.

    On the routes below /v1/messages it also gets `request-id`, the header that Anthropic's clients read. The class
    reads only the first message of an answer. A streamed token costs one more function call.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, access_log: bool):
        self._app = app
        self._metrics = metrics
        self._access_log = access_log
        self._handlers: dict[object, str] = {}  # path of the route, by endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = RequestContext.of(scope)
        began, status = time.perf_counter(), 0

        def observed(message: Message):
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                value = context.request_id.encode()
                added = [(b"x-request-id", value)]
                if scope["path"].startswith(MESSAGES):
                    added.append((b"request-id", value))
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            return send(message)

        token = current.set(context)
        current_client.set((scope.get("client") or ("", 0))[0])
        try:
            await self._app(scope, receive, observed)
        except Exception as error:
            if status:
                raise
            # Answered here: Starlette's own handler is outside of all middleware, and its answer would have no id.
            await error_response(error, scope)(scope, receive, observed)
        finally:
            seconds = time.perf_counter() - began
            self._metrics.note_request(self._handler(scope), scope["method"], status or 500, seconds)
            if self._access_log:
                _log(context, status or 500, seconds)
            current.reset(token)

    def _handler(self, scope: Scope) -> str:
        """Return the path of the route that answered, so that clients cannot choose labels of metrics."""
        endpoint = scope.get("endpoint")
        if endpoint is None:
            return UNKNOWN
        if not self._handlers:
            for route in scope["app"].routes:
                if isinstance(route, Route):
                    self._handlers.setdefault(route.endpoint, route.path)
                    self._handlers[route.endpoint, route.path] = route.path  # several paths may have one endpoint
        return self._handlers.get((endpoint, scope["path"])) or self._handlers.get(endpoint, UNKNOWN)


def _log(context: RequestContext, status: int, seconds: float) -> None:
    """Log one line."""
    client, method, path = context.client, context.method, context.path
    facts = {"client": client, "method": method, "path": path, "status": status, "seconds": round(seconds, 6)}
    logger.info(
        '%s "%s %s" %d %.3fs %s', client, method, path, status, seconds, context.request_id, extra={"facts": facts}
    )
