"""The convolution of one token, and SiLU, as LLVM IR. See `pallas_kernels.native.vectors`."""

from typing import Any

from pallas_kernels.native.vectors import INT, VECTOR, Code, vector_function


@vector_function(INT, INT, INT, INT, INT, INT, INT, INT)
def convolve(
    code: Code, to: Any, inputs: Any, line: Any, weights: Any, weight_line: Any, bias: Any, width: Any, chunks: Any
) -> None:
    """to[c] = bias[c] + sum over j < width of weights[j, c] * inputs[j, c], oldest input first. All are float32.

    line, weight_line: bytes from a row of inputs or weights to the next. c: chunks * LANES channels.
    """
    b = code.builder
    with code.each(chunks) as i:
        (total,) = code.variables([code.load(code.at(bias, (i, VECTOR)))])
        with code.each(width) as j:
            value = code.load(code.at(inputs, (b.mul(j, line), 1), (i, VECTOR)))
            weight = code.load(code.at(weights, (b.mul(j, weight_line), 1), (i, VECTOR)))
            b.store(code.fma(weight, value, b.load(total)), total)
        code.store(b.load(total), code.at(to, (i, VECTOR)))


@vector_function(INT, INT)
def silu(code: Code, row: Any, chunks: Any) -> None:
    """row[chunks * LANES] *= sigmoid(row)."""
    b, one = code.builder, code.floats(1.0)
    with code.each(chunks) as i:
        place = code.at(row, (i, VECTOR))
        x = code.load(place)
        is_negative = b.fcmp_ordered("<", x, code.floats(0.0))
        small = code.exp(b.select(is_negative, x, b.fneg(x)))  # exp(-|x|) cannot overflow
        code.store(b.fdiv(b.fmul(x, b.select(is_negative, small, one)), b.fadd(one, small)), place)
