"""Dot products of 8-bit integers, as LLVM IR. Sums of integers are exact, so their order does not matter.

Processors multiply uint8 by int8. So weights are uint8 here, code = number + zero point, and x is int8. The result is
too large by the zero point times the sum of x, which is subtracted.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from pallas_kernels.native import library
from pallas_kernels.native.memory import I8, I32, prefetch_line
from pallas_kernels.native.vectors import FLOAT, I16, INT, INTS, LANES, VECTOR, Code, vector_function

BLOCK, INPUTS = 16, 4  # outputs and neighbouring inputs of a tile of codes
LINE = BLOCK * INPUTS  # bytes of a tile
LARGEST = 127  # magnitude of a quantised number of x
MAGIC = 12582912.0  # 1.5 * 2**23: the low bits of x + MAGIC are x, rounded to nearest, ties to even
SMALLEST = 1e-30  # a row with no larger number is quantised to zeros
WIDE, ROWS = (2, 8) if LANES == BLOCK else (1, 4)  # blocks of outputs and rows of x with sums in registers
EARLY = 1024  # prefetch distance, in bytes

BYTES, SHORT = ir.VectorType(I8, LINE), ir.VectorType(I8, LANES)
SUMS, NUMBERS, CODES = (ir.VectorType(kind, BLOCK) for kind in (I32, FLOAT, I8))  # one number for each output


class _Products(NamedTuple):
    """Names of LLVM's intrinsics for a processor's integer dot products."""

    outputs: int  # per instruction
    four: str = ""  # sums of 4 products of uint8 and int8, in int32; "": no such instruction
    two_bytes: str = ""  # sums of 2 products of uint8 and int8, in int16
    two_words: str = ""  # sums of 2 products of int16, in int32


# By required processor features, fastest first
_PRODUCTS = {
    ("avx512vnni",): _Products(16, four="llvm.x86.avx512.vpdpbusd.512"),
    ("avx512bw",): _Products(16, two_bytes="llvm.x86.avx512.pmaddubs.w.512", two_words="llvm.x86.avx512.pmaddw.d.512"),
    ("avx2", "avxvnni"): _Products(8, four="llvm.x86.avx512.vpdpbusd.256"),
    ("avx2",): _Products(8, two_bytes="llvm.x86.avx2.pmadd.ub.sw", two_words="llvm.x86.avx2.pmadd.wd"),
}


def _products() -> _Products | None:
    """The dot product instructions of this processor; None if it has none of _PRODUCTS."""
    has = library.processor().features
    return next((products for needed, products in _PRODUCTS.items() if has.issuperset(needed)), None)


def _multiply_add(code: Code, total: Any, bits: int, w: Sequence[Any], x: Sequence[Any]) -> Any:
    """total[16] + the dot products of each w, 64 codes of `bits` bits in uint8, and its x, 4 int8 in an int32."""
    b, products = code.builder, _products()
    if products is not None:
        words = [b.bitcast(each, SUMS) for each in w]
        parts = [range(first, first + products.outputs) for first in range(0, BLOCK, products.outputs)]
        return code.join([
            _add_products(
                code, products, code.pick(total, total, part), bits, [code.pick(each, each, part) for each in words], x
            )
            for part in parts
        ])  # fmt: skip
    for codes, four in zip(w, x, strict=True):
        numbers = b.bitcast(code.splat(four, BLOCK), BYTES)
        for first in range(INPUTS):
            lanes = range(first, LINE, INPUTS)
            own, other = code.pick(codes, codes, lanes), code.pick(numbers, numbers, lanes)
            total = b.add(total, b.mul(b.zext(own, SUMS), b.sext(other, SUMS)))
    return total


def _add_products(code: Code, products: _Products, total: Any, bits: int, w: Sequence[Any], x: Sequence[Any]) -> Any:
    """total + the dot products of each w, 4 uint8 in an int32 for each output, and its x, 4 int8 in an int32."""
    b, outputs = code.builder, products.outputs
    ints, shorts, codes = (ir.VectorType(kind, outputs * count) for kind, count in ((I32, 1), (I16, 2), (I8, 4)))
    pairs = [(each, code.splat(four, outputs)) for each, four in zip(w, x, strict=True)]
    if products.four:
        return functools.reduce(lambda sums, pair: code.call(products.four, ints, [sums, *pair]), pairs, total)
    if bits == 4:  # the sum of 4 products with codes up to 15 fits int16
        parts = [code.call(products.two_bytes, shorts, [b.bitcast(each, codes) for each in pair]) for pair in pairs]
        ones = ir.Constant(shorts, [1] * 2 * outputs)
        return b.add(total, code.call(products.two_words, ints, [functools.reduce(b.add, parts), ones]))
    eight = ir.Constant(shorts, [8] * 2 * outputs)
    for pair in pairs:
        own, other = (b.bitcast(each, shorts) for each in pair)
        even = [b.lshr(b.shl(own, eight), eight), b.ashr(b.shl(other, eight), eight)]  # inputs 0 and 2 as int16
        odd = [b.lshr(own, eight), b.ashr(other, eight)]  # inputs 1 and 3
        for both in (even, odd):
            total = b.add(total, code.call(products.two_words, ints, both))
    return total


@vector_function(INT, INT, INT, INT)
def quantise_row(code: Code, to: Any, scale: Any, row: Any, chunks: Any) -> None:
    """Store row[chunks * LANES], float32, as int8: round(number / scale).

    scale: address for the scale, which is the largest magnitude / 127. It is NaN or infinity if the row has one.
    """
    b = code.builder
    (most,) = code.variables([code.ints(0)])  # as int32, magnitudes have the same order, and NaN is above infinity
    with code.each(chunks) as i:
        magnitude = b.and_(code.load(code.at(row, (i, VECTOR)), INTS), code.ints(0x7FFFFFFF))
        old = b.load(most)
        b.store(b.select(b.icmp_signed(">", magnitude, old), magnitude, old), most)
    largest, half = b.load(most), LANES // 2
    while half:
        other = code.pick(largest, largest, [(lane + half) % LANES for lane in range(LANES)])
        largest = b.select(b.icmp_signed(">", largest, other), largest, other)
        half //= 2
    top = b.bitcast(b.extract_element(largest, ir.Constant(I32, 0)), FLOAT)
    code.store(b.fmul(top, ir.Constant(FLOAT, float(np.float32(1 / LARGEST)))), scale)  # XLA divides in this way
    is_normal = b.fcmp_ordered(">", top, ir.Constant(FLOAT, SMALLEST))
    inverse = b.select(is_normal, b.fdiv(ir.Constant(FLOAT, LARGEST), top), ir.Constant(FLOAT, 0))
    factors = code.splat(inverse)
    with code.each(chunks) as i:
        shifted = b.fadd(b.fmul(code.load(code.at(row, (i, VECTOR))), factors), code.floats(MAGIC))
        code.store(b.trunc(b.bitcast(shifted, INTS), SHORT), code.at(to, (i, LANES)), 1)


@vector_function(INT, INT, INT)
def sum_bytes(code: Code, to: Any, row: Any, vectors: Any) -> None:
    """Store the sum of row[vectors * 4], int8, as int32."""
    b = code.builder
    total = code.variables([ir.Constant(I32, 0)])[0]
    with code.each(b.mul(vectors, code.number(INPUTS))) as i:
        b.store(b.add(b.load(total), b.sext(code.load(code.at(row, (i, 1)), I8, 1), I32)), total)
    code.store(b.load(total), to)


def _multiply(bits: int, rows: int, wide: int) -> Any:
    """Make a function that multiplies int8 rows of x by blocks of 16 outputs.

    to:      float32[rows, WIDE * 16]: the groups in order, each as its exact sum times its scale.
    x:       address of the first row; rows are `line` bytes apart. Rows after `last` repeat it.
    x_sums:  int32[rows, groups], the sum of x for each row and group.
    codes:   of the first block; blocks are `block` bytes apart. block=0: the first block is used twice.
    scales:  float32[blocks, groups, 16]. zeros: uint8[blocks, groups, 16], or 0: the zero point is 2 ** (bits - 1).
    mins:    float32[blocks, groups, 16], or 0. min * sum of x is subtracted for each group, and the zero point of 4
             bits is 0.
    vectors: number of 4-input vectors in a group.
    """

    @vector_function(*[INT] * 12)
    def multiply(
        code: Code, to: Any, x: Any, line: Any, last: Any, x_sums: Any, codes: Any, block: Any, scales: Any,
        zeros: Any, mins: Any, groups: Any, vectors: Any,
    ) -> None:  # fmt: skip
        b, step = code.builder, 8 // bits  # vectors of 4 inputs in 64 bytes
        chains = step if rows == 1 else 1  # accumulators per sum: with one, each addition waits for the last
        row_at, sums_at, is_single = [x], [x_sums], b.icmp_unsigned("==", block, code.number(0))
        for _ in range(rows - 1):
            is_last = b.icmp_signed(">=", row_at[-1], last)
            row_at.append(b.select(is_last, row_at[-1], code.at(row_at[-1], (line, 1))))
            sums_at.append(b.select(is_last, sums_at[-1], code.at(sums_at[-1], (groups, 4))))
        results = code.variables([ir.Constant(NUMBERS, [0.0] * BLOCK)] * (rows * wide))
        loads = b.udiv(vectors, code.number(step))
        with code.each(groups) as group:
            totals = code.variables([ir.Constant(SUMS, [0] * BLOCK)] * (rows * wide * chains))
            with code.each(loads) as i:
                index = b.add(b.mul(group, loads), i)
                for j in range(wide):
                    place = code.at(codes, (block, j), (index, LINE))
                    prefetch_line(b, code.at(place, (code.number(EARLY), 1)))
                    value = code.load(place, BYTES, 1)
                    parts = [b.xor(value, _bytes(0x80))] if bits == 8 else [
                        b.and_(value, _bytes(15)), b.lshr(value, _bytes(4))
                    ]  # fmt: skip
                    for row in range(rows):
                        at = code.at(row_at[row], (index, INPUTS * step))
                        x_parts = [code.load(code.at(at, (code.number(part), INPUTS)), I32, 1) for part in range(step)]
                        for chain in range(chains):
                            total = totals[(row * wide + j) * chains + chain]
                            own, other = parts[chain::chains], x_parts[chain::chains]
                            b.store(_multiply_add(code, b.load(total), bits, own, other), total)
            for j in range(wide):
                at = group if j == 0 else b.add(b.select(is_single, code.number(0), groups), group)
                zero = _zero_points(code, zeros, mins if bits == 4 else None, at, 1 << (bits - 1))
                scale = code.load(code.at(scales, (at, BLOCK * 4)), NUMBERS)
                least = _minima(code, mins, at)
                for row in range(rows):
                    each = (row * wide + j) * chains
                    total = b.load(totals[each])
                    for other in totals[each + 1 : each + chains]:
                        total = b.add(total, b.load(other))
                    x_sum = code.splat(code.load(code.at(sums_at[row], (group, 4)), I32), BLOCK)
                    total = b.sub(total, b.mul(zero, x_sum))
                    result = results[row * wide + j]
                    b.store(code.fma(b.sitofp(total, NUMBERS), scale, b.load(result)), result)
                    with b.if_then(b.icmp_unsigned("!=", mins, code.number(0))):
                        b.store(code.fma(b.sitofp(x_sum, NUMBERS), b.fneg(least), b.load(result)), result)
        for place, result in enumerate(results):
            row, j = divmod(place, wide)
            code.store(b.load(result), code.at(to, (code.number(row), 4 * BLOCK * WIDE), (code.number(j), 4 * BLOCK)))

    return multiply


def _bytes(value: int) -> Any:
    return ir.Constant(BYTES, [value] * LINE)


def _zero_points(code: Code, zeros: Any, mins: Any | None, index: Any, default: int) -> Any:
    """Zero points of 16 outputs, int32: those of `zeros`, else 0 if there are `mins`, else the default."""
    b = code.builder
    usual = ir.Constant(SUMS, [default] * BLOCK)
    (found,) = code.variables([usual])
    if mins is not None:
        b.store(b.select(b.icmp_unsigned("!=", mins, code.number(0)), ir.Constant(SUMS, [0] * BLOCK), usual), found)
    with b.if_then(b.icmp_unsigned("!=", zeros, code.number(0))):
        b.store(b.zext(code.load(code.at(zeros, (index, BLOCK)), CODES, 1), SUMS), found)
    return b.load(found)


def _minima(code: Code, mins: Any, index: Any) -> Any:
    """Minima of 16 outputs, float32; 0 if there are none."""
    b = code.builder
    (found,) = code.variables([ir.Constant(NUMBERS, [0.0] * BLOCK)])
    with b.if_then(b.icmp_unsigned("!=", mins, code.number(0))):
        b.store(code.load(code.at(mins, (index, BLOCK * 4)), NUMBERS), found)
    return b.load(found)


# One row is multiplied by one block at a time, so that memory is read in order. With two blocks at a time, as for more
# rows, 1.5 MB of weights take 60 us instead of 54 (int8), and 0.8 MB take 47 instead of 35 (int4).
multiply_int8, multiply_row_int8 = _multiply(8, ROWS, WIDE), _multiply(8, 1, 1)
multiply_int4, multiply_row_int4 = _multiply(4, ROWS, WIDE), _multiply(4, 1, 1)
