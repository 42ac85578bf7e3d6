"""Converts errors to OpenAI's error bodies, or to Anthropic's.

Requests of Anthropic's API are below /v1/messages, or have a header `anthropic-version` on /v1/models.

OpenAI's: `{"error": {"message", "type", "param", "code"}}`.
Anthropic's: `{"type": "error", "error": {"type", "message"}, "request_id"}`.
"""

import logging
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from jpaged.errors import CapacityError, EngineError, JPagedError, NoWeightsError, RequestError
from jpaged.serving.web.request_context import current

logger = logging.getLogger("jpaged.serving")

MAX_LOGGED = 300  # characters of an error
MESSAGES = "/v1/messages"  # the beginning of the paths of Anthropic's API
MODELS = "/v1/models"
RESPONSES = "/v1/responses"
# Anthropic's types of errors by status. Other statuses have invalid_request_error below 500, else api_error.
ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
CLIENT_CLOSED_REQUEST = 499  # for the access log: the client does not receive it


class APIError(JPagedError):
    """An error with its own HTTP status."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        self.status = status
        self.param = param
        self.code = code
        super().__init__(message)


STOPPED = APIError(503, "the server is stopping: send the request again, to another server or later", code="stopping")


class ClientDisconnected(Exception):
    """The client disconnected; its request was aborted."""


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the status and the body for an error. Details of internal errors go to the log only."""
    if isinstance(error.__cause__, NoWeightsError):  # it ended the request while it ran
        error = error.__cause__
    match error:
        case APIError():
            status, param, code = error.status, error.param, error.code
        case RequestError():
            status, param, code = HTTPStatus.BAD_REQUEST, error.parameter, None
        case CapacityError():
            status, param, code = HTTPStatus.SERVICE_UNAVAILABLE, None, "engine_full"
        case NoWeightsError():
            status, param, code = HTTPStatus.SERVICE_UNAVAILABLE, None, "no_weights"
        case EngineError():
            status, param, code = HTTPStatus.INTERNAL_SERVER_ERROR, None, "engine_error"
        case HTTPException():
            status, param, code = error.status_code, None, None
        case _:
            status, param, code = HTTPStatus.INTERNAL_SERVER_ERROR, None, None
    said: str | None = str(error)
    if isinstance(error, RequestError):
        said = error.without_value  # without the value: logs have no prompts
    if isinstance(error, HTTPException):
        message = said = error.detail
    elif isinstance(error, NoWeightsError) or (isinstance(error, JPagedError) and not isinstance(error, EngineError)):
        message = str(error)
    else:
        # An engine error without a cause says all. If the engine has ended, every request that runs has one
        if isinstance(error, EngineError) and error.__cause__ is None:
            logger.error("a request failed: %s", _one_line(str(error)), extra={"status": int(status)})
        else:
            logger.error("a request failed", exc_info=error, extra={"status": int(status)})
        said = None
        message = "the server failed on this request; its log says why"
    if said is not None:
        level = logging.INFO if status < HTTPStatus.INTERNAL_SERVER_ERROR else logging.WARNING
        logger.log(
            level, "refused a request with status %d: %s", status, _one_line(said), extra={"status": int(status)}
        )
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    return int(status), {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the status and Anthropic's body for an error. Its message contains the name of the field."""
    status, body = error_body(error)
    internal = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = ANTHROPIC_TYPES.get(status, "api_error" if internal else "invalid_request_error")
    context = current.get()
    request_id = None if context is None else context.request_id
    error_object = {"type": kind, "message": body["error"]["message"]}
    return status, {"type": "error", "error": error_object, "request_id": request_id}


def _one_line(text: str) -> str:
    """Return the beginning of a text as one line. Clients choose parts of it, and must not forge lines of the log."""
    return "".join(char if char.isprintable() else " " for char in text[:MAX_LOGGED])


def speaks_anthropic(scope: Scope) -> bool:
    """Return True if a request is answered in the shapes of Anthropic's API."""
    path = scope["path"]
    return path.startswith(MESSAGES) or (
        path.startswith(MODELS) and any(name == b"anthropic-version" for name, _ in scope["headers"])
    )


def error_response(error: Exception, scope: Scope) -> Response:
    """Return the response to a failed request. scope: of the request; it decides the shape of the body."""
    if isinstance(error, ClientDisconnected):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    status, body = anthropic_error_body(error) if speaks_anthropic(scope) else error_body(error)
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, CapacityError):
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


async def handle_error(request: Request, error: Exception) -> Response:
    """Handle any exception, as Starlette's exception handler."""
    return error_response(error, request.scope)
