"""Converts codes of weights to numbers, in registers of an NVIDIA GPU. Part of triton.py.

A multiprocessor converts 16 integers per cycle to floats. At that rate it would read 4-bit codes at 8 bytes per cycle,
and an H200's memory gives about 21. So the bits of a float are built around the code. With the exponent of 128, a
bfloat16 has the value 128 + code. One multiply-add for two codes removes the 128 and the zero point. That is exact, and
takes 1.5 instructions per int4 code.

`instructions` returns PTX. Interpret mode gets the same numbers from `plain`.
"""

import struct
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_kernels.quantized_dot.weight import FP4_VALUES, LEVELS

LOW = 0x0F0F0F0F
# For bfloat16 and float16: the high byte that turns a code into 2**n + code, n, two ones for a multiply-add, and two
# factors that correct fp4 numbers, which are too small after their bits are shifted to the end of the exponent
MAGIC = {"bfloat16": (0x43, 7, "0x3F803F80", "0x7E807E80"), "float16": (0x64, 10, "0x3C003C00", "0x74007400")}
SUFFIX = {"bfloat16": "bf16x2", "float16": "f16x2"}


def number_of_zero(zero: int, dtype: Any) -> float:
    """The addend that turns 2**n + code, the float of an int4 code, into code - zero."""
    return -float((1 << MAGIC[jnp.dtype(dtype).name][1]) + zero)


def numbers(codes: Array, kind: str, high: bool, zero: Array | int, dtype: Any, *, interpret: bool) -> Array:
    """Codes of a tile in `dtype`: bfloat16, float16, or int8 for integer matmuls.

    codes: bytes. high: 4-bit codes are in the high bits. zero: zero point of int4, an int or uint8 [outputs, 1].
    """
    dtype = jnp.dtype(dtype)
    if kind == "fp8" or (kind == "int8" and dtype == jnp.int8):
        return codes.astype(dtype)
    if interpret:
        return plain(codes, kind, high, zero, dtype)
    args = [codes]
    if not isinstance(zero, int):
        if dtype == jnp.int8:
            value = zero
        else:
            value = (number_of_zero(0, dtype) - zero.astype(jnp.float32)).astype(dtype)
        args.append(jnp.broadcast_to(value, codes.shape))
    text = instructions(kind, high, zero if isinstance(zero, int) else None, dtype.name)
    pair = kind in ("int4", "fp4") and dtype != jnp.int8
    constraints = ["=&r" if pair or dtype == jnp.int8 else "=&r,=&r", "h" if pair else "r"]
    constraints += ["r"] * (len(args) - 1)
    (result,) = plgpu.elementwise_inline_asm(
        text, args=args, constraints=",".join(constraints), pack=2 if pair else 4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, dtype)],
    )  # fmt: skip
    return result


def plain(codes: Array, kind: str, high: bool, zero: Array | int, dtype: Any) -> Array:
    """`numbers` as operations on arrays."""
    if kind == "int8":
        return codes.astype(dtype)
    nibbles = codes >> 4 if high else codes & (LEVELS - 1)
    if kind == "int4":
        return (nibbles.astype(jnp.int32) - jnp.asarray(zero).astype(jnp.int32)).astype(dtype)
    magnitude = jnp.zeros(codes.shape, jnp.float32)
    for code, value in enumerate(FP4_VALUES):
        magnitude = jnp.where(nibbles & 7 == code, value, magnitude)
    return jnp.where(nibbles & 8 == 0, magnitude, -magnitude).astype(dtype)


