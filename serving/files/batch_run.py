"""Runs the requests of a batch file through the application, without a socket."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus

import msgspec
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Message

from jpaged.serving.files.batch_files import BatchRequest, BatchResult, ResultFile
from jpaged.serving.web.error_responses import APIError, error_body

SYNC_SECONDS = 1.0  # between two syncs of the output file to the disk


def batch_urls(app: Starlette) -> frozenset[str]:
    """Return the paths that a batch may use: of POST routes without path parameters."""
    routes = (route for route in app.routes if isinstance(route, Route))
    return frozenset(route.path for route in routes if route.methods == {"POST"} and "{" not in route.path)


async def run_requests(
    ask: Callable[[BatchRequest], Awaitable[tuple[int, str, bytes]]],
    requests: Iterator[BatchRequest],
    results: ResultFile,
    *,
    max_inflight: int,
    update: Callable[[int], None],
) -> int:
    """Run requests, at most `max_inflight` at a time. Append each complete answer. Returns the number of errors.

    ask:    runs one request, as `answer` does.
    update: called with the status of each answer.
    Raises BatchFileError if an answer cannot be written; the requests that still run are aborted.
    """
    failed = 0
    synced = time.monotonic()
    reading = asyncio.Lock()

    async def following() -> BatchRequest | None:
        # All workers share one iterator, so the file is read as needed. A thread reads it, because the next line may
        # have megabytes, or follow thousands of answered ones.
        async with reading:
            return await asyncio.to_thread(lambda: next(requests, None))

    async def work() -> None:
        nonlocal failed, synced
        while (request := await following()) is not None:
            status, request_id, body = await ask(request)
            results.append(BatchResult.of(request.custom_id, status, request_id, body))
            failed += status >= 400
            if time.monotonic() - synced > SYNC_SECONDS:
                synced = time.monotonic()
                await asyncio.to_thread(results.sync)
            update(status)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max_inflight):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    await asyncio.to_thread(results.sync)
    return failed


async def answer(app: Starlette, request: BatchRequest) -> tuple[int, str, bytes]:
    """Run one request. Returns the status, the id of the request, and the answer's body as JSON."""
    if request.url not in (urls := batch_urls(app)):
        message = f"url {request.url!r} is not served in a batch: use {', '.join(sorted(urls))}"
        status, error = error_body(APIError(HTTPStatus.NOT_FOUND, message, param="url"))
        return status, uuid.uuid4().hex, msgspec.json.encode(error)
    body = bytes(request.body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method, "scheme": "http",
        "path": request.url, "raw_path": request.url.encode(), "root_path": "", "query_string": b"",
        "headers": headers, "client": None, "server": None, "app": app,
    }  # fmt: skip
    sent = False
    status, fields, parts = 0, {}, []

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # there is no client that could leave
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, fields
        if message["type"] == "http.response.start":
            status, fields = message["status"], dict(message.get("headers", ()))
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    request_id = fields.get(b"x-request-id", b"").decode() or uuid.uuid4().hex
    return status, request_id, b"".join(parts)
