"""The files of `jpaged run-batch`: OpenAI's batch format, one JSON object per line.

The output file is also the record of what is done. A line is appended when its request has ended, so after a kill only
the last line can be incomplete. It is cut off, and the requests of the other lines are not run again.
"""

import codecs
import contextlib
import dataclasses
import fcntl
import os
import pathlib
import uuid
from collections.abc import Collection, Generator, Iterator
from typing import Any, Literal

import msgspec

from jpaged.errors import JPagedError, RequestError

MAX_ID = 512  # characters of a custom_id


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


class _Done(msgspec.Struct):
    """The part of an output line that says which request is done."""

    custom_id: str


class _Detached(msgspec.Struct):
    """Fields of a body that a batch cannot have: the answer would not be whole."""

    stream: Any = None
    background: Any = None


class BatchFileError(JPagedError):
    """An input or output file is wrong, or cannot be read or written."""


def read_requests(path: pathlib.Path, done: Collection[str] = ()) -> Iterator[BatchRequest]:
    """Yield the requests of an input file whose custom_id is not in `done`. Blank lines are skipped.

    Raises BatchFileError with the number of a line that is not a batch request.
    """
    for number, line in _lines(path):
        request = _parse(path, number, line)
        if request.custom_id not in done:
            yield request


def check_requests(path: pathlib.Path) -> set[str]:
    """Check every line of an input file, and return the custom_ids.

    Raises BatchFileError with the number of the first wrong line, before anything runs. What a line asks for may still
    be wrong: its answer is an error then.
    """
    seen: dict[str, int] = {}
    for number, line in _lines(path):
        request = _parse(path, number, line)
        where = f"{path}, line {number}"
        if not 0 < len(request.custom_id) <= MAX_ID:
            raise BatchFileError(f"{where}: custom_id must have 1 to {MAX_ID} characters")
        if (first := seen.setdefault(request.custom_id, number)) != number:
            raise BatchFileError(f"{where}: custom_id {request.custom_id!r} is also that of line {first}")
        try:
            detached = msgspec.json.decode(request.body, type=_Detached)
        except msgspec.DecodeError:
            raise BatchFileError(f"{where}: body must be a JSON object") from None
        for name in detached.__struct_fields__:
            if getattr(detached, name):
                raise BatchFileError(f"{where}: body has {name}: true, but a batch has whole answers: leave it out")
    if not seen:
        raise BatchFileError(f"{path} has no requests")
    return set(seen)


def _lines(path: pathlib.Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, with their numbers."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text.strip():
                    yield number, text
    except OSError as error:
        raise BatchFileError(f"{path} cannot be read: {error.strerror}") from None


def _parse(path: pathlib.Path, number: int, line: bytes) -> BatchRequest:
    try:
        return msgspec.json.decode(line, type=BatchRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        form = '{"custom_id": "...", "method": "POST", "url": "/v1/chat/completions", "body": {...}}'
        raise BatchFileError(f"{path}, line {number}: {error}. A line is {form}") from None


@dataclasses.dataclass
class ResultFile:
    """The output file of a batch, open for appending. Make it with `open_results`."""

    path: pathlib.Path
    done: set[str]  # custom_ids of the lines that are there
    _file: int      # descriptor
    _size: int      # bytes of complete lines

    def append(self, result: BatchResult) -> None:
        """Append a line. Raises BatchFileError if it cannot be written whole; then nothing is added."""
        line = msgspec.json.encode(result) + b"\n"
        left = line
        try:
            while left:  # a nearly full disk takes a part, and refuses the next
                left = left[os.write(self._file, left) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            reason = f"{self.path} cannot be written: {error.strerror}. {len(self.done)} answers are in it"
            raise BatchFileError(f"{reason}: run the same command again to go on") from None
        self._size += len(line)
        self.done.add(result.custom_id)

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        with contextlib.suppress(OSError):  # a pipe or a device has no disk
            os.fsync(self._file)


@contextlib.contextmanager
def open_results(path: pathlib.Path, expected: Collection[str]) -> Generator[ResultFile]:
    """Open an output file to continue it, or a new one.

    expected: custom_ids of the input file. An incomplete last line is cut off. Raises BatchFileError if the file has
    a line that is not an answer to one of these requests, or two answers to one, or if another process writes it.
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
        done, size = _finished(path, expected)
        with contextlib.suppress(OSError):
            os.ftruncate(file, size)
        yield ResultFile(path, done, file, size)
    finally:
        os.close(file)


def _finished(path: pathlib.Path, expected: Collection[str]) -> tuple[set[str], int]:
    """Return the custom_ids of the complete lines of an output file, and the bytes of these lines."""
    done: set[str] = set()
    size = 0
    for number, line in _lines(path):
        if not line.endswith(b"\n"):
            break  # the process was killed while it wrote this line
        size += len(line)
        try:
            custom_id = msgspec.json.decode(line, type=_Done).custom_id
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            custom_id = ""  # which no request has
        if custom_id not in expected or custom_id in done:
            what = "is not an answer to the input file" if custom_id not in expected else "is there twice"
            raise BatchFileError(f"{path}, line {number} {what}: name another output file")
        done.add(custom_id)
    return done, size
