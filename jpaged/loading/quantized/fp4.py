"""Matrices in fp4 (E2M1) with the scales of NVFP4 or MXFP4.

Both formats pack two codes a byte along the inputs: the low half is the even input.

NVFP4: one scale in e4m3fn per 16 inputs, and one float32 factor for the tensor. compressed-tensors divides the scales
       by the factor, ModelOpt multiplies them by it.
MXFP4: one power of two per 32 inputs, as a byte (E8M0, bias 127). OCP Microscaling Formats 1.0.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

from jpaged.loading.quantized.matrix_tensors import Header, Parts
from pallas_kernels import QuantizedWeight
from pallas_kernels.quantized_dot.weight import FP4_VALUES

NVFP4_GROUP, MXFP4_GROUP = 16, 32
_LARGEST = np.float32(FP4_VALUES[-1])
_BF16 = np.dtype(ml_dtypes.bfloat16)
_MAGNITUDE, _LARGEST_E4M3 = 0x7F, 0x7E  # mask of e4m3fn's bits without the sign; bits of its largest number
_BIAS, _NAN = 127, 255
# MXFP4's scales in bfloat16, by byte. bfloat16 has all powers of two from 2^-127 to 2^127, and costs 4.5 bits per
# weight instead of 4.25. float8_e8m0fnu would need 8 bits per scale, but only XLA's CPU back end is known to convert it
# (JAX 0.10.2 and 0.11.2); Triton and Mosaic may not. In matmuls, XLA on CPU rounds numbers below 2^-126 to 0: weights
# with scale byte 0, and codes of 0.5 with byte 1.
_POWERS = np.ldexp(np.float32(1), np.arange(_NAN) - _BIAS).astype(_BF16)


@dataclasses.dataclass(frozen=True)
class Nvfp4:
    """Reads the parts of a matrix in NVFP4."""

    codes: str     # name of the part with the codes, U8[out, in / 2]
    factor: str    # name of the part with the tensor's factor, F32, one number
    divides: bool  # the scales are divided by the factor

    def header(self, parts: Parts, because: str) -> Header:
        """Check dtypes and shapes. because: why there must be these parts. Raises ModelLoadError."""
        shape = _check_headers(parts, self.codes, because, ("F8_E4M3",), NVFP4_GROUP)
        parts.check(self.factor, because, ("F32",), (1,), (), meaning="one number")
        return self.declared(shape)

    def declared(self, shape: tuple[int, int]) -> Header:
        """A matrix [out, in], without its tensors."""
        return Header(
            self.codes, shape, "fp4", 4, NVFP4_GROUP, "F8_E4M3", None, has_outer=True, divides=self.divides
        )

    def scales(self, parts: Parts) -> Float[np.ndarray, "out groups"]:
        """The groups' scales. A scale may be 0. Raises ModelLoadError for one that is NaN or negative."""
        scales = parts.array("weight_scale")
        bits = scales.view(np.uint8)
        if (bad := (bits > _LARGEST_E4M3) & (bits != _MAGNITUDE + 1)).any():  # the next number after NaN is -0
            found = float(scales[bad][0])
            raise parts.damaged("weight_scale", f"a scale of {found:g} (scales must be numbers, and not negative)")
        return scales

    def outer(self, parts: Parts, header: Header) -> Float[np.ndarray, "out 1"]:
        """The factor for each output. Raises ModelLoadError if it is not positive, or makes weights infinite."""
        factor = parts.array(self.factor).reshape(())
        if not (np.isfinite(factor) and factor > 0):
            raise parts.damaged(self.factor, f"the number {factor:g} (it must be positive and finite)")
        largest = (parts.array("weight_scale").view(np.uint8) & _MAGNITUDE).max().view(ml_dtypes.float8_e4m3fn)
        with np.errstate(over="ignore"):
            scale = largest.astype(np.float32) / factor if self.divides else largest.astype(np.float32) * factor
            if not np.isfinite(scale * _LARGEST):
                raise parts.damaged(self.factor, f"the number {factor:g}, which makes weights infinite")
        return np.full((header.shape[0], 1), factor, np.float32)


def mxfp4_header(parts: Parts, because: str) -> Header:
    """Check dtypes and shapes of a matrix in MXFP4, weight_packed and weight_scale. Raises ModelLoadError."""
    shape = _check_headers(parts, "weight_packed", because, ("U8", "F8_E8M0"), MXFP4_GROUP)
    return mxfp4_declared(shape)


