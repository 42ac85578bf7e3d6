"""Dot products of a few rows of x with a few rows of weights, as LLVM IR. See `pallas_kernels.native.vectors`."""

from collections.abc import Callable
from typing import Any

from pallas_kernels.native.memory import prefetch_line
from pallas_kernels.native.vectors import (
    FLOATS,
    INT,
    LANES,
    PAIRS,
    TILE,
    VECTOR,
    Code,
    add_bfloat16,
    add_float32,
    vector_function,
)

AHEAD = 2048  # prefetch distance, in bytes


def _row(code: Code, base: Any, row: int, line: Any, last: Any) -> Any:
    """Address of a row, or of the last row if there are fewer."""
    b, place = code.builder, code.at(base, (line, row))
    return b.select(b.icmp_signed("<", place, last), place, last)


def _dot(vector: Any, step: Callable[[Code, Any, Any, Any], Any], rows: int, together: int) -> Any:
    """Make a function: to[rows, outputs] = x[rows] @ w[outputs].T, where outputs = LANES // rows: LANES sums in all.

    x, w:  rows of `steps` vectors. Missing rows repeat `last_x` and `last_w`.
    to:    float32, with `stride` bytes from row to row.
    early: address of a row of weights to prefetch; 0: the weights AHEAD bytes later.

    The function reads `together` rows of w at a time. That does not change the bits of a sum, which adds its vectors in
    order and then its lanes as a tree (`Code.sums`).
    """
    outputs = LANES // rows

    @vector_function(*[INT] * 8)
    def dot(code: Code, to: Any, stride: Any, x: Any, last_x: Any, w: Any, last_w: Any, steps: Any, early: Any) -> None:
        b, line = code.builder, code.builder.mul(steps, code.number(VECTOR))
        sums = code.variables([code.floats(0.0)] * LANES)
        x_rows = [_row(code, x, row, line, last_x) for row in range(rows)]
        is_given = b.icmp_unsigned("!=", early, code.number(0))
        for first in range(0, outputs, together):
            w_rows = [_row(code, w, output, line, last_w) for output in range(first, first + together)]
            ahead = b.select(is_given, early, code.at(w_rows[0], (code.number(AHEAD), 1)))
            with code.each(steps) as i:
                if rows >= TILE:  # with fewer rows, the processor's own prefetching suffices
                    prefetch_line(b, code.at(ahead, (i, VECTOR)))
                w_parts = [code.load(code.at(row, (i, VECTOR)), vector, 2) for row in w_rows]
                for row, x_row in enumerate(x_rows):
                    x_part = code.load(code.at(x_row, (i, VECTOR)), vector, 2)
                    for output, w_part in enumerate(w_parts, first):
                        total = sums[row * outputs + output]
                        b.store(step(code, b.load(total), x_part, w_part), total)
        result = code.sums([b.load(total) for total in sums])
        for row in range(rows):
            part = code.pick(result, result, range(row * outputs, (row + 1) * outputs))
            code.store(part, code.at(to, (stride, row)))

    return dot


# dot_1 to dot_8 read one row of weights at a time: 56 GB/s from memory, against 25 with 4 rows at a time (two cores of
# a Zen 5, 60 MB of weights).
dot_1_float32, dot_2_float32, dot_4_float32, dot_8_float32, dot_tile_float32 = (
    _dot(FLOATS, add_float32, rows, together)
    for rows, together in ((1, 1), (2, 1), (4, 1), (8, 1), (TILE, LANES // TILE))
)
dot_1_bfloat16, dot_2_bfloat16, dot_4_bfloat16, dot_8_bfloat16, dot_tile_bfloat16 = (
    _dot(PAIRS, add_bfloat16, rows, together)
    for rows, together in ((1, 1), (2, 1), (4, 1), (8, 1), (TILE, LANES // TILE))
)
