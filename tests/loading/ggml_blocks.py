"""Decodes ggml's quantized blocks value by value, from the format's definition (ggml-quants.c), without gguf.quants.

Every function takes the bytes of one block and returns its values as Python floats.
"""

import struct
from collections.abc import Callable

import gguf
import ml_dtypes
import numpy as np


def _half(data: bytes, at: int) -> float:
    return float(np.frombuffer(data, "<f2", 1, at)[0])


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def _f32(data: bytes) -> list[float]:
    return [struct.unpack("<f", data)[0]]


def _f16(data: bytes) -> list[float]:
    return [_half(data, 0)]


def _bf16(data: bytes) -> list[float]:
    return [struct.unpack("<f", b"\0\0" + data)[0]]


def _q8_0(data: bytes) -> list[float]:
    return [_half(data, 0) * _signed(byte) for byte in data[2:]]


def _q4_0(data: bytes) -> list[float]:
    scale, codes = _half(data, 0), data[2:]
    return [scale * ((byte & 15) - 8) for byte in codes] + [scale * ((byte >> 4) - 8) for byte in codes]


def _q4_1(data: bytes) -> list[float]:
    scale, low, codes = _half(data, 0), _half(data, 2), data[4:]
    return [scale * (byte & 15) + low for byte in codes] + [scale * (byte >> 4) + low for byte in codes]


def _q5_0(data: bytes) -> list[float]:
    scale, high, codes = _half(data, 0), int.from_bytes(data[2:6], "little"), data[6:]
    nibbles = [byte & 15 for byte in codes] + [byte >> 4 for byte in codes]
    return [scale * ((nibble | (high >> i & 1) << 4) - 16) for i, nibble in enumerate(nibbles)]


def _scale_and_low(packed: bytes, j: int) -> tuple[int, int]:
    """Return scale and minimum of part j of eight, with six bits each, from twelve bytes."""
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4


def _q4_k(data: bytes) -> list[float]:
    return _with_lows(data, b"\0" * 32, data[16:])


def _q5_k(data: bytes) -> list[float]:
    return _with_lows(data, data[16:48], data[48:])


def _with_lows(data: bytes, high: bytes, codes: bytes) -> list[float]:
    scale, low, packed, out = _half(data, 0), _half(data, 2), data[4:16], []
    for part in range(8):
        s, m = _scale_and_low(packed, part)
        for i in range(32):
            byte = codes[part // 2 * 32 + i]
            code = (byte >> 4 if part % 2 else byte & 15) + 16 * (high[i] >> part & 1)
            out.append(scale * s * code - low * m)
    return out


def _q6_k(data: bytes) -> list[float]:
    low, high, scales, scale = data[:128], data[128:192], data[192:208], _half(data, 208)
    out = []
    for i in range(256):
        half, within = divmod(i, 128)
        quarter, column = divmod(within, 32)
        nibble = low[half * 64 + quarter % 2 * 32 + column] >> (4 if quarter > 1 else 0) & 15
        top = high[half * 32 + column] >> 2 * quarter & 3
        out.append(scale * _signed(scales[i // 16]) * ((nibble | top << 4) - 32))
    return out


# name -> values per block, bytes per block, byte positions of its half-precision scales, decoder
BLOCKS: dict[str, tuple[int, int, tuple[int, ...], Callable[[bytes], list[float]]]] = {
    "F32": (1, 4, (), _f32), "F16": (1, 2, (), _f16), "BF16": (1, 2, (), _bf16),
    "Q8_0": (32, 34, (0,), _q8_0), "Q4_0": (32, 18, (0,), _q4_0), "Q4_1": (32, 20, (0, 2), _q4_1),
    "Q5_0": (32, 22, (0,), _q5_0), "Q4_K": (256, 144, (0, 2), _q4_k), "Q5_K": (256, 176, (0, 2), _q5_k),
    "Q6_K": (256, 210, (208,), _q6_k),
}  # fmt: skip


def random_blocks(kind: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Return the bytes of a random tensor, uint8[rows, bytes]: random codes, scales around 0.01."""
    values, size, halves, _ = BLOCKS[kind]
    count = rows * columns // values
    if not halves:
        dtype = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[kind]
        return rng.normal(size=(rows, columns)).astype(dtype).view(np.uint8)
    blocks = rng.integers(0, 256, (count, size), np.uint8)
    for at in halves:
        blocks[:, at : at + 2] = rng.normal(scale=0.01, size=(count, 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def values_of(kind: str, data: np.ndarray) -> np.ndarray:
    """Decode rows of bytes to float64[rows, columns]."""
    size, read = BLOCKS[kind][1], BLOCKS[kind][3]
    rows = [bytes(row) for row in data]
    return np.array([[x for at in range(0, len(r), size) for x in read(r[at : at + size])] for r in rows])


# Bytes of the half-precision factors of a block
HALVES = {  # others: at byte 0
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82)
}  # fmt: skip


def blocks_of(kind: str, count: int, halves: Callable[[np.random.Generator, int], np.ndarray]) -> np.ndarray:
    """Random blocks, uint8[count, bytes]. A quarter has only the smallest or the largest codes and scales."""
    rng, size = np.random.default_rng(count), gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = rng.integers(0, 256, (count, size), np.uint8)
    blocks[::4] = rng.choice(np.array([0, 0x80, 0x7F, 0xFF], np.uint8), (len(blocks[::4]), 1))
    for at in HALVES.get(kind, (0,)):
        blocks[:, at : at + 2] = halves(rng, count)[:, None].view(np.uint8)
    return blocks
