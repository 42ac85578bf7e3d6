"""Facts about the HTTP request that the current task serves: its id, and the trace that it belongs to.

`HTTPObserver` sets them. They are a context variable, so that log lines and spans have the id without every function
passing it on.
"""

import dataclasses
import re
import uuid
from contextvars import ContextVar
from urllib.parse import quote

from starlette.types import Scope

MAX_LENGTH = 256  # of a request id that the client chooses; as of the field `request_id`
_SANE = re.compile(rb"[!-~]{1,%d}" % MAX_LENGTH)  # printable ASCII without spaces: safe in a header and in a log


@dataclasses.dataclass(frozen=True, slots=True)
class RequestContext:
    """Facts from a request's headers.

    request_id:  the client's X-Request-Id, or a new id.
    from_client: the client chose the id, so it may not be unique.
    client, method, path: of the request, for the log. Quoted, because clients choose them.
    traceparent, tracestate: headers of W3C Trace Context; empty if they are missing.
    """

    request_id: str
    from_client: bool
    traceparent: str = ""
    tracestate: str = ""
    client: str = ""
    method: str = ""
    path: str = ""

    @classmethod
    def of(cls, scope: Scope) -> "RequestContext":
        """Read the headers of a request."""
        given = dict(scope["headers"])
        asked, parent, state = (given.get(name, b"") for name in (b"x-request-id", b"traceparent", b"tracestate"))
        sane = _SANE.fullmatch(asked) is not None
        request_id = asked.decode() if sane else uuid.uuid4().hex
        host, port = scope.get("client") or ("", 0)
        client = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        method, path = quote(scope["method"]), quote(scope["path"])  # the query may contain secrets, and is left out
        return cls(request_id, sane, parent.decode("latin-1"), state.decode("latin-1"), client, method, path)


current: ContextVar[RequestContext | None] = ContextVar("jpaged_request", default=None)


def engine_request_id(prefix: str) -> str:
    """Return a new id for the engine. It contains the HTTP request's id, for the engine's log lines."""
    context = current.get()
    if context is None:
        return f"{prefix}-{uuid.uuid4().hex}"
    if context.from_client:
        return f"{prefix}-{context.request_id}-{uuid.uuid4().hex[:16]}"
    return f"{prefix}-{context.request_id}"
