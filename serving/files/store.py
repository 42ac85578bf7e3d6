"""Files of /v1/files in a folder of the server. They stay when the server stops."""

import asyncio
import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import pathlib
import re
import secrets
import time
from collections.abc import Generator
from http import HTTPStatus
from typing import Literal, TypeVar

import msgspec

from jpaged.errors import RequestError, shown
from jpaged.serving.schemas.files import FileObject
from jpaged.serving.web.error_responses import APIError

logger = logging.getLogger("jpaged.serving")

T = TypeVar("T", bound=msgspec.Struct)

PIECE = 2**20  # bytes written at a time
_LEFT_OVER = re.compile(r"file-[0-9a-f]{48}(\.part|\.tmp)?")


@dataclasses.dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits of the files of all keys together. max_file_bytes: of one upload, as OpenAI's limit for batches."""

    max_files: int = 1_000
    max_bytes: int = 16 * 2**30
    max_file_bytes: int = 200 * 10**6


class _Record(msgspec.Struct):
    """The description of a file. owner: hash of the key that made it, in hexadecimal digits; empty without keys."""

    owner: str
    file: FileObject


class FileStore:
    """The files of a folder. A key can use only its own files. One server uses a folder at a time.

    The folder has `files/ID` with the bytes, `files/ID.json` with the description, and `batches` (see `BatchJobs`).
    """

    def __init__(self, folder: pathlib.Path, limits: FileLimits = FileLimits()):
        """Open a folder, or make it. Raises RequestError if it cannot be used, or another server uses it."""
        self.limits = limits
        self.batches = folder / "batches"
        self._folder = folder / "files"
        try:
            for one in (folder, self._folder, self.batches):
                one.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._lock: int | None = lock
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError("batch_folder", str(folder), "is used by another server: name another one") from None
        except OSError as error:
            raise RequestError("batch_folder", str(folder), f"cannot be used: {error.strerror}") from None
        self._records = {
            file_id: record for file_id, record in load(self._folder, _Record).items() if self.path(file_id).exists()
        }
        for path in self._folder.glob("file-*"):  # interrupted uploads, but no file with an unreadable record
            if _LEFT_OVER.fullmatch(path.name) and (path.suffix or not path.with_suffix(".json").exists()):
                path.unlink()
        self.num_bytes = sum(record.file.bytes for record in self._records.values())  # of whole files
        self.num_receiving = 0   # uploads that are being received
        self.bytes_received = 0  # of those uploads

    def close(self) -> None:
        """Let other servers use the folder. A second call does nothing."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def path(self, file_id: str) -> pathlib.Path:
        """Return the path of a file's bytes. file_id: of a file that exists."""
        return self._folder / file_id

    def find(self, owner: bytes, file_id: str) -> FileObject:
        """Return a file. Raises APIError 404 if this key has none of that id."""
        record = self._records.get(file_id)
        if record is None or record.owner != owner.hex():
            message = f"no such file: it was deleted, or never uploaded (id={shown(file_id)})"
            raise APIError(HTTPStatus.NOT_FOUND, message, param="file_id", code="file_not_found")
        return record.file

    def of_owner(self, owner: bytes) -> list[FileObject]:
        """Return the files of a key, oldest first."""
        return [record.file for record in self._records.values() if record.owner == owner.hex()]

    def delete(self, owner: bytes, file_id: str) -> None:
        """Delete a file. Raises APIError 404."""
        self.num_bytes -= self.find(owner, file_id).bytes
        del self._records[file_id]
        for path in (self.path(file_id).with_suffix(".json"), self.path(file_id)):
            path.unlink(missing_ok=True)

    def receive(self) -> "Upload":
        """Begin an upload. Raises APIError if there are too many files, or the disk is full."""
        self.check_number()
        with disk_errors():
            return Upload(self, self._folder)

    def check_number(self) -> None:
        """Raise APIError if the server has `max_files` files."""
        if len(self._records) + self.num_receiving >= self.limits.max_files:
            raise _full(f"the server keeps at most {self.limits.max_files:,} files")

    def check_room(self, size: int) -> None:
        """Raise APIError if files of `size` bytes do not fit into the folder's limit."""
        if self.num_bytes + self.bytes_received + size > self.limits.max_bytes:
            raise _full(f"the server keeps at most {self.limits.max_bytes:,} bytes of files")

    async def add(
        self, owner: str, file_id: str, made: pathlib.Path, filename: str, purpose: Literal["batch", "batch_output"]
    ) -> FileObject:
        """Move a file to the store, over one with its id. owner: in hex. An OSError (full disk) leaves it in place."""
        file = FileObject(id=file_id, bytes=0, created_at=int(time.time()), filename=filename, purpose=purpose)
        record = _Record(owner, file)
        await asyncio.to_thread(self._move, made, record)
        before = self._records.get(file_id)
        self.num_bytes += file.bytes - (before.file.bytes if before is not None else 0)
        self._records[file_id] = record
        return file

    def _move(self, made: pathlib.Path, record: _Record) -> None:
        target = self.path(record.file.id)
        record.file.bytes = made.stat().st_size
        made.replace(target)
        try:
            save(target.with_suffix(".json"), record)
        except OSError:
            target.replace(made)
            raise


