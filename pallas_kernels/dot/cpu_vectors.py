"""Products of a few rows with a few rows of weights, as LLVM IR: see `pallas_kernels.native.vectors`."""

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

AHEAD = 2048  # bytes: distance to the weights that are requested early


def _row(code: Code, base: Any, row: int, line: Any, last: Any) -> Any:
    """Address of a row, or of the last one."""
    b, place = code.builder, code.at(base, (line, row))
    return b.select(b.icmp_signed("<", place, last), place, last)


def _dot(vector: Any, step: Callable[[Code, Any, Any, Any], Any], rows: int, together: int) -> Any:
    """Make a function that multiplies `rows` rows x with LANES // rows rows w, `together` of them at a time.

    x, w: `steps` vectors a row. Rows after the last one are replaced by it. The sums are stored as rows of x, `stride`
    bytes apart. A sum is one chain over the vectors, then the tree of `Code.sums`: `together` does not change its bits.
    early: address of a row of weights that is requested early; 0: the weights that follow.
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
                if rows >= TILE:  # with fewer, the processor itself reads ahead far enough
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


# Few rows take the rows of weights one after the other. Memory gives 56 GB/s in this order, and 25 if 4 rows are read
# at a time (two cores of a Zen 5, 60 MB of weights).
dot_1_float32, dot_2_float32, dot_4_float32, dot_8_float32, dot_tile_float32 = (
    _dot(FLOATS, add_float32, rows, together)
    for rows, together in ((1, 1), (2, 1), (4, 1), (8, 1), (TILE, LANES // TILE))
)
dot_1_bfloat16, dot_2_bfloat16, dot_4_bfloat16, dot_8_bfloat16, dot_tile_bfloat16 = (
    _dot(PAIRS, add_bfloat16, rows, together)
    for rows, together in ((1, 1), (2, 1), (4, 1), (8, 1), (TILE, LANES // TILE))
)
