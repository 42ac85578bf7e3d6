"""The files of `jpaged run-batch`: OpenAI's batch format, one JSON object per line.

The output file is also the record of what is done. A line is appended when its request has ended, so after a kill only
the last line can be incomplete. It is cut off, and the requests of the other lines are not run again.
"""

import codecs
import contextlib
import dataclasses
import fcntl
import functools
import os
import pathlib
import uuid
from collections.abc import Collection, Generator, Iterator
from http import HTTPStatus
from typing import Any, Literal

import msgspec

from jpaged.errors import JPagedError, RequestError, shown

MAX_ID = 512  # characters of a custom_id
MAX_LINE = 17 * 2**20  # bytes of a line of a file with limits; a body has at most 16 MiB
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the input file."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: Literal["POST"] = "POST"


class BatchResponse(msgspec.Struct):
    """`response` of an output line: the route's answer, also if it is an error."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchResult(msgspec.Struct):
    """One line of the output file."""

    id: str
    custom_id: str
    response: BatchResponse
    error: None = None

    @classmethod
    def of(cls, custom_id: str, status: int, request_id: str, body: bytes) -> "BatchResult":
        """Make a line with a new id."""
        response = BatchResponse(status, request_id, msgspec.Raw(body))
        return cls(f"batch_req_{uuid.uuid4().hex}", custom_id, response)


class _Status(msgspec.Struct, frozen=True):
    """The part of a response that says whether it is an error."""

    status_code: int = 0


class _Done(msgspec.Struct):
    """The part of an output line that says which request is done, and how it ended."""

    custom_id: str
    response: _Status = _Status()

    @property
    def failed(self) -> bool:
        """True if the answer is an error."""
        return self.response.status_code >= HTTPStatus.BAD_REQUEST


class _Detached(msgspec.Struct):
    """Fields that a body in a batch cannot have, because a batch has whole answers."""

    stream: Any = None
    background: Any = None


class BatchFileError(JPagedError):
    """An input or output file is wrong, or cannot be read or written. line: number of the wrong line."""

    def __init__(self, message: str, line: int | None = None):
        self.line = line
        super().__init__(message)


def read_requests(path: pathlib.Path, done: Collection[str] = ()) -> Iterator[BatchRequest]:
    """Yield the requests whose custom_id is not in `done`. Raises BatchFileError with the number of a bad line."""
    for number, line in _lines(path):
        request = _parse(path, number, line)
        if request.custom_id not in done:
            yield request


def check_requests(path: pathlib.Path, *, url: str | None = None, most: int | None = None) -> set[str]:
    """Check every line of an input file, and return the custom_ids.

    url:  of all lines. None: any.
    most: maximum number of requests. The limit of lines is twice this, of MAX_LINE bytes each. None: no limits.

    Raises BatchFileError with the number of the first wrong line, before anything runs. A body may still be wrong: its
    answer is then an error.
    """
    seen: dict[str, int] = {}
    for number, line in _lines(path, most=None if most is None else 2 * most):
        request = _parse(path, number, line)
        where = f"{path}, line {number}"
        if not 0 < len(request.custom_id) <= MAX_ID:
            raise BatchFileError(f"{where}: custom_id must have 1 to {MAX_ID} characters", number)
        if (first := seen.setdefault(request.custom_id, number)) != number:
            raise BatchFileError(f"{where}: custom_id {shown(request.custom_id)} is also that of line {first}", number)
        if url is not None and request.url != url:
            raise BatchFileError(f"{where}: url {shown(request.url)} is not the endpoint of the batch, {url}", number)
        if most is not None and len(seen) > most:
            raise BatchFileError(f"{where}: a batch has at most {most:,} requests: divide the file", number)
        try:
            detached = msgspec.json.decode(request.body, type=_Detached)
        except _DECODE_ERRORS:
            raise BatchFileError(f"{where}: body must be a JSON object", number) from None
        for name in detached.__struct_fields__:
            if getattr(detached, name):
                said = f"body has {name}: true, but a batch has whole answers: leave it out"
                raise BatchFileError(f"{where}: {said}", number)
    if not seen:
        raise BatchFileError(f"{path} has no requests")
    return set(seen)


def _lines(path: pathlib.Path, *, most: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (number, bytes) of each line that is not blank. Raises BatchFileError.

    most: maximum number of lines, blank ones included; a line then has at most MAX_LINE bytes. None: no limits.
    """
    longest = -1 if most is None else MAX_LINE + 1
    try:
        with path.open("rb", buffering=2**20) as file:
            for number, line in enumerate(iter(functools.partial(file.readline, longest), b""), 1):
                if most is not None and (number > most or len(line) > MAX_LINE):
                    said = f"the file has over {most:,} lines" if number > most else f"has over {MAX_LINE:,} bytes"
                    raise BatchFileError(f"{path}, line {number}: {said}: divide it", number)
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text.strip():
                    yield number, text
    except OSError as error:
        raise BatchFileError(f"{path} cannot be read: {error.strerror}") from None


