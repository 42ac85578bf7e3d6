"""Unpacks ggml's quantised blocks into a `QuantizedWeight` on the host, without dequantising them.

A block has 32 weights. In types with names that end in K, a block has 256 weights, in groups of 16 or 32 with small
integer scales, and one half-precision factor for all its scales. In memory, in the layout "plain":

| type | codes                    | group | scales         | mins           | file, bits a weight |
|------|--------------------------|-------|----------------|----------------|---------------------|
| Q8_0 | int8                     | 32    | float16        |                | 8.5                 |
| Q4_0 | uint8 0 to 15, zero 8    | 32    | float16        |                | 4.5                 |
| Q4_1 | uint8 0 to 15            | 32    | float16        | float16        | 5                   |
| Q5_0 | int8 -16 to 15           | 32    | float16        |                | 5.5                 |
| Q5_1 | int8 0 to 31             | 32    | float16        | float16        | 6                   |
| Q4_K | uint8 0 to 15            | 32    | uint8, float32 | uint8, float32 | 4.5                 |
| Q5_K | int8 0 to 31             | 32    | uint8, float32 | uint8, float32 | 5.5                 |
| Q6_K | int8 -32 to 31           | 16    | int8, float32  |                | 6.5625              |

"uint8, float32": an integer for each group, and a factor for each block.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np

from pallas_kernels import QuantizedWeight

_NONE = np.empty((0, 0))
_HALF = np.dtype("<f2")
_CHUNK = 1 << 16  # weights unpacked at once: the temporaries then fit into the CPU's cache


@dataclasses.dataclass(frozen=True, slots=True)
class _BlockType:
    """One of ggml's types, and the arrays of its `QuantizedWeight`."""

    weights: int  # of a block
    size: int     # bytes of a block
    kind: str     # of QuantizedWeight
    group: int    # weights of a group
    scales: Any   # dtype
    mins: Any     # dtype; None: the type has no minima
    unpack: Callable[[np.ndarray, "_Part"], None]  # (uint8[n, size], part): write n blocks to the part's arrays

    @property
    def has_outer(self) -> bool:
        """True if the groups' scales have a common factor in each block."""
        return np.issubdtype(self.scales, np.integer)


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Views of a `QuantizedWeight`'s arrays for n blocks, [n, entries of a block] each; empty if the type has none."""

    codes: np.ndarray
    scales: np.ndarray
    outer: np.ndarray
    mins: np.ndarray
    outer_mins: np.ndarray


def quantized(raw: np.ndarray, kind: str, shape: tuple[int, ...]) -> QuantizedWeight | None:
    """Unpack the bytes of a tensor to numpy arrays. None: the type is not in the table above.

    raw:   uint8[rows, bytes of a row].
    kind:  ggml's name of the type.
    shape: [..., out, in], of the weights. All axes but the last have `rows` entries.

    `dequantize` of the result in float32, outside jit, has the bits of `gguf.quants.dequantize`, except for the sign
    of zeros. Both multiply scale and factor first, then the code; another order may change the last bit. A compiled
    program may fuse the product with the subtraction of the minimum, and round once instead of twice.
    Raises ValueError for a block with a factor that is NaN or infinite.
    """
    if (known := _TYPES.get(kind)) is None:
        return None
    weight = _weight(known, shape, np.empty)
    blocks = np.ascontiguousarray(raw).reshape(-1, known.size)
    step = _CHUNK // known.weights
    for start in range(0, len(blocks), step):
        some = blocks[start : start + step]
        known.unpack(some, _part(weight, start, len(some), len(blocks)))
    factors = (weight.outer, weight.outer_mins) if known.has_outer else (weight.scales, weight.mins)
    for factor in factors:  # one number for 32 or 256 weights
        if factor is not None and not (finite := np.isfinite(factor)).all():
            block = int(np.flatnonzero(~finite)[0])
            raise ValueError(f"the factor {factor.reshape(-1)[block]} in block {block} (factors must be finite)")
    return weight


def quantized_shape(kind: str, shape: tuple[int, ...]) -> QuantizedWeight | None:
    """As `quantized`, with a jax.ShapeDtypeStruct in place of each array."""
    known = _TYPES.get(kind)
    return None if known is None else _weight(known, shape, jax.ShapeDtypeStruct)


