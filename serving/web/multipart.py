"""Reads a body of multipart/form-data piece by piece (RFC 7578), so that a large file is never in memory as a whole."""

import re
from collections.abc import AsyncGenerator, AsyncIterable
from typing import NamedTuple

from jpaged.errors import RequestError

MAX_HEAD = 8_192  # bytes of the headers of one part
MAX_PARTS = 32
_BOUNDARY = re.compile(r'multipart/form-data\s*;(?:.*;)?\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*(name|filename)=(?:"((?:[^"\\]|\\.)*)"|([^\s";]+))', re.IGNORECASE)


class FormPart(NamedTuple):
    """The beginning of a part: the field's name, and the name of its file if it is one."""

    name: str
    filename: str | None


def boundary_of(content_type: str) -> bytes | None:
    """Return the boundary that a Content-Type names; None for another type."""
    found = _BOUNDARY.match(content_type.strip())
    return (found[1] or found[2]).encode("latin-1") if found else None


async def read_form(chunks: AsyncIterable[bytes], boundary: bytes) -> AsyncGenerator[FormPart | bytes, None]:
    """Yield each part's beginning, then its data in pieces. Raises RequestError for an invalid body."""
    delimiter = b"\r\n--" + boundary
    buffer = bytearray(b"\r\n")  # so that the first delimiter matches too
    in_data, parts = True, 0
    preamble = 0  # bytes before the first part
    async for chunk in chunks:
        buffer += chunk
        while True:
            if in_data:
                end = buffer.find(delimiter)
                piece = bytes(buffer[:end] if end >= 0 else buffer[: 1 - len(delimiter)])
                if parts and piece:
                    yield piece
                elif not parts and (preamble := preamble + len(piece)) > MAX_HEAD:
                    raise _wrong(f"it has no boundary in its first {MAX_HEAD:,} bytes")
                del buffer[: end + len(delimiter) if end >= 0 else len(piece)]
                if end < 0:
                    break
                in_data = False
            if buffer.startswith(b"--"):
                return
            end = buffer.find(b"\r\n\r\n")
            if max(end, len(buffer) if end < 0 else 0) > MAX_HEAD or parts == MAX_PARTS:
                raise _wrong(f"a part has headers of more than {MAX_HEAD:,} bytes, or there are over {MAX_PARTS} parts")
            if end < 0:
                break
            yield _part(bytes(buffer[:end]))
            del buffer[: end + 4]
            in_data, parts = True, parts + 1
    raise _wrong("it ends before its last boundary")


def _part(head: bytes) -> FormPart:
    for line in head.split(b"\r\n"):
        name, _, value = line.decode("utf-8", errors="replace").partition(":")
        if name.strip().lower() == "content-disposition":
            found = {key.lower(): quoted or token for key, quoted, token in _PARAMETER.findall(value)}
            if "name" in found:
                return FormPart(found["name"], found.get("filename"))
    raise _wrong("a part has no name")


def _wrong(reason: str) -> RequestError:
    return RequestError("body", "a form", f"must be multipart/form-data: {reason}")
