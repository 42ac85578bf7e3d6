"""Conversion of rows of numbers between float32 and other types, in numba."""

from numba import njit

from pallas_kernels.native import vectors
from pallas_kernels.native.frame import NATIVE
from pallas_kernels.native.kinds import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, INT8


@njit(inline="always", **NATIVE)
def round_up(number, multiple):
    """The smallest multiple that is at least `number`."""
    return (number + multiple - 1) // multiple * multiple


@njit(**NATIVE)
def size_of(kind):
    """Bytes of a number of a kind."""
    if kind == FLOAT32:
        return 4
    return 1 if kind in (INT8, FLOAT8) else 2


@njit(**NATIVE)
def widen(kind, to, source, count, scale):
    """Convert `count` numbers to float32, times scale, and pad them with zeros to whole vectors."""
    if kind == BFLOAT16:
        vectors.widen_bfloat16(to, source, count, scale)
    elif kind == FLOAT32:
        vectors.widen_float32(to, source, count, scale)
    elif kind == FLOAT16:
        vectors.widen_float16(to, source, count, scale)
    elif kind == INT8:
        vectors.widen_int8(to, source, count, scale)
    else:
        vectors.widen_float8(to, source, count, scale)


@njit(**NATIVE)
def narrow(kind, to, source, count, scale):
    """Convert `count` float32 numbers, times scale, to bfloat16, float32 or float16."""
    if kind == BFLOAT16:
        vectors.narrow_bfloat16(to, source, count, scale)
    elif kind == FLOAT32:
        vectors.narrow_float32(to, source, count, scale)
    else:
        vectors.narrow_float16(to, source, count, scale)
