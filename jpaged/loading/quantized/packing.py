"""Unpacks codes of 1 to 8 bits from 32-bit words."""

import math

import numpy as np
from jaxtyping import Int, UInt8

WORD = 32  # bits
# bits -> for each byte, its codes, one per byte, as one number. A lookup takes 1.0 ns per code, shifting took 1.6 ns.
_CODES = {
    bits: (np.arange(256)[:, None] >> np.arange(0, 8, bits) & 2**bits - 1).astype(np.uint8).view(f"u{8 // bits}")[:, 0]
    for bits in (1, 2, 4)
}


def words_of(count: int, bits: int) -> int:
    """Number of words that hold `count` codes."""
    return -(-count * bits // WORD)


def unpack_rows(words: Int[np.ndarray, "rows words"], bits: int, count: int) -> UInt8[np.ndarray, "rows _"]:
    """Return the first `count` codes of each row. A row is a stream of bits: code i starts at bit i * bits."""
    stream = np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)
    if bits == 8:
        return stream[:, :count]
    if bits in _CODES:
        return _CODES[bits][stream].view(np.uint8)[:, :count]
    step = bits // math.gcd(bits, 8)  # bytes after which codes begin at the first bit of a byte again
    full = -(-stream.shape[1] // step) * step
    if full != stream.shape[1]:
        stream = np.pad(stream, ((0, 0), (0, full - stream.shape[1])))
    by_step = stream.reshape(len(stream), -1, step)
    if step > 1:
        wide = np.uint32 if step <= 4 else np.uint64
        joined = by_step.astype(wide) << (8 * np.arange(step)).astype(wide)
        by_step = np.bitwise_or.reduce(joined, 2, keepdims=True)
    codes = np.empty((len(stream), by_step.shape[1], 8 * step // bits), np.uint8)
    for i in range(codes.shape[2]):
        codes[:, :, i] = by_step[:, :, 0] >> by_step.dtype.type(i * bits) & by_step.dtype.type(2**bits - 1)
    return codes.reshape(len(stream), -1)[:, :count]


def unpack_columns(words: Int[np.ndarray, "words columns"], bits: int, count: int) -> UInt8[np.ndarray, "columns _"]:
    """Return the first `count` codes of each column, transposed."""
    return unpack_rows(words.T, bits, count)
