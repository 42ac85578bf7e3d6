"""KV of a prompt's first blocks in host memory: one engine computes it, another one adds it to its prefix cache.

Byte format: MAGIC, header length, JSON header, arrays of all blocks, SHA-256 of the rest. All is checked before use.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from jpaged.engine.kv_cache.block_pool import BlockName, block_digest
from jpaged.errors import RequestError

MAGIC = b"jpaged KV 1\n"
MOST_HEADER = 2**28
_DIGEST = hashlib.sha256().digest_size


@dataclasses.dataclass(frozen=True, slots=True)
class KVHandover:
    """Content of blocks, by their names in the prefix index."""

    layout: str                               # `Runner.kv_layout`, which must be equal in both engines
    names: tuple[BlockName, ...]              # of one kv_group after another, each in the order of the prompt
    blocks: tuple[tuple[np.ndarray, ...], ...]  # arrays of each block, in the order of `Runner.read_blocks`

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.names)

    def to_bytes(self) -> bytes:
        """Serialise the blocks for another process."""
        header = {
            "layout": self.layout,
            "names": [[name.digest.hex(), name.parent.hex(), name.tokens.hex(), name.kv_group] for name in self.names],
            "arrays": [[str(array.dtype), list(array.shape)] for array in (self.blocks[0] if self.blocks else ())],
        }
        text = json.dumps(header).encode()
        arrays = [np.ascontiguousarray(array).tobytes() for block in self.blocks for array in block]
        body = b"".join([MAGIC, len(text).to_bytes(8, "little"), text, *arrays])
        return body + hashlib.sha256(body).digest()

    @classmethod
    def from_bytes(cls, data: bytes) -> "KVHandover":
        """Read what `to_bytes` wrote. Raises RequestError for anything else."""
        body, digest, given = memoryview(data)[:-_DIGEST], bytes(data[-_DIGEST:]), f"{len(data):,} bytes"
        if not data.startswith(MAGIC):
            raise RequestError("data", given, "is not KV that LLM.take_kv returned")
        if hashlib.sha256(body).digest() != digest:
            raise RequestError("data", given, "is damaged: its checksum differs")
        start = len(MAGIC) + 8
        length = int.from_bytes(body[len(MAGIC) : start], "little")
        try:
            header = json.loads(bytes(body[start : start + min(length, MOST_HEADER)]))
            names = tuple(_name(*each) for each in header["names"])
            shapes = [(_dtype(dtype), tuple(map(int, shape))) for dtype, shape in header["arrays"]]
            blocks = tuple(_arrays(body[start + length :], shapes, len(names)))
            return cls(str(header["layout"]), names, blocks)
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError("data", given, f"is not KV that LLM.take_kv returned: {error}") from None


def _name(digest: str, parent: str, tokens: str, kv_group: int) -> BlockName:
    name = BlockName(bytes.fromhex(digest), bytes.fromhex(parent), bytes.fromhex(tokens), int(kv_group))
    if block_digest(name.parent, name.tokens) != name.digest:
        raise ValueError(f"the block {digest} has other tokens")
    return name


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _arrays(
    body: memoryview, shapes: Sequence[tuple[np.dtype, tuple[int, ...]]], count: int
) -> list[tuple[np.ndarray, ...]]:
    """The arrays of `count` blocks. Raises ValueError if `body` has the wrong length."""
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in shapes]
    if count * sum(sizes) != len(body):
        raise ValueError(f"{count} blocks of {sum(sizes):,} bytes, but {len(body):,} bytes")
    found, at = [], 0
    for _ in range(count):
        arrays = []
        for (dtype, shape), size in zip(shapes, sizes, strict=True):
            arrays.append(np.frombuffer(body[at : at + size], dtype).reshape(shape))
            at += size
        found.append(tuple(arrays))
    return found