def _weight(known: _BlockType, shape: tuple[int, ...], make: Callable[..., Any]) -> QuantizedWeight:
    """Return a weight with arrays from make(shape, dtype)."""
    *out, inputs = shape
    groups, blocks = (*out, inputs // known.group), (*out, inputs // known.weights)
    has_mins = known.mins is not None
    return QuantizedWeight(
        codes=make(tuple(shape), np.dtype(np.uint8 if known.kind == "int4" else np.int8)),
        scales=make(groups, np.dtype(known.scales)),
        zeros=None,
        outer=make(blocks, np.dtype(np.float32)) if known.has_outer else None,
        mins=make(groups, np.dtype(known.mins)) if has_mins else None,
        outer_mins=make(blocks, np.dtype(np.float32)) if known.has_outer and has_mins else None,
        order=None,
        kind=known.kind,
        shape=tuple(shape),
        dtype=np.dtype(ml_dtypes.bfloat16),
        activations="float",
    )


def _part(weight: QuantizedWeight, start: int, count: int, blocks: int) -> _Part:
    """Return views for `count` blocks from block `start`. blocks: number of blocks of the whole weight."""
    arrays = (weight.codes, weight.scales, weight.outer, weight.mins, weight.outer_mins)
    return _Part(*(_NONE if array is None else array.reshape(blocks, -1)[start : start + count] for array in arrays))


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The half-precision number at this byte of each block, float16[n, 1]."""
    return blocks[:, at : at + 2].view(_HALF)


def _nibbles(packed: np.ndarray, codes: np.ndarray, size: int) -> None:
    """Write 4-bit codes, one per byte. `size` bytes have `size` codes in the low halves, the next in the high ones."""
    parts = packed.reshape(len(packed), -1, size)
    wide = codes.view(np.uint8).reshape(len(packed), -1, 2, size)
    np.bitwise_and(parts, 15, out=wide[:, :, 0])
    np.right_shift(parts, 4, out=wide[:, :, 1])


def _q8_0(blocks: np.ndarray, part: _Part) -> None:
    part.scales[...] = _half(blocks, 0)
    part.codes[...] = blocks[:, 2:].view(np.int8)


def _q4_0(blocks: np.ndarray, part: _Part) -> None:
    part.scales[...] = _half(blocks, 0)
    _nibbles(blocks[:, 2:], part.codes, 16)


def _q4_1(blocks: np.ndarray, part: _Part) -> None:
    part.scales[...] = _half(blocks, 0)
    part.mins[...] = -_half(blocks, 2)  # ggml adds it, QuantizedWeight subtracts it: exact both ways
    _nibbles(blocks[:, 4:], part.codes, 16)


def _q5_0(blocks: np.ndarray, part: _Part) -> None:
    part.scales[...] = _half(blocks, 0)
    _five_bits(blocks[:, 2:], part.codes)
    part.codes[...] -= 16


def _q5_1(blocks: np.ndarray, part: _Part) -> None:
    part.scales[...] = _half(blocks, 0)
    part.mins[...] = -_half(blocks, 2)
    _five_bits(blocks[:, 4:], part.codes)


def _five_bits(packed: np.ndarray, codes: np.ndarray) -> None:
    """Write 5-bit codes: 4 bytes have the codes' fifth bits, in order, and the next 16 bytes the low four bits."""
    _nibbles(packed[:, 4:], codes, 16)
    codes |= (np.unpackbits(packed[:, :4], axis=1, bitorder="little") << 4).view(np.int8)


def _q4_k(blocks: np.ndarray, part: _Part) -> None:
    _scales_and_mins(blocks, part)
    _nibbles(blocks[:, 16:], part.codes, 32)


def _q5_k(blocks: np.ndarray, part: _Part) -> None:
    _scales_and_mins(blocks, part)
    _nibbles(blocks[:, 48:], part.codes, 32)
    fifth, by_group = blocks[:, 16:48], part.codes.view(np.uint8).reshape(-1, 8, 32)
    for group in range(8):  # bit `group` of byte i belongs to weight i of the group
        by_group[:, group] |= (fifth >> group & 1) << 4


def _scales_and_mins(blocks: np.ndarray, part: _Part) -> None:
    """Write both levels of Q4_K and Q5_K: two factors, then scales and minima with 6 bits each in 12 bytes."""
    part.outer[...], part.outer_mins[...] = _half(blocks, 0), _half(blocks, 2)
    scales, mins, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    part.scales[:, :4], part.mins[:, :4] = scales & 63, mins & 63
    part.scales[:, 4:] = rest & 15 | scales >> 6 << 4
    part.mins[:, 4:] = rest >> 4 | mins >> 6 << 4


def _q6_k(blocks: np.ndarray, part: _Part) -> None:
    part.scales[...] = blocks[:, 192:208].view(np.int8)
    part.outer[...] = _half(blocks, 208)
    _nibbles(blocks[:, :128], part.codes, 64)
    top, wide = blocks[:, 128:192].reshape(-1, 2, 32), part.codes.view(np.uint8).reshape(-1, 2, 4, 32)
    for i in range(4):
        wide[:, :, i] |= (top >> 2 * i & 3) << 4
    part.codes[...] -= 32


_F16, _U8 = np.float16, np.uint8
_TYPES = {
    "Q8_0": _BlockType(32, 34, "int8", 32, _F16, None, _q8_0),
    "Q4_0": _BlockType(32, 18, "int4", 32, _F16, None, _q4_0),
    "Q4_1": _BlockType(32, 20, "int4", 32, _F16, _F16, _q4_1),
    "Q5_0": _BlockType(32, 22, "int8", 32, _F16, None, _q5_0),
    "Q5_1": _BlockType(32, 24, "int8", 32, _F16, _F16, _q5_1),
    "Q4_K": _BlockType(256, 144, "int4", 32, _U8, _U8, _q4_k),
    "Q5_K": _BlockType(256, 176, "int8", 32, _U8, _U8, _q5_k),
    "Q6_K": _BlockType(256, 210, "int8", 16, np.int8, None, _q6_k),
}
KEPT = tuple(_TYPES)  # names of the types that `quantized` unpacks