def _parse(path: pathlib.Path, number: int, line: bytes) -> BatchRequest:
    try:
        return msgspec.json.decode(line, type=BatchRequest)
    except _DECODE_ERRORS as error:
        form = '{"custom_id": "...", "method": "POST", "url": "/v1/chat/completions", "body": {...}}'
        raise BatchFileError(f"{path}, line {number}: {error}. A line is {form}", number) from None


@dataclasses.dataclass
class ResultFile:
    """The output file of a batch, open for appending. Make it with `open_results`."""

    path: pathlib.Path
    done: set[str]  # custom_ids of its complete lines
    failed: int     # lines that are errors
    size: int       # bytes of complete lines
    _file: int      # descriptor

    def append(self, result: BatchResult) -> None:
        """Append a line. Raises BatchFileError if it cannot be written whole; then nothing is added."""
        line = msgspec.json.encode(result) + b"\n"
        left = line
        try:
            while left:  # a nearly full disk takes a part, and refuses the next
                left = left[os.write(self._file, left) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size)
            reason = f"{self.path} cannot be written: {error.strerror}. {len(self.done)} answers are in it"
            raise BatchFileError(f"{reason}: run the same command again to go on") from None
        self.size += len(line)
        self.failed += result.response.status_code >= HTTPStatus.BAD_REQUEST
        self.done.add(result.custom_id)

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        with contextlib.suppress(OSError):  # a pipe or a device has no disk
            os.fsync(self._file)


@contextlib.contextmanager
def open_results(path: pathlib.Path, expected: Collection[str]) -> Generator[ResultFile]:
    """Open an output file to continue it, or a new one.

    expected: custom_ids of the input file. An incomplete last line is cut off. Raises BatchFileError for a line that
    answers none of these requests, for a second answer to a request, or if another process writes the file.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise RequestError("output_file", str(path), f"cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BatchFileError(f"{path} is being written by another run-batch") from None
        results = ResultFile(path, set(), 0, 0, file)
        _read_finished(results, expected)
        with contextlib.suppress(OSError):
            os.ftruncate(file, results.size)
        yield results
    finally:
        os.close(file)


def _read_finished(results: ResultFile, expected: Collection[str]) -> None:
    """Count the complete lines of an output file."""
    for number, line in _lines(results.path):
        if not line.endswith(b"\n"):
            break  # the process was killed while it wrote this line
        results.size += len(line)
        try:
            line_done = msgspec.json.decode(line, type=_Done)
        except _DECODE_ERRORS:
            line_done = _Done("")  # which no request has
        custom_id = line_done.custom_id
        if custom_id not in expected or custom_id in results.done:
            what = "is not an answer to the input file" if custom_id not in expected else "is there twice"
            raise BatchFileError(f"{results.path}, line {number} {what}: name another output file", number)
        results.done.add(custom_id)
        results.failed += line_done.failed


def split_results(path: pathlib.Path, answers: pathlib.Path, errors: pathlib.Path) -> None:
    """Split the lines of an output file into a file of answers and a file of errors."""
    with answers.open("wb") as right, errors.open("wb") as wrong:
        for _, line in _lines(path):
            (wrong if msgspec.json.decode(line, type=_Done).failed else right).write(line)
