"""Arithmetic on rows of float32 numbers, a vector at a time, as LLVM IR.

Every result is one chain of operations in a fixed order. So its bits depend neither on other rows nor on LLVM's
vectoriser. They do depend on the processor, which decides the width of a vector. Addresses are int64. `chunks` is a
row's length in vectors: rows are padded with zeros.
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

from pallas_kernels.native import library
from pallas_kernels.native.memory import I8, I32, I64, declared, pointer

# Numbers in a vector, and sums in a tile. AVX2 has 16 registers, which hold 8 sums of 8 numbers; NEON's hold as many.
# LLVM would keep most of 16 sums of 16 numbers in memory there.
LANES = 16 if "avx512f" in library.processor().features else 8
VECTOR = 4 * LANES  # bytes
TILE = 4  # rows of a tile
PAIR = 2  # rows of a tile when a call has at most 2
HAS_BFLOAT16 = "avx512bf16" in library.processor().features  # instructions that multiply pairs of bfloat16 numbers
FLOAT, I16, I1 = ir.FloatType(), ir.IntType(16), ir.IntType(1)
FLOATS, INTS, I16S = (ir.VectorType(kind, LANES) for kind in (FLOAT, I32, I16))
ONE = np.float32(1)


class Code:
    """A builder of LLVM IR with the operations that the functions below need."""

    def __init__(self, builder: Any):
        self.builder = builder

    def number(self, value: int) -> Any:
        """An int64 constant."""
        return ir.Constant(I64, value)

    def floats(self, value: float) -> Any:
        """A vector of one float32 constant."""
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

    def splat(self, value: Any, lanes: int = LANES) -> Any:
        """A vector of copies of a value."""
        kind = ir.VectorType(value.type, lanes)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
        return self.pick(one, one, [0] * lanes)

    def pick(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """A vector of these lanes of a (0 to n - 1) and b (n to 2n - 1)."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

    def join(self, vectors: Sequence[Any]) -> Any:
        """The lanes of 1, 2, 4, ... vectors of equal width, one after the other."""
        while len(vectors) > 1:
            width = 2 * vectors[0].type.count
            vectors = [self.pick(a, b, range(width)) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c with one rounding."""
        return self.call(f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])

    def largest(self, value: Any) -> Any:
        """The largest lane; with NaN among them, any lane."""
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
        """The sums of LANES vectors, as a vector. Each is the same tree: lane i + lane i + LANES / 2, and so on."""
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
        """exp(x) for x <= 0, to 1 unit in the last place, as in Cephes' expf. 0 below -87; NaN stays NaN."""
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
        """A loop that yields its index."""
        with cgutils.for_range(self.builder, count) as loop:
            yield loop.index

    def variables(self, values: Sequence[Any]) -> list[Any]:
        """Variables with these initial values. LLVM keeps them in registers."""
        made = [cgutils.alloca_once(self.builder, value.type) for value in values]
        for each, value in zip(made, values, strict=True):
            self.builder.store(value, each)
        return made


def vector_function(*arguments: Any) -> Callable[[Callable[..., None]], Any]:
    """Decorator: turn a function that emits code into a numba function without a result, of these argument types."""

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
    """Make a function (to, source, count, scale): `count` numbers as float32, times scale, padded to whole vectors."""

    @vector_function(INT, INT, INT, FLOAT32)
    def widen(code: Code, to: Any, source: Any, count: Any, scale: Any) -> None:
        b, size = code.builder, kind.width // 8 if isinstance(kind, ir.IntType) else 4
        vector = ir.VectorType(kind, LANES)
        factors = code.splat(scale)
        with code.each(b.udiv(count, code.number(LANES))) as i:
            value = code.load(code.at(source, (i, LANES * size)), vector, size)
            code.store(b.fmul(convert(code, value), factors), code.at(to, (i, VECTOR)))
        rest = b.urem(count, code.number(LANES))
        with b.if_then(b.icmp_unsigned("!=", rest, code.number(0))):
            done = b.sub(count, rest)
            lanes = b.icmp_signed("<", code.ints(range(LANES)), code.splat(b.trunc(rest, I32)))
            pointed = pointer(b, code.at(source, (done, size)), vector)
            name = f"llvm.masked.load.v{LANES}{'f32' if size == 4 else f'i{8 * size}'}.p0"
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
    """Make a function (to, source, count, scale): `count` float32 numbers, times scale, in another type."""

    @vector_function(INT, INT, INT, FLOAT32)
    def narrow(code: Code, to: Any, source: Any, count: Any, scale: Any) -> None:
        b, size = code.builder, kind.width // 8 if isinstance(kind, ir.IntType) else 4
        vector = ir.VectorType(kind, LANES)
        factors = code.splat(scale)
        with code.each(b.udiv(count, code.number(LANES))) as i:
            value = b.fmul(code.load(code.at(source, (i, VECTOR))), factors)
            code.store(convert(code, value), code.at(to, (i, LANES * size)), size)
        rest = b.urem(count, code.number(LANES))
        with b.if_then(b.icmp_unsigned("!=", rest, code.number(0))):
            done = b.sub(count, rest)
            value = convert(code, b.fmul(code.load(code.at(source, (done, 4))), factors))
            lanes = b.icmp_signed("<", code.ints(range(LANES)), code.splat(b.trunc(rest, I32)))
            pointed = pointer(b, code.at(to, (done, size)), vector)
            name = f"llvm.masked.store.v{LANES}{'f32' if size == 4 else 'i16'}.p0"
            code.call(name, ir.VoidType(), [value, pointed, ir.Constant(I32, size), lanes])

    return narrow


narrow_float32 = _narrow(FLOAT, lambda code, value: value)
narrow_bfloat16 = _narrow(I16, to_bfloat16)
narrow_float16 = _narrow(I16, _to_float16)


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


# A vector of pairs of bfloat16 numbers, for `add_bfloat16`
PAIRS = ir.VectorType(BFloat(), 2 * LANES) if HAS_BFLOAT16 else INTS


def add_float32(code: Code, total: Any, x: Any, w: Any) -> Any:
    """Return total + x * w."""
    return code.fma(x, w, total)


def add_bfloat16(code: Code, total: Any, x: Any, w: Any) -> Any:
    """Return total + both products of each pair. Without instructions for pairs, they are added one by one."""
    if HAS_BFLOAT16:
        return code.call("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [total, x, w])
    b = code.builder
    for half in (lambda pair: b.shl(pair, code.ints(16)), lambda pair: b.and_(pair, code.ints(-1 << 16))):
        total = code.fma(b.bitcast(half(x), FLOATS), b.bitcast(half(w), FLOATS), total)
    return total


@vector_function(INT, INT, INT)
def add_rows(code: Code, to: Any, other: Any, chunks: Any) -> None:
    """to[chunks * LANES] += other."""
    b = code.builder
    with code.each(chunks) as i:
        place = code.at(to, (i, VECTOR))
        code.store(b.fadd(code.load(place), code.load(code.at(other, (i, VECTOR)))), place)


@vector_function(INT, INT, INT)
def multiply_rows(code: Code, to: Any, other: Any, chunks: Any) -> None:
    """to[chunks * LANES] *= other."""
    b = code.builder
    with code.each(chunks) as i:
        place = code.at(to, (i, VECTOR))
        code.store(b.fmul(code.load(place), code.load(code.at(other, (i, VECTOR)))), place)


@vector_function(INT, INT, INT)
def sum_squares(code: Code, result: Any, row: Any, chunks: Any) -> None:
    """Store the sum of the squares of row[chunks * LANES], in every lane of a vector at `result`."""
    b = code.builder
    (total,) = code.variables([code.floats(0.0)])
    with code.each(chunks) as i:
        value = code.load(code.at(row, (i, VECTOR)))
        b.store(code.fma(value, value, b.load(total)), total)
    code.store(code.sums([b.load(total)] * LANES), result)


@vector_function(INT, INT, INT, INT)
def rotate(code: Code, row: Any, cos: Any, sin: Any, chunks: Any) -> None:
    """Rotary embedding of row[2 * chunks * LANES], in place: number i is paired with number i + chunks * LANES."""
    b = code.builder
    half = b.mul(chunks, code.number(VECTOR))
    with code.each(chunks) as i:
        first, second = code.at(row, (i, VECTOR)), code.at(row, (half, 1), (i, VECTOR))
        x, y = code.load(first), code.load(second)
        c, s = (code.load(code.at(base, (i, VECTOR))) for base in (cos, sin))
        code.store(b.fsub(b.fmul(x, c), b.fmul(y, s)), first)
        code.store(b.fadd(b.fmul(y, c), b.fmul(x, s)), second)