class Upload:
    """A file that is being received. `close` removes what is not finished."""

    def __init__(self, store: FileStore, folder: pathlib.Path):
        self.id = new_id("file-")
        self.size = 0
        self._store = store
        self._path = folder / f"{self.id}.part"
        self._file = self._path.open("xb")
        self._waiting = bytearray()
        store.num_receiving += 1

    async def write(self, piece: bytes) -> None:
        """Append bytes. Raises APIError beyond the limits, or if the disk is full."""
        limit = self._store.limits.max_file_bytes
        if self.size + len(piece) > limit:
            message = f"the file is larger than {limit:,} bytes: divide it"
            raise APIError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, param="file", code="file_too_large")
        self._store.check_room(len(piece))
        self.size += len(piece)
        self._store.bytes_received += len(piece)
        self._waiting += piece
        if len(self._waiting) >= PIECE:
            await self._flush()

    async def finish(self, owner: bytes, filename: str) -> FileObject:
        """Add the file to the store."""
        await self._flush()
        with disk_errors():
            await asyncio.to_thread(os.fsync, self._file.fileno())
            return await self._store.add(owner.hex(), self.id, self._path, filename, "batch")

    def close(self) -> None:
        """End the upload."""
        self._store.num_receiving -= 1
        self._store.bytes_received -= self.size
        with contextlib.suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)

    async def _flush(self) -> None:
        data, self._waiting = bytes(self._waiting), bytearray()
        with disk_errors():
            await asyncio.to_thread(self._write, data)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()


def new_id(prefix: str) -> str:
    """Return a new id that cannot be guessed: 192 random bits."""
    return prefix + secrets.token_hex(24)


def save(path: pathlib.Path, record: msgspec.Struct) -> None:
    """Write a struct as JSON. A reader sees the old file or the new one, whole. Blocks until it is on the disk."""
    made = path.with_suffix(".tmp")
    try:
        with made.open("wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)
    except OSError:
        made.unlink(missing_ok=True)
        raise


def load(folder: pathlib.Path, kind: type[T]) -> dict[str, T]:
    """Return the structs that `save` has written into a folder, by name, oldest first. Unreadable ones are logged."""
    found: list[tuple[float, str, T]] = []
    for path in folder.glob("*.json"):
        try:
            found.append((path.stat().st_mtime, path.stem, msgspec.json.decode(path.read_bytes(), type=kind)))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.warning("%s cannot be read, and is left out: %s", path, error)
    return {name: record for _, name, record in sorted(found, key=lambda one: one[:2])}


@contextlib.contextmanager
def disk_errors() -> Generator[None]:
    """Raise APIError instead of the OSError of a full disk."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise _full("the disk of the server is full") from None


def is_full(error: OSError) -> bool:
    """Return True if the error says that the disk is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _full(reason: str) -> APIError:
    message = f"{reason}: delete some"
    return APIError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, param="file", code="storage_full")
