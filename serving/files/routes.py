"""/v1/files and /v1/batches, on a server with a folder for batches."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from jpaged.errors import RequestError
from jpaged.serving.files.batch_jobs import BatchJobs
from jpaged.serving.files.store import FileStore, Upload
from jpaged.serving.schemas.files import BatchList, BatchObject, CreateBatch, DeletedFile, FileList, FileObject
from jpaged.serving.web.auth import OWNER
from jpaged.serving.web.body import read_body
from jpaged.serving.web.error_responses import APIError, ClientDisconnected
from jpaged.serving.web.list_pages import PageQuery
from jpaged.serving.web.multipart import FormPart, boundary_of, read_form

T = TypeVar("T", FileObject, BatchObject)

UPLOADS = "/v1/files"
MAX_FIELD = 1_024  # bytes of a field of an upload, other than the file
MAX_FILENAME = 255  # characters
MAX_FILES, MAX_BATCHES = 10_000, 100  # of a page, as in OpenAI's API


async def upload(request: Request) -> Response:
    """Store a file of requests for a batch."""
    store: FileStore = request.app.state.files
    boundary = boundary_of(request.headers.get("content-type", ""))
    if boundary is None:
        message = "an upload is a form with the fields file and purpose: send Content-Type: multipart/form-data"
        raise APIError(415, message, code="unsupported_media_type")
    received = store.receive()
    try:
        filename, fields = await _receive(request, boundary, received)
        if fields.get("purpose") != "batch":
            raise RequestError("purpose", fields.get("purpose"), "must be batch: other files have no use here")
        return _json(await received.finish(request.scope.get(OWNER, b""), filename))
    except ClientDisconnect:
        raise ClientDisconnected from None
    finally:
        received.close()


async def _receive(request: Request, boundary: bytes, received: Upload) -> tuple[str, dict[str, str]]:
    """Write the field `file` of a form into an upload. Returns the file's name, and the other fields."""
    filename: str | None = None
    fields: dict[str, str] = {}
    name = ""
    async for part in read_form(request.stream(), boundary):
        if isinstance(part, FormPart):
            name = part.name
            if name not in ("file", "purpose") or name in fields or (name == "file" and filename is not None):
                raise RequestError(name, "", "must be file or purpose, each once: other fields are not known here")
            if name == "file":
                filename = (part.filename or "file")[:MAX_FILENAME]
            else:
                fields[name] = ""
        elif name == "file":
            await received.write(part)
        else:
            fields[name] += part.decode("utf-8", errors="replace")
            if len(fields[name]) > MAX_FIELD:
                raise RequestError(name, fields[name], f"must have at most {MAX_FIELD:,} bytes")
    if filename is None:
        raise RequestError("file", None, "is missing: send the file of requests")
    return filename, fields


async def list_files(request: Request) -> Response:
    """Return a page of the key's files, newest first."""
    store: FileStore = request.app.state.files
    given = _query(request, "after", "limit", "order", "purpose")
    files = store.of_owner(request.scope.get(OWNER, b""))
    if "purpose" in given:
        files = [file for file in files if file.purpose == given["purpose"]]
    return _json(_page(FileList, files, given, MAX_FILES, MAX_FILES))


async def retrieve_file(request: Request) -> Response:
    """Return the description of a file."""
    return _json(_file(request))


async def content(request: Request) -> Response:
    """Return the bytes of a file."""
    store: FileStore = request.app.state.files
    file = _file(request)
    return FileResponse(store.path(file.id), media_type="application/octet-stream", filename=file.filename)


async def delete_file(request: Request) -> Response:
    """Delete a file that no unfinished batch reads."""
    store: FileStore = request.app.state.files
    batches: BatchJobs = request.app.state.batches
    file = _file(request)
    batches.check_unused(file.id)
    store.delete(request.scope.get(OWNER, b""), file.id)
    return _json(DeletedFile(file.id))


async def create_batch(request: Request) -> Response:
    """Answer the requests of an uploaded file."""
    batches: BatchJobs = request.app.state.batches
    body = await read_body(request, CreateBatch)
    return _json(await batches.create(request.scope.get(OWNER, b""), body))


async def list_batches(request: Request) -> Response:
    """Return a page of the key's batches, newest first."""
    batches: BatchJobs = request.app.state.batches
    given = _query(request, "after", "limit")
    return _json(_page(BatchList, batches.of_owner(request.scope.get(OWNER, b"")), given, 20, MAX_BATCHES))


async def retrieve_batch(request: Request) -> Response:
    """Return a batch: its status, and how many requests are done."""
    batches: BatchJobs = request.app.state.batches
    return _json(batches.find(request.scope.get(OWNER, b""), request.path_params["batch_id"]))


async def cancel_batch(request: Request) -> Response:
    """Cancel a batch. Its finished answers become its output file."""
    batches: BatchJobs = request.app.state.batches
    return _json(await batches.cancel(request.scope.get(OWNER, b""), request.path_params["batch_id"]))


ROUTES = [
    Route(UPLOADS, upload, methods=["POST"]),
    Route(UPLOADS, list_files),
    Route("/v1/files/{file_id}", retrieve_file),
    Route("/v1/files/{file_id}", delete_file, methods=["DELETE"]),
    Route("/v1/files/{file_id}/content", content),
    Route("/v1/batches", create_batch, methods=["POST"]),
    Route("/v1/batches", list_batches),
    Route("/v1/batches/{batch_id}", retrieve_batch),
    Route("/v1/batches/{batch_id}/cancel", cancel_batch, methods=["POST"]),
]


def _file(request: Request) -> FileObject:
    store: FileStore = request.app.state.files
    return store.find(request.scope.get(OWNER, b""), request.path_params["file_id"])


def _query(request: Request, *known: str) -> dict[str, str]:
    for name, value in request.query_params.items():
        if name not in known:
            raise RequestError(name, value, f"unknown query parameter; known: {', '.join(known)}")
    return dict(request.query_params)


def _page(
    kind: Callable[..., Any], oldest_first: Sequence[T], given: dict[str, str], default: int, most: int
) -> msgspec.Struct:
    """Return a page. given: the query's after, limit and order."""
    page, has_more = PageQuery.read(given, default, most).cut(oldest_first, lambda item: item.id, "one in this list")
    return kind(
        data=page, first_id=page[0].id if page else None, last_id=page[-1].id if page else None, has_more=has_more
    )


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
