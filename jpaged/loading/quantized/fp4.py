"""Weights in fp4 (E2M1) with the scales of NVFP4 or MXFP4, from the tensors of a checkpoint to `QuantizedWeight`.

Both formats pack two codes a byte along the inputs: the low half is the even input. The results have the layout
"plain", numpy arrays on the host and the dtype bfloat16.

NVFP4: groups of 16, a scale in e4m3fn each, and one float32 for the tensor.
MXFP4: groups of 32, a power of two each, as a byte (E8M0, bias 127). OCP Microscaling Formats 1.0.
"""

from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from pallas_kernels import QuantizedWeight

NVFP4_GROUP, MXFP4_GROUP = 16, 32
_E4M3, _BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
_BIAS, _NAN = 127, 255
# The scales of MXFP4, by byte, in bfloat16. It has all powers of two from 2^-127 to 2^127. It costs 16 bits for 32
# codes, so a weight has 4.5 bits instead of 4.25. float8_e8m0fnu would need 8, but we know only that XLA's CPU back
# end converts it (JAX 0.10.2 and 0.11.2). Triton and Mosaic need not. XLA on CPU rounds numbers below 2^-126 to 0 in a
# product: the weights of byte 0, and those of code 0.5 with byte 1.
_POWERS = np.ldexp(np.float32(1), np.arange(_NAN) - _BIAS).astype(_BF16)


def nvfp4(packed: np.ndarray, scale: np.ndarray, global_scale: np.ndarray, *, divides: bool) -> QuantizedWeight:
    """Weights in NVFP4.

    packed:       uint8[..., out, in / 2].
    scale:        float8_e4m3fn[..., out, in / 16].
    global_scale: float32, one number.
    divides:      True if the scales are divided by it (compressed-tensors: weight_global_scale), False if they are
                  multiplied by it (ModelOpt: weight_scale_2).

    Raises ValueError for other dtypes or shapes, for a scale that is NaN, and for a global scale that is not a
    positive number.
    """
    _check("scale", scale, _E4M3, _check_packed(packed, NVFP4_GROUP))
    if np.isnan(scale).any():
        at = [int(i) for i in np.argwhere(np.isnan(scale))[0]]
        raise ValueError(f"scale{at} is NaN: it must be a number; the checkpoint is damaged, fetch it again")
    if global_scale.dtype != np.float32 or global_scale.size != 1:
        found = f"{global_scale.dtype}{list(global_scale.shape)}"
        raise ValueError(f"global_scale is {found}: it must be float32[1]")
    factor = global_scale.reshape(())
    if not (np.isfinite(factor) and factor > 0):
        raise ValueError(f"global_scale={factor}: it must be a positive number; fetch the checkpoint again")
    outer = np.full((*packed.shape[:-1], 1), factor, np.float32)
    return _weight(_unpacked(packed), scale, outer, divides=divides)


def nvfp4_shape(packed: Sequence[int], *, divides: bool) -> QuantizedWeight:
    """As `nvfp4`, with a jax.ShapeDtypeStruct in place of each array. packed: its shape, [..., out, in / 2]."""
    outer = jax.ShapeDtypeStruct((*packed[:-1], 1), np.float32)
    return _weight(*_shapes(packed, NVFP4_GROUP, _E4M3), outer, divides=divides)


def mxfp4(packed: np.ndarray, scale: np.ndarray) -> QuantizedWeight:
    """Weights in MXFP4. The scales become bfloat16.

    packed: uint8[..., out, in / 2].
    scale:  uint8[..., out, in / 32], E8M0.

    Raises ValueError for other dtypes or shapes, and for a scale of 255, which means NaN.
    """
    _check("scale", scale, np.dtype(np.uint8), _check_packed(packed, MXFP4_GROUP))
    if (scale == _NAN).any():
        at = [int(i) for i in np.argwhere(scale == _NAN)[0]]
        raise ValueError(f"scale{at}={_NAN}, which means NaN: it must be at most 254; fetch the checkpoint again")
    return _weight(_unpacked(packed), _POWERS[scale], None, divides=False)


def mxfp4_shape(packed: Sequence[int]) -> QuantizedWeight:
    """As `mxfp4`, with a jax.ShapeDtypeStruct in place of each array. packed: its shape, [..., out, in / 2]."""
    return _weight(*_shapes(packed, MXFP4_GROUP, _BF16), None, divides=False)


def _weight(codes: Any, scales: Any, outer: Any, *, divides: bool) -> QuantizedWeight:
    return QuantizedWeight(
        codes=codes, scales=scales, zeros=None, outer=outer, mins=None, outer_mins=None, order=None, kind="fp4",
        layout="plain", shape=tuple(codes.shape), dtype=_BF16, activations="float", divides=divides,
    )  # fmt: skip


def _shapes(packed: Sequence[int], group: int, dtype: np.dtype) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Codes and scales of a packed tensor of this shape."""
    *out, half = packed
    codes = jax.ShapeDtypeStruct((*out, 2 * half), np.uint8)
    return codes, jax.ShapeDtypeStruct((*out, 2 * half // group), dtype)


def _unpacked(packed: np.ndarray) -> np.ndarray:
    """One code a byte, uint8[..., out, in]."""
    codes = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0])
    np.right_shift(packed, 4, out=codes[..., 1])
    return codes.reshape(*packed.shape[:-1], -1)


def _check_packed(packed: np.ndarray, group: int) -> tuple[int, ...]:
    """Check dtype and shape of the codes. Returns the shape that the scales must have."""
    if packed.dtype != np.uint8 or packed.ndim < 2 or packed.shape[-1] % (group // 2):
        found = f"{packed.dtype}{list(packed.shape)}"
        raise ValueError(f"packed is {found}: it must be uint8[..., out, in / 2], with a multiple of {group} inputs")
    return (*packed.shape[:-1], 2 * packed.shape[-1] // group)


def _check(name: str, array: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        found = f"{array.dtype}{list(array.shape)}"
        raise ValueError(f"{name} is {found}: it must be {dtype}{list(shape)}, to fit the packed codes")
