"""Encodes large answers in pieces, so that no piece stops the event loop for more than a few milliseconds.

A list of 100,000 log-probabilities takes 0.5 s to convert and to encode. `list_pieces` does it for a few hundred
items at a time. Other requests run in between.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

ITEMS = 256  # converted and encoded at once: at most 3 ms with 20 log-probabilities each
SENT_BYTES = 2**16  # parts are joined up to this size: each is a system call
_MARK = b"\0"  # stands for Pieces while the values around them are encoded. JSON never contains this byte


class Pieces:
    """Encoded JSON that `encode` accepts anywhere in a struct. Not a dataclass, which msgspec would encode itself."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[bytes, ...]):
        self.parts = parts


async def list_pieces(
    items: Sequence[T], convert: Callable[[Sequence[T], int], Any], at_once: int = ITEMS
) -> Pieces:
    """Encode a list. convert: maps at most `at_once` items, and the index of the first one, to JSON values."""
    parts = [b"["]
    for start in range(0, len(items), at_once):
        encoded = msgspec.json.encode(convert(items[start : start + at_once], start))
        parts.append((b"," if start else b"") + encoded[1:-1])
        await asyncio.sleep(0)
    parts.append(b"]")
    return Pieces(tuple(parts))


async def plain_pieces(items: Sequence[Any]) -> Pieces:
    """Encode a list of values that need no conversion."""
    return await list_pieces(items, lambda some, _: some)


def encode(value: Any) -> list[bytes]:
    """Encode a struct that may contain Pieces. Returns its JSON in parts."""
    found: list[Pieces] = []

    def hook(unknown: Any) -> msgspec.Raw:
        if not isinstance(unknown, Pieces):
            raise NotImplementedError(f"{type(unknown).__name__} has no JSON")
        found.append(unknown)
        return msgspec.Raw(_MARK)

    first, *others = msgspec.json.encode(value, enc_hook=hook).split(_MARK)
    parts = [first]
    for pieces, after in zip(found, others, strict=True):
        parts += (*pieces.parts, after)
    return parts


class JSONPieces(Response):
    """A response with a JSON body in parts. The client's connection sets the pace, as for any response."""

    media_type = "application/json"

    def __init__(self, value: Any):
        self._parts = _joined(encode(value))
        super().__init__(headers={"Content-Length": str(sum(map(len, self._parts)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _joined(parts: list[bytes]) -> list[bytes]:
    """Join neighbours, up to SENT_BYTES each."""
    joined: list[bytes] = []
    waiting: list[bytes] = []
    size = 0
    for part in parts:
        if size + len(part) > SENT_BYTES and waiting:
            joined.append(b"".join(waiting))
            waiting, size = [], 0
        waiting.append(part)
        size += len(part)
    return [*joined, b"".join(waiting)]
