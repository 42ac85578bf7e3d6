"""Arithmetic on rows of float32 numbers, 16 at a time, as LLVM IR. LLVM splits the vectors for narrower processors.

Every result is one chain of operations in a fixed order. So its bits depend neither on the rows that are computed
together nor on the vectoriser. Addresses are int64. `chunks` counts vectors of 16 numbers: rows are padded with zeros.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pallas_kernels.native.memory import I8, I32, I64, declared, pointer, prefetch_line

LANES = 16
TILE = 4  # rows that are computed together
PAIR = 2  # the same, where there are at most 2
SPAN = 64  # keys of a step of softmax
AHEAD = 2048  # bytes: distance to the weights that are requested early
FLOAT, I16, I1 = ir.FloatType(), ir.IntType(16), ir.IntType(1)
FLOATS, INTS, I16S = (ir.VectorType(kind, LANES) for kind in (FLOAT, I32, I16))
ONE = np.float32(1)
LOWEST = -1e30  # maximum of no scores; finite, because -inf - -inf is NaN


class Code:
    """A builder of LLVM IR with the operations that the functions below need."""

    def __init__(self, builder: Any):
        self.builder = builder

    def number(self, value: int) -> Any:
        """An int64 constant."""
        return ir.Constant(I64, value)

    def floats(self, value: float) -> Any:
        """A vector of equal constants."""
        return ir.Constant(FLOATS, [value] * LANES)

    def ints(self, values: int | Sequence[int]) -> Any:
        """A vector of int32 constants."""
        return ir.Constant(INTS, [values] * LANES if isinstance(values, int) else list(values))

    def at(self, base: Any, *terms: tuple[Any, int]) -> Any:
        """The address base + the sum of value * factor."""
        for value, factor in terms:
            scaled = value if factor == 1 else self.builder.mul(value, self.number(factor))
            base = self.builder.add(base, scaled)
        return base

    def load(self, address: Any, kind: Any = FLOATS, align: int = 4) -> Any:
        """Load a value. Vectors need not be aligned to their size."""
        value = self.builder.load(pointer(self.builder, address, kind))
        value.align = align
        return value

    def store(self, value: Any, address: Any, align: int = 4) -> None:
        """Store a value."""
        self.builder.store(value, pointer(self.builder, address, value.type)).align = align

    def splat(self, value: Any) -> Any:
        """A vector of 16 copies of a value."""
        kind = ir.VectorType(value.type, LANES)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(one, one, self.ints(0))

    def pick(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """The lanes of a (0 to n - 1) and b (n to 2n - 1) with these numbers."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

    def join(self, vectors: Sequence[Any]) -> Any:
        """The lanes of 1, 2, 4, ... vectors of equal width, one after the other."""
        while len(vectors) > 1:
            width = 2 * vectors[0].type.count
            vectors = [self.pick(a, b, range(width)) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c with one rounding."""
        return self.call("llvm.fma.v16f32", FLOATS, [a, b, c])

    def largest(self, value: Any) -> Any:
        """The largest lane. If some are NaN: a lane, or NaN."""
        b, half = self.builder, LANES // 2
        while half:
            other = self.pick(value, value, [(lane + half) % LANES for lane in range(LANES)])
            value = b.select(b.fcmp_ordered(">", value, other), value, other)
            half //= 2
        return b.extract_element(value, ir.Constant(I32, 0))

    def call(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        """The result of an intrinsic of LLVM."""
        kind = ir.FunctionType(result, [each.type for each in arguments])
        return self.builder.call(declared(self.builder.module, name, kind), arguments)

    def sums(self, vectors: Sequence[Any]) -> Any:
        """A vector with the sums of 16 vectors. Each sum is the same tree: lane i + lane i + 8, then + 4, + 2, + 1."""
        width = LANES
        while width > 1:
            half, paired = width // 2, []
            groups = LANES // width
            low = [group * width + lane for group in range(groups) for lane in range(half)]
            for a, b in zip(vectors[::2], vectors[1::2], strict=True):
                first = low + [LANES + lane for lane in low]
                second = [lane + half for lane in first]
                paired.append(self.builder.fadd(self.pick(a, b, first), self.pick(a, b, second)))
            vectors, width = paired, half
        return vectors[0]

    def exp(self, x: Any) -> Any:
        """exp(x) for x <= 0, with an error of 1 unit in the last place. 0 below -87; NaN stays NaN.

        Range reduction and coefficients: Cephes, expf.
        """
        b, floats = self.builder, self.floats
        shifted = self.fma(x, floats(1.44269504088896341), floats(12582912.0))  # its low bits are round(x / ln 2)
        n = b.fsub(shifted, floats(12582912.0))
        r = self.fma(n, floats(-0.693359375), x)
        r = self.fma(n, floats(2.12194440e-4), r)
        p = floats(1.9875691500e-4)
        for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = self.fma(p, r, floats(coefficient))
        p = b.fadd(self.fma(p, b.fmul(r, r), r), floats(1.0))
        power = b.shl(b.add(b.bitcast(shifted, INTS), self.ints(127)), self.ints(23))
        return b.select(b.fcmp_ordered("<", x, floats(-87.0)), floats(0.0), b.fmul(p, b.bitcast(power, FLOATS)))

    @contextlib.contextmanager
    def each(self, count: Any) -> Any:
        """A loop; gives the index."""
        with cgutils.for_range(self.builder, count) as loop:
            yield loop.index

    def variables(self, values: Sequence[Any]) -> list[Any]:
        """Variables with these first values. LLVM keeps them in registers."""
        made = [cgutils.alloca_once(self.builder, value.type) for value in values]
        for each, value in zip(made, values, strict=True):
            self.builder.store(value, each)
        return made


def vector_function(*arguments: Any) -> Callable[[Callable[..., None]], Any]:
    """Make a numba function, without a result, of a function that emits code. arguments: their numba types."""

    def wrap(emit: Callable[..., None]) -> Any:
        def typed(typing_context: Any, *_: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                emit(Code(builder), *values)
                return context.get_dummy_value()

            return types.void(*arguments), codegen

        names = ["typing_context", *list(inspect.signature(emit).parameters)[1:]]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        typed.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
        return intrinsic(typed)

    return wrap


INT, FLOAT32 = types.int64, types.float32


def _widen(kind: Any, convert: Callable[[Code, Any], Any]) -> Any:
    """Make a function (to, source, count, scale): count numbers as float32, times scale, in whole vectors."""

    @vector_function(INT, INT, INT, FLOAT32)
    def widen(code: Code, to: Any, source: Any, count: Any, scale: Any) -> None:
        b, size = code.builder, kind.width // 8 if isinstance(kind, ir.IntType) else 4
        vector = ir.VectorType(kind, LANES)
        factors = code.splat(scale)
        with code.each(b.udiv(count, code.number(LANES))) as i:
            value = code.load(code.at(source, (i, LANES * size)), vector, size)
            code.store(b.fmul(convert(code, value), factors), code.at(to, (i, LANES * 4)))
        rest = b.urem(count, code.number(LANES))
        with b.if_then(b.icmp_unsigned("!=", rest, code.number(0))):
            done = b.sub(count, rest)
            lanes = b.icmp_signed("<", code.ints(range(LANES)), code.splat(b.trunc(rest, I32)))
            pointed = pointer(b, code.at(source, (done, size)), vector)
            name = f"llvm.masked.load.v16{'f32' if size == 4 else f'i{8 * size}'}.p0"
            value = code.call(name, vector, [pointed, ir.Constant(I32, size), lanes, ir.Constant(vector, None)])
            value = b.select(lanes, b.fmul(convert(code, value), factors), code.floats(0.0))
            code.store(value, code.at(to, (done, 4)))

    return widen


def from_bfloat16(code: Code, value: Any) -> Any:
    b = code.builder
    return b.bitcast(b.shl(b.zext(value, INTS), code.ints(16)), FLOATS)


def _from_float16(code: Code, value: Any) -> Any:
    b = code.builder
    return b.fpext(b.bitcast(value, ir.VectorType(ir.HalfType(), LANES)), FLOATS)


def _from_int8(code: Code, value: Any) -> Any:
    return code.builder.sitofp(value, FLOATS)


def _from_float8(code: Code, value: Any) -> Any:
    """float8_e4m3fn: sign, 4 bits of exponent with bias 7, 3 bits of mantissa; no infinity, NaN has all bits set."""
    b = code.builder
    wide = b.zext(value, INTS)
    rest = b.and_(wide, code.ints(0x7F))
    normal = b.bitcast(b.add(b.shl(rest, code.ints(20)), code.ints(120 << 23)), FLOATS)
    small = b.fmul(b.sitofp(rest, FLOATS), code.floats(2.0**-9))
    number = b.select(b.icmp_signed("<", rest, code.ints(8)), small, normal)
    number = b.select(b.icmp_signed("==", rest, code.ints(0x7F)), code.floats(float("nan")), number)
    sign = b.shl(b.and_(wide, code.ints(0x80)), code.ints(24))
    return b.bitcast(b.or_(b.bitcast(number, INTS), sign), FLOATS)


widen_float32 = _widen(FLOAT, lambda code, value: value)
widen_bfloat16 = _widen(I16, from_bfloat16)
widen_float16 = _widen(I16, _from_float16)
widen_int8 = _widen(I8, _from_int8)
widen_float8 = _widen(I8, _from_float8)


def to_bfloat16(code: Code, value: Any) -> Any:
    """Vector of float32 as bfloat16 bits, rounded to nearest, ties to even. NaN stays NaN."""
    b = code.builder
    bits = b.bitcast(value, INTS)
    odd = b.and_(b.lshr(bits, code.ints(16)), code.ints(1))
    rounded = b.lshr(b.add(b.add(bits, odd), code.ints(0x7FFF)), code.ints(16))
    rounded = b.select(b.fcmp_unordered("uno", value, value), code.ints(0x7FC0), rounded)
    return b.trunc(rounded, I16S)


def _to_float16(code: Code, value: Any) -> Any:
    b = code.builder
    return b.bitcast(b.fptrunc(value, ir.VectorType(ir.HalfType(), LANES)), I16S)


def _narrow(kind: Any, convert: Callable[[Code, Any], Any]) -> Any:
    """Make a function (to, source, count, scale): count float32 numbers times scale in another type."""

    @vector_function(INT, INT, INT, FLOAT32)
    def narrow(code: Code, to: Any, source: Any, count: Any, scale: Any) -> None:
        b, size = code.builder, kind.width // 8 if isinstance(kind, ir.IntType) else 4
        vector = ir.VectorType(kind, LANES)
        factors = code.splat(scale)
        with code.each(b.udiv(count, code.number(LANES))) as i:
            value = b.fmul(code.load(code.at(source, (i, LANES * 4))), factors)
            code.store(convert(code, value), code.at(to, (i, LANES * size)), size)
        rest = b.urem(count, code.number(LANES))
        with b.if_then(b.icmp_unsigned("!=", rest, code.number(0))):
            done = b.sub(count, rest)
            value = convert(code, b.fmul(code.load(code.at(source, (done, 4))), factors))
            lanes = b.icmp_signed("<", code.ints(range(LANES)), code.splat(b.trunc(rest, I32)))
            pointed = pointer(b, code.at(to, (done, size)), vector)
            name = f"llvm.masked.store.v16{'f32' if size == 4 else 'i16'}.p0"
            code.call(name, ir.VoidType(), [value, pointed, ir.Constant(I32, size), lanes])

    return narrow


narrow_float32 = _narrow(FLOAT, lambda code, value: value)
narrow_bfloat16 = _narrow(I16, to_bfloat16)
narrow_float16 = _narrow(I16, _to_float16)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)


def _add_float32(code: Code, total: Any, x: Any, w: Any) -> Any:
    return code.fma(x, w, total)


def _add_bfloat16(code: Code, total: Any, x: Any, w: Any) -> Any:
    return code.call("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [total, x, w])


def _score_tile(rows: int, vector: Any, step: Callable[[Code, Any, Any, Any], Any]) -> Any:
    """Make a function: scores[rows, 16] = queries[rows] times keys[16], each of `steps` vectors of 64 bytes.

    score_stride: bytes from a row of scores to the next.
    """

    @vector_function(INT, INT, INT, INT, INT)
    def score_tile(code: Code, scores: Any, score_stride: Any, queries: Any, keys: Any, steps: Any) -> None:
        b, per_row = code.builder, LANES // rows  # keys that are multiplied together: 16 sums in all
        stride, parts = b.mul(steps, code.number(64)), []
        for first in range(0, LANES, per_row):
            sums = code.variables([code.floats(0.0)] * LANES)
            with code.each(steps) as i:
                q = [code.load(code.at(queries, (stride, row), (i, 64)), vector, 2) for row in range(rows)]
                k = [code.load(code.at(keys, (stride, first + key), (i, 64)), vector, 2) for key in range(per_row)]
                for index, total in enumerate(sums):
                    row, key = divmod(index, per_row)
                    b.store(step(code, b.load(total), q[row], k[key]), total)
            parts.append(code.sums([b.load(total) for total in sums]))
        # whole vectors are stored: reading one that was stored in parts waits for the stores
        for row in range(rows):
            lanes = range(row * per_row, (row + 1) * per_row)
            own = code.join([code.pick(part, part, lanes) for part in parts])
            code.store(own, code.at(scores, (score_stride, row)))

    return score_tile


score_tile, score_pair = (_score_tile(rows, FLOATS, _add_float32) for rows in (TILE, PAIR))
score_tile_bfloat16, score_pair_bfloat16 = (_score_tile(rows, BFLOATS, _add_bfloat16) for rows in (TILE, PAIR))


def _tree(builder: Any, values: Sequence[Any]) -> Any:
    """The sum of 1, 2, 4, ... values: the sum of each two neighbours, then of those, and so on."""
    while len(values) > 1:
        values = [builder.fadd(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _dot_tile(vector: Any, step: Callable[[Code, Any, Any, Any], Any]) -> Any:
    """Make a function that multiplies 4 rows x with 4 rows w of `steps` vectors, each 64 bytes.

    The 16 sums are stored as 4 rows of 4, `stride` bytes apart. A sum is one chain over the vectors, then the tree of
    `Code.sums`. early: address of a row that is requested early.
    """

    @vector_function(*[INT] * 12)
    def dot_tile(
        code: Code, to: Any, stride: Any, x0: Any, x1: Any, x2: Any, x3: Any, w0: Any, w1: Any, w2: Any, w3: Any,
        steps: Any, early: Any,
    ) -> None:  # fmt: skip
        b = code.builder
        sums = code.variables([code.floats(0.0)] * LANES)
        with code.each(steps) as i:
            x, w = (
                [code.load(code.at(base, (i, 64)), vector, 2) for base in four]
                for four in ((x0, x1, x2, x3), (w0, w1, w2, w3))
            )
            prefetch_line(b, code.at(early, (i, 64)))
            for index, total in enumerate(sums):
                row, output = divmod(index, TILE)
                b.store(step(code, b.load(total), x[row], w[output]), total)
        result = code.sums([b.load(total) for total in sums])
        for row in range(TILE):
            part = code.pick(result, result, range(row * TILE, row * TILE + TILE))
            code.store(part, code.at(to, (stride, row)))

    return dot_tile


dot_tile_float32, dot_tile_bfloat16 = _dot_tile(FLOATS, _add_float32), _dot_tile(BFLOATS, _add_bfloat16)


def _dot_few(vector: Any, step: Callable[[Code, Any, Any, Any], Any], rows: int) -> Any:
    """Make a function that multiplies few rows x with 16 // rows rows w, which it reads from first to last.

    In this order memory gives 56 GB/s, and 25 in that of `_dot_tile`, which reads 4 rows at a time (two cores of a Zen
    5, 60 MB of weights). Sums have the same bits. x, w: `steps` vectors a row, each 64 bytes. Rows after the last one
    are replaced by it.
    """
    outputs = LANES // rows

    @vector_function(*[INT] * 7)
    def dot_few(code: Code, to: Any, stride: Any, x: Any, last_x: Any, w: Any, last_w: Any, steps: Any) -> None:
        b, line = code.builder, code.builder.mul(steps, code.number(64))
        sums = code.variables([code.floats(0.0)] * LANES)
        x_rows = [_row(code, x, row, line, last_x) for row in range(rows)]
        for output in range(outputs):
            w_row = _row(code, w, output, line, last_w)
            with code.each(steps) as i:
                place = code.at(w_row, (i, 64))
                if rows >= TILE:  # with fewer, the processor itself reads ahead far enough
                    prefetch_line(b, code.at(place, (code.number(AHEAD), 1)))
                w_part = code.load(place, vector, 2)
                for row, x_row in enumerate(x_rows):
                    total = sums[row * outputs + output]
                    b.store(step(code, b.load(total), code.load(code.at(x_row, (i, 64)), vector, 2), w_part), total)
        result = code.sums([b.load(total) for total in sums])
        for row in range(rows):
            part = code.pick(result, result, range(row * outputs, (row + 1) * outputs))
            code.store(part, code.at(to, (stride, row)))

    return dot_few


def _row(code: Code, base: Any, row: int, line: Any, last: Any) -> Any:
    """Address of a row, or of the last one."""
    b, place = code.builder, code.at(base, (line, row))
    return b.select(b.icmp_signed("<", place, last), place, last)


dot_1_float32, dot_2_float32, dot_4_float32, dot_8_float32 = (
    _dot_few(FLOATS, _add_float32, rows) for rows in (1, 2, 4, 8)
)
dot_1_bfloat16, dot_2_bfloat16, dot_4_bfloat16, dot_8_bfloat16 = (
    _dot_few(BFLOATS, _add_bfloat16, rows) for rows in (1, 2, 4, 8)
)


def _add_values(rows: int) -> Any:
    """Make a function: out[rows, chunks * 16] += weights[rows, 16] times values[16, chunks * 16], key after key.

    weight_stride, value_stride: bytes from a row of weights, and of values, to the next.
    """

    @vector_function(INT, INT, INT, INT, INT, INT)
    def add_values(
        code: Code, out: Any, weights: Any, weight_stride: Any, values: Any, value_stride: Any, chunks: Any
    ) -> None:
        b = code.builder
        stride = b.mul(chunks, code.number(LANES * 4))
        with code.each(chunks) as i:
            places = [code.at(out, (stride, row), (i, LANES * 4)) for row in range(rows)]
            sums = [code.load(place) for place in places]
            for key in range(LANES):
                value = code.load(code.at(values, (value_stride, key), (i, LANES * 4)))
                for row in range(rows):
                    weight = code.load(code.at(weights, (weight_stride, row), (code.number(4), key)), FLOAT)
                    sums[row] = code.fma(code.splat(weight), value, sums[row])
            for place, total in zip(places, sums, strict=True):
                code.store(total, place)

    return add_values


add_values, add_pair = (_add_values(rows) for rows in (TILE, PAIR))


PAIRS = ir.VectorType(I16, 2 * LANES)  # of bfloat16 numbers, as bits


def _pairs(code: Code, first: Any, second: Any) -> list[Any]:
    """Two vectors of 32 pairs in all: a number of `first` and one of `second`."""
    low = [lane // 2 + 2 * LANES * (lane % 2) for lane in range(2 * LANES)]
    return [code.pick(first, second, low), code.pick(first, second, [lane + LANES for lane in low])]


def _add_pairs(rows: int) -> Any:
    """Make a function: out[rows, chunks * 16] += weights[rows, 16] times values[16, chunks * 16], pair after pair.

    Weights and values are bfloat16. `chunks` is even. weight_stride, value_stride: bytes from a row of weights, and of
    values, to the next.
    """

    @vector_function(INT, INT, INT, INT, INT, INT)
    def add_pairs(
        code: Code, out: Any, weights: Any, weight_stride: Any, values: Any, value_stride: Any, chunks: Any
    ) -> None:
        b = code.builder
        stride = b.mul(chunks, code.number(LANES * 4))
        with code.each(b.udiv(chunks, code.number(2))) as i:
            places = [
                [code.at(out, (stride, row), (i, 128), (code.number(64), part)) for part in range(2)]
                for row in range(rows)
            ]
            sums = [[code.load(place) for place in each] for each in places]
            for pair in range(LANES // 2):
                lines = (code.at(values, (value_stride, 2 * pair + key), (i, 64)) for key in (0, 1))
                value = _pairs(code, *(code.load(line, PAIRS, 2) for line in lines))
                for row in range(rows):
                    weight = code.splat(code.load(code.at(weights, (weight_stride, row), (code.number(4), pair)), I32))
                    weight = b.bitcast(weight, BFLOATS)
                    for part in range(2):
                        sums[row][part] = _add_bfloat16(code, sums[row][part], weight, b.bitcast(value[part], BFLOATS))
            for row in range(rows):
                for place, total in zip(places[row], sums[row], strict=True):
                    code.store(total, place)

    return add_pairs


add_values_bfloat16, add_pair_bfloat16 = (_add_pairs(rows) for rows in (TILE, PAIR))


def _store_float32(code: Code, value: Any, place: Any) -> None:
    code.store(value, place)


def _store_bfloat16(code: Code, value: Any, place: Any) -> None:
    narrow = ir.VectorType(_BFloat(), LANES)
    code.store(code.call("llvm.x86.avx512bf16.cvtneps2bf16.512", narrow, [value]), place)


def _add_scores(store: Callable[[Code, Any, Any], None]) -> Any:
    """Make a function: one step of online softmax (arXiv:1805.02867) for a query and 64 keys.

    The scores of keys low to high - 1, times scale, become weights exp(score - maximum), and the others 0. `store`
    writes 16 weights to the place of their scores. top: the maximum so far, float32. total: the sum of the weights, a
    vector of 16 sums. They and out[chunks * 16] are scaled if the maximum grows.
    """

    @vector_function(INT, INT, INT, INT, INT, FLOAT32, INT, INT)
    def add_scores(
        code: Code, scores: Any, top: Any, total: Any, out: Any, chunks: Any, scale: Any, low: Any, high: Any
    ) -> None:
        b = code.builder
        low, high = (code.splat(b.trunc(each, I32)) for each in (low, high))
        factor, values, seen, places = code.splat(scale), [], [], []
        for group in range(SPAN // LANES):
            lane = code.ints(range(group * LANES, (group + 1) * LANES))
            seen.append(b.and_(b.icmp_signed(">=", lane, low), b.icmp_signed("<", lane, high)))
            places.append(code.at(scores, (code.number(64), group)))
            values.append(b.select(seen[-1], b.fmul(code.load(places[-1]), factor), code.floats(LOWEST)))
        most = values
        while len(most) > 1:
            pairs = zip(most[::2], most[1::2], strict=True)
            most = [b.select(b.fcmp_ordered(">", x, y), x, y) for x, y in pairs]
        largest, old = code.largest(most[0]), code.load(top, FLOAT)
        grows = b.fcmp_ordered(">", largest, old)
        with b.if_then(grows):
            shrink = code.exp(code.splat(b.fsub(old, largest)))
            code.store(largest, top)
            code.store(b.fmul(code.load(total), shrink), total)
            with code.each(chunks) as i:
                place = code.at(out, (i, LANES * 4))
                code.store(b.fmul(code.load(place), shrink), place)
        maximum = code.splat(b.select(grows, largest, old))
        weights = [code.exp(b.fsub(value, maximum)) for value in values]
        weights = [b.select(mask, weight, code.floats(0.0)) for mask, weight in zip(seen, weights, strict=True)]
        for weight, place in zip(weights, places, strict=True):
            store(code, weight, place)
        code.store(b.fadd(code.load(total), _tree(b, weights)), total)

    return add_scores


add_scores, add_scores_bfloat16 = _add_scores(_store_float32), _add_scores(_store_bfloat16)


@vector_function(INT, FLOAT32, FLOAT32, FLOAT32, FLOAT32)
def bend_scores(code: Code, scores: Any, scale: Any, cap: Any, slope: Any, distance: Any) -> None:
    """Scores of 16 keys, times scale, with soft cap and ALiBi, in place.

    cap: 0 for none. slope, distance: of the first key; slope times distance is subtracted.
    """
    b, ones = code.builder, code.floats(1.0)
    value = b.fmul(code.load(scores), code.splat(scale))
    code.store(value, scores)
    with b.if_then(b.fcmp_ordered(">", cap, ir.Constant(FLOAT, 0.0))):
        limit = code.splat(cap)
        x = b.fdiv(value, limit)
        negative = b.fcmp_ordered("<", x, code.floats(0.0))
        size = b.select(negative, b.fneg(x), x)
        small = code.exp(b.fmul(size, code.floats(-2.0)))
        tanh = b.fdiv(b.fsub(ones, small), b.fadd(ones, small))
        code.store(b.fmul(b.select(negative, b.fneg(tanh), tanh), limit), scores)
    distances = b.fsub(code.splat(distance), ir.Constant(FLOATS, [float(lane) for lane in range(LANES)]))
    code.store(b.fsub(code.load(scores), b.fmul(code.splat(slope), distances)), scores)


@vector_function(INT)
def sum_lanes(code: Code, total: Any) -> None:
    """The sum of 16 numbers, in the first of them."""
    value = code.load(total)
    code.store(code.sums([value] * LANES), total)


@vector_function(INT)
def exp_lanes(code: Code, values: Any) -> None:
    """exp of 16 numbers that are at most 0, in place."""
    code.store(code.exp(code.load(values)), values)


@vector_function(INT, INT, INT)
def add_rows(code: Code, to: Any, other: Any, chunks: Any) -> None:
    """to[chunks * 16] += other."""
    b = code.builder
    with code.each(chunks) as i:
        place = code.at(to, (i, LANES * 4))
        code.store(b.fadd(code.load(place), code.load(code.at(other, (i, LANES * 4)))), place)


@vector_function(INT, INT, INT)
def multiply_rows(code: Code, to: Any, other: Any, chunks: Any) -> None:
    """to[chunks * 16] *= other."""
    b = code.builder
    with code.each(chunks) as i:
        place = code.at(to, (i, LANES * 4))
        code.store(b.fmul(code.load(place), code.load(code.at(other, (i, LANES * 4)))), place)


@vector_function(INT, INT, INT)
def sum_squares(code: Code, result: Any, row: Any, chunks: Any) -> None:
    """The sum of the squares of row[chunks * 16], in the first of 16 numbers."""
    b = code.builder
    (total,) = code.variables([code.floats(0.0)])
    with code.each(chunks) as i:
        value = code.load(code.at(row, (i, LANES * 4)))
        b.store(code.fma(value, value, b.load(total)), total)
    code.store(code.sums([b.load(total)] * LANES), result)


@vector_function(INT, INT, INT, INT)
def rotate(code: Code, row: Any, cos: Any, sin: Any, chunks: Any) -> None:
    """Rotary embedding of row[2 * chunks * 16], in place: number i is paired with number i + chunks * 16."""
    b = code.builder
    half = b.mul(chunks, code.number(LANES * 4))
    with code.each(chunks) as i:
        first, second = code.at(row, (i, LANES * 4)), code.at(row, (half, 1), (i, LANES * 4))
        x, y = code.load(first), code.load(second)
        c, s = (code.load(code.at(base, (i, LANES * 4))) for base in (cos, sin))
        code.store(b.fsub(b.fmul(x, c), b.fmul(y, s)), first)
        code.store(b.fadd(b.fmul(y, c), b.fmul(x, s)), second)