def instructions(kind: str, high: bool, zero: int | None, dtype: str) -> str:
    """PTX that converts two codes in $1, or four for kind or dtype int8. For kind int8, codes are in $2.

    zero: None: the last operand holds an addend for each code, or a zero point for dtype int8.
    """
    if dtype == "int8":
        return _integers(high, zero)
    if kind == "fp4":
        return _fp4(high, dtype)
    if kind == "int8":
        return _eight_bits(dtype)
    byte, _, ones, _ = MAGIC[dtype]
    add = "$2" if zero is None else "add"
    text = f"{{ .reg .b32 t, one, add, m; cvt.u32.u16 t, $1; prmt.b32 t, t, 0, 0x4140; mov.b32 one, {ones}; "
    if zero is not None:
        text += f"mov.b32 add, {_pair(number_of_zero(zero, dtype), dtype)}; "
    # the compiler fuses (t & 0x000F000F) | m into one instruction
    return text + (
        f"{'shr.b32 t, t, 4; ' if high else ''}mov.b32 m, 0x{byte * 0x01000100:08X}; "
        f"and.b32 t, t, 0x000F000F; or.b32 t, t, m; fma.rn.{SUFFIX[dtype]} $0, t, one, {add}; }}"
    )


def _integers(high: bool, zero: int | None) -> str:
    """code - zero in int8. The highest bit of each byte is set first, so that no byte borrows from the next."""
    take = "shr.b32 t, $1, 4; and.b32 t, t, " if high else "and.b32 t, $1, "
    less = "$2" if zero is None else f"0x{zero * 0x01010101:08X}"
    return (
        f"{{ .reg .b32 t; {take}0x{LOW:08X}; or.b32 t, t, 0x80808080; sub.u32 t, t, {less}; "
        "xor.b32 $0, t, 0x80808080; }"
    )


def _fp4(high: bool, dtype: str) -> str:
    """Move sign, two exponent bits and one mantissa bit to their positions in the dtype. A multiply corrects 2**n."""
    _, mantissa, _, factor = MAGIC[dtype]
    shift, mask = 13 - mantissa, 0b111 << (mantissa - 1)  # bits 12 to 14 move to the end of the exponent
    first = "" if high else "shl.b32 t, t, 4; "
    return (
        f"{{ .reg .b32 t, s, f; cvt.u32.u16 t, $1; {first}prmt.b32 t, t, 0, 0x1404; and.b32 s, t, 0x80008000; "
        f"shr.b32 t, t, {shift}; and.b32 t, t, 0x{mask * 0x10001:08X}; or.b32 t, t, s; "
        # -0: the sign of a zero stays
        f"mov.b32 f, {factor}; mov.b32 s, 0x80008000; fma.rn.{SUFFIX[dtype]} $0, t, f, s; }}"
    )


def _eight_bits(dtype: str) -> str:
    """Put code + 128 into the last byte of a float. For bfloat16, which is too short, the float is a float32."""
    text = "{ .reg .b32 t, u, v; xor.b32 t, $2, 0x80808080; "
    if dtype == "float16":
        add = _pair(-(1024.0 + 128), dtype)
        return text + (
            ".reg .b32 one, add; mov.b32 one, 0x3C003C00; " f"mov.b32 add, {add}; "
            "prmt.b32 u, t, 0x64646464, 0x4140; prmt.b32 v, t, 0x64646464, 0x4342; "
            "fma.rn.f16x2 $0, u, one, add; fma.rn.f16x2 $1, v, one, add; }"
        )  # fmt: skip
    text += ".reg .f32 a, b; "
    number = "0f" + struct.pack(">f", -float((1 << 23) + 128)).hex().upper()
    for out, (low, high) in enumerate(((0, 1), (2, 3))):
        text += (
            f"prmt.b32 u, t, 0x4B000000, 0x744{low}; prmt.b32 v, t, 0x4B000000, 0x744{high}; "
            f"mov.b32 a, u; mov.b32 b, v; add.rn.f32 a, a, {number}; add.rn.f32 b, b, {number}; "
            f"cvt.rn.bf16x2.f32 ${out}, b, a; "
        )
    return text + "}"


def _pair(value: float, dtype: str) -> str:
    """Two equal numbers in 32 bits."""
    if dtype == "float16":
        (bits,) = struct.unpack("<H", struct.pack("<e", value))
    else:
        bits = struct.unpack("<I", struct.pack("<f", value))[0] >> 16
    return f"0x{bits * 0x10001:08X}"
