"""RMS norm, SiLU times a factor, and argmax of one row, as LLVM IR. Rows are whole vectors, except for argmax."""

from typing import Any

from llvmlite import ir

from pallas_kernels.native.memory import I32, pointer
from pallas_kernels.native.vectors import (
    FLOAT32,
    FLOATS,
    I16S,
    INT,
    LANES,
    VECTOR,
    Code,
    from_bfloat16,
    to_bfloat16,
    vector_function,
)

SIZES = {"float32": 4, "bfloat16": 2}  # bytes of a number


def _load(code: Code, kind: str, address: Any) -> Any:
    """A vector of numbers as float32."""
    if kind == "float32":
        return code.load(address)
    return from_bfloat16(code, code.load(address, I16S, 2))


def _store(code: Code, kind: str, value: Any, address: Any) -> None:
    """Store a vector of numbers, rounded to their type."""
    if kind == "float32":
        code.store(value, address)
    else:
        code.store(to_bfloat16(code, value), address, 2)


def _round(code: Code, kind: str, value: Any) -> Any:
    """Round a vector of numbers to a type."""
    return value if kind == "float32" else from_bfloat16(code, to_bfloat16(code, value))


def _rms_norm(kind: str) -> Any:
    """Make a function: to = round(row / rms(row)) * weights. share: 1 / the row's width."""

    @vector_function(INT, INT, INT, INT, FLOAT32, FLOAT32)
    def rms_norm(code: Code, to: Any, row: Any, weights: Any, chunks: Any, share: Any, eps: Any) -> None:
        b, step = code.builder, LANES * SIZES[kind]
        (total,) = code.variables([code.floats(0.0)])
        with code.each(chunks) as i:
            value = _load(code, kind, code.at(row, (i, step)))
            b.store(code.fma(value, value, b.load(total)), total)
        mean = b.fadd(b.fmul(code.sums([b.load(total)] * LANES), code.splat(share)), code.splat(eps))
        factor = b.fdiv(code.floats(1.0), code.call(f"llvm.sqrt.v{LANES}f32", FLOATS, [mean]))
        with code.each(chunks) as i:
            value = b.fmul(_load(code, kind, code.at(row, (i, step))), factor)
            value = b.fmul(_round(code, kind, value), _load(code, kind, code.at(weights, (i, step))))
            _store(code, kind, value, code.at(to, (i, step)))

    return rms_norm


def _silu_and_mul(kind: str) -> Any:
    """Make a function: to = round(silu(row)) * factors."""

    @vector_function(INT, INT, INT, INT)
    def silu_and_mul(code: Code, to: Any, row: Any, factors: Any, chunks: Any) -> None:
        b, step, one = code.builder, LANES * SIZES[kind], code.floats(1.0)
        with code.each(chunks) as i:
            x = _load(code, kind, code.at(row, (i, step)))
            is_negative = b.fcmp_ordered("<", x, code.floats(0.0))
            small = code.exp(b.select(is_negative, x, b.fneg(x)))  # exp(-|x|) cannot overflow
            value = b.fdiv(b.fmul(x, b.select(is_negative, small, one)), b.fadd(one, small))
            value = b.fmul(_round(code, kind, value), _load(code, kind, code.at(factors, (i, step))))
            _store(code, kind, value, code.at(to, (i, step)))

    return silu_and_mul


rms_norm_float32, rms_norm_bfloat16 = _rms_norm("float32"), _rms_norm("bfloat16")
silu_and_mul_float32, silu_and_mul_bfloat16 = _silu_and_mul("float32"), _silu_and_mul("bfloat16")


@vector_function(INT, INT, INT)
def argmax_float32(code: Code, to: Any, row: Any, count: Any) -> None:
    """Store the lowest index of the largest of row[count], as an int32. NaN is ignored; 0 if all are NaN or -inf.

    Each lane keeps the first of its largest numbers. count: below 2**31.
    """
    b, lanes = code.builder, code.number(LANES)
    best, place = code.variables([code.floats(float("-inf")), code.ints(range(LANES))])

    def compare(value: Any, first: Any) -> None:
        is_larger = b.fcmp_ordered(">", value, b.load(best))
        index = b.add(code.splat(b.trunc(first, I32)), code.ints(range(LANES)))
        b.store(b.select(is_larger, index, b.load(place)), place)
        b.store(b.select(is_larger, value, b.load(best)), best)

    with code.each(b.udiv(count, lanes)) as i:
        compare(code.load(code.at(row, (i, VECTOR))), b.mul(i, lanes))
    rest = b.urem(count, lanes)
    with b.if_then(b.icmp_unsigned("!=", rest, code.number(0))):
        done = b.sub(count, rest)
        inside = b.icmp_signed("<", code.ints(range(LANES)), code.splat(b.trunc(rest, I32)))
        least = code.floats(float("-inf"))
        arguments = [pointer(b, code.at(row, (done, 4)), FLOATS), ir.Constant(I32, 4), inside, least]
        compare(code.call(f"llvm.masked.load.v{LANES}f32.p0", FLOATS, arguments), done)
    value = b.load(best)
    is_best = b.fcmp_ordered("==", value, code.splat(code.largest(value)))
    indices = b.select(is_best, b.load(place), code.ints(2**31 - 1))
    code.store(code.call(f"llvm.vector.reduce.smin.v{LANES}i32", I32, [indices]), to)
