"""Bodies of /v1/files and /v1/batches: OpenAI's objects as structs."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from jpaged.serving.schemas.requests import Label, SizeLimits

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "cancelling", "cancelled"
]  # fmt: skip


class FileObject(msgspec.Struct, kw_only=True):
    """A file. created_at: seconds since 1970."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: str = "processed"
    expires_at: None = None


class FileList(msgspec.Struct, kw_only=True):
    """A page of files."""

    object: str = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct):
    """Response of DELETE /v1/files/{file_id}."""

    id: str
    object: str = "file"
    deleted: bool = True


class CreateBatch(SizeLimits, kw_only=True):
    """Body of POST /v1/batches. completion_window: OpenAI's only value. A batch of this server never expires."""

    input_file_id: Label
    endpoint: Label
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Label, Label], Meta(max_length=16)] | None = None

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"output_expires_after": ()}


class BatchError(msgspec.Struct):
    """Why a batch failed. line: of the input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct):
    """`errors` of a batch."""

    data: list[BatchError]
    object: str = "list"


class RequestCounts(msgspec.Struct):
    """Requests of a batch: all, those with an answer, and those with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch. Times are seconds since 1970."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct, kw_only=True):
    """A page of batches."""

    object: str = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
