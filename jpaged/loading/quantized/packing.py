"""Unpacks codes of 2, 3, 4 and 8 bits from 32-bit words."""

import numpy as np
from jaxtyping import Int, UInt8

WORD = 32  # bits
# The codes of each byte, one a byte, as one number. Looking them up takes 1.0 ns a code, shifting took 1.6.
_CODES = {
    bits: (np.arange(256)[:, None] >> np.arange(0, 8, bits) & 2**bits - 1).astype(np.uint8).view(f"u{8 // bits}")[:, 0]
    for bits in (2, 4)
}


def words_of(count: int, bits: int) -> int:
    """Words that hold `count` codes."""
    return -(-count * bits // WORD)


def unpack_rows(words: Int[np.ndarray, "rows words"], bits: int, count: int) -> UInt8[np.ndarray, "rows _"]:
    """The first `count` codes of each row. A row is a stream of bits: code i has the bits from i * bits upwards."""
    stream = np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)
    if bits == 8:
        return stream[:, :count]
    if bits in _CODES:
        return _CODES[bits][stream].view(np.uint8)[:, :count]
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 3)))  # 3 bytes hold 8 codes of 3 bits
    joined = stream.reshape(len(stream), -1, 3).astype(np.uint32) << np.array([0, 8, 16], np.uint32)
    codes = np.bitwise_or.reduce(joined, 2, keepdims=True) >> np.arange(0, 24, 3, dtype=np.uint32) & 7
    return codes.astype(np.uint8).reshape(len(stream), -1)[:, :count]


def unpack_columns(words: Int[np.ndarray, "words columns"], bits: int, count: int) -> UInt8[np.ndarray, "columns _"]:
    """The first `count` codes of each column, transposed."""
    return unpack_rows(words.T, bits, count)