def mxfp4_in_bytes(parts: Parts, codes: str, scales: str, because: str) -> Header:
    """Check a matrix in MXFP4 with codes I8[out, in / 2] and scales F8_E8M0 (DeepSeek V4). Raises ModelLoadError."""
    return mxfp4_declared(_check_headers(parts, codes, because, ("F8_E8M0",), MXFP4_GROUP, "I8", scales), codes)


def mxfp4_declared(shape: tuple[int, int], codes: str = "weight_packed") -> Header:
    """A matrix [out, in] in MXFP4, without its tensors."""
    return Header(codes, shape, "fp4", 4, MXFP4_GROUP, "BF16", None)


def mxfp4_scales(parts: Parts, part: str = "weight_scale") -> Float[np.ndarray, "out groups"]:
    """Return the scales in bfloat16. Raises ModelLoadError for a byte that means NaN."""
    scales = parts.array(part).view(np.uint8)
    if (scales == _NAN).any():
        raise parts.damaged(part, f"a byte {_NAN}, which means NaN")
    return _POWERS[scales]


def unpacked(packed: UInt8[np.ndarray, "*rows half"]) -> UInt8[np.ndarray, "*rows inputs"]:
    """Unpack to one code per byte."""
    codes = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0])
    np.right_shift(packed, 4, out=codes[..., 1])
    return codes.reshape(*packed.shape[:-1], -1)


def mxfp4(packed: np.ndarray, scale: np.ndarray) -> QuantizedWeight:
    """Weights in MXFP4, in the layout "plain", numpy arrays on the host. The scales become bfloat16.

    packed: uint8[..., out, in / 2]. scale: uint8[..., out, in / 32], E8M0.
    Raises ValueError for other dtypes or shapes, and for a scale of 255, which means NaN.
    """
    if packed.dtype != np.uint8 or packed.ndim < 2 or packed.shape[-1] % (MXFP4_GROUP // 2):
        found = f"{packed.dtype}{list(packed.shape)}"
        raise ValueError(f"packed is {found}: it must be uint8[..., out, in / 2], with a multiple of 32 inputs")
    shape = (*packed.shape[:-1], 2 * packed.shape[-1] // MXFP4_GROUP)
    if scale.dtype != np.uint8 or scale.shape != shape:
        found = f"{scale.dtype}{list(scale.shape)}"
        raise ValueError(f"scale is {found}: it must be uint8{list(shape)}, to fit the packed codes")
    if (scale == _NAN).any():
        at = [int(i) for i in np.argwhere(scale == _NAN)[0]]
        raise ValueError(f"scale{at}={_NAN}, which means NaN: it must be at most 254; fetch the checkpoint again")
    return _weight(unpacked(packed), _POWERS[scale])


def mxfp4_shape(packed: Sequence[int]) -> QuantizedWeight:
    """As `mxfp4`, with a jax.ShapeDtypeStruct in place of each array. packed: its shape, [..., out, in / 2]."""
    *out, half = packed
    codes = jax.ShapeDtypeStruct((*out, 2 * half), np.uint8)
    return _weight(codes, jax.ShapeDtypeStruct((*out, 2 * half // MXFP4_GROUP), _BF16))


def _weight(codes: Any, scales: Any) -> QuantizedWeight:
    return QuantizedWeight(
        codes=codes, scales=scales, zeros=None, outer=None, mins=None, outer_mins=None, order=None, kind="fp4",
        shape=tuple(codes.shape), dtype=_BF16, activations="float",
    )  # fmt: skip


def _check_headers(
    parts: Parts, codes: str, because: str, scales: tuple[str, ...], group: int, dtype: str = "U8",
    of_scales: str = "weight_scale",
) -> tuple[int, int]:  # fmt: skip
    """Check codes and scales. Returns the shape of the weights, [out, in].

    scales: dtypes of the part `of_scales`. dtype: of the part `codes`.
    """
    outputs, half = parts.matrix(codes, because, (dtype,))
    inputs = 2 * half
    if inputs % group:
        raise parts.wrong(codes, f"{dtype}[out, in / 2] with a multiple of {group} inputs")
    parts.check(of_scales, because, scales, (outputs, inputs // group), meaning=f"out, in / {group}")
    return outputs, inputs
