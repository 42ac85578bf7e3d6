"""Dot products of a few rows of x with a few rows of weights, as LLVM IR. See `pallas_kernels.native.vectors`."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from pallas_kernels.native.memory import prefetch_line
from pallas_kernels.native.vectors import (
    FLOATS,
    HAS_BFLOAT16,
    INT,
    INTS,
    LANES,
    PAIRS,
    TILE,
    VECTOR,
    Code,
    add_bfloat16,
    add_float32,
    vector_function,
)

# Without instructions for pairs of bfloat16 numbers, rows of x are taken apart once: `split_pairs`.
SPLITS = not HAS_BFLOAT16
# Rows of weights that a product of few rows reads together. Processors with AVX-512 and without bfloat16 instructions
# need several sums in progress (docs/decisions.md). The others read one stream of memory faster than several.
TOGETHER = 4 if LANES == 16 and SPLITS else 1
AHEAD = 8192 if TOGETHER > 1 else 2048  # prefetch distance in bytes
ROWS = tuple(rows for rows in (1, 2, 4, 5, 6, 8) if rows <= LANES // 2)  # of x, in the products of few rows


def _row(code: Code, base: Any, row: int, line: Any, last: Any) -> Any:
    """Address of a row, or of the last row if there are fewer."""
    b, place = code.builder, code.at(base, (line, row))
    return b.select(b.icmp_signed("<", place, last), place, last)


def _halves(code: Code, pairs: Any) -> tuple[Any, Any]:
    """The first and the second numbers of pairs of bfloat16 numbers, as float32."""
    b = code.builder
    first, second = b.shl(pairs, code.ints(16)), b.and_(pairs, code.ints(-1 << 16))
    return b.bitcast(first, FLOATS), b.bitcast(second, FLOATS)


@vector_function(INT, INT, INT)
def split_pairs(code: Code, to: Any, row: Any, chunks: Any) -> None:
    """Write a row of bfloat16 numbers as float32. Of each vector first its even numbers, then its odd ones."""
    with code.each(chunks) as i:
        halves = _halves(code, code.load(code.at(row, (i, VECTOR)), INTS, 2))
        for half, value in enumerate(halves):
            code.store(value, code.at(to, (i, 2 * VECTOR), (code.number(half * VECTOR), 1)))


# How products read vectors: the type of a vector of weights, and its parts; then vectors of x for each of them, and the
# function that adds their product to a sum.
_Kind = tuple[Any, Callable[[Code, Any], tuple[Any, ...]], int, Callable[[Code, Any, Any, Any], Any]]
_FLOAT32: _Kind = (FLOATS, lambda code, w: (w,), 1, add_float32)
_BFLOAT16: _Kind = (INTS, _halves, 2, add_float32) if SPLITS else (PAIRS, lambda code, w: (w,), 1, add_bfloat16)


def outputs_of(rows: int) -> int:
    """Outputs of a product of `rows` rows: the largest power of two with at most LANES sums in all."""
    return 1 << (LANES // rows).bit_length() - 1


def _dot(kind: _Kind, rows: int, together: int, requests: int) -> Any:
    """Make a function: to[rows, outputs] = x[rows] @ w[outputs].T, where outputs = outputs_of(rows).

    x, w:  rows of vectors: `steps` of w, and of x as many for each part. Missing rows repeat `last_x` and `last_w`.
    to:    float32, with `stride` bytes from row to row.
    early: address of weights to prefetch, `requests` cache lines at a time.

    The function reads `together` rows of w at a time. That does not change the bits of a sum, which adds its vectors in
    order and then its lanes as a tree (`Code.sums`).
    """
    vector, parts_of, num_parts, step = kind
    outputs = outputs_of(rows)
    together = min(together, outputs)

    @vector_function(*[INT] * 8)
    def dot(code: Code, to: Any, stride: Any, x: Any, last_x: Any, w: Any, last_w: Any, steps: Any, early: Any) -> None:
        b, line = code.builder, code.builder.mul(steps, code.number(VECTOR))
        sums = code.variables([code.floats(0.0)] * (rows * outputs))
        x_line = b.mul(line, code.number(num_parts))
        x_rows = [_row(code, x, row, x_line, last_x) for row in range(rows)]
        for first in range(0, outputs, together):
            w_rows = [_row(code, w, output, line, last_w) for output in range(first, first + together)]
            ahead = code.at(early, (line, first))
            with code.each(steps) as i:
                for each in range(requests):
                    prefetch_line(b, code.at(ahead, (i, requests * VECTOR), (code.number(each * VECTOR), 1)))
                w_parts = [parts_of(code, code.load(code.at(row, (i, VECTOR)), vector, 2)) for row in w_rows]
                for part in range(num_parts):
                    for row, x_row in enumerate(x_rows):
                        place = code.at(x_row, (i, num_parts * VECTOR), (code.number(part * VECTOR), 1))
                        x_part = code.load(place, vector if num_parts == 1 else FLOATS, 2)
                        for output, of_output in enumerate(w_parts, first):
                            total = sums[row * outputs + output]
                            b.store(step(code, b.load(total), x_part, of_output[part]), total)
        totals = [b.load(total) for total in sums]
        result = code.sums([*totals, *[ir.Constant(FLOATS, ir.Undefined)] * (LANES - len(totals))])
        for row in range(rows):
            part = code.pick(result, result, range(row * outputs, (row + 1) * outputs))
            code.store(part, code.at(to, (stride, row)))

    return dot


def _few(kind: _Kind) -> dict[int, Any]:
    """The functions for ROWS rows. Weights that are read row by row are one stream, which processors prefetch."""
    return {
        rows: _dot(kind, rows, TOGETHER, min(TOGETHER, outputs_of(rows)) if TOGETHER > 1 else int(rows >= TILE))
        for rows in ROWS
    }


few_float32, few_bfloat16 = _few(_FLOAT32), _few(_BFLOAT16)
dot_tile_float32, dot_tile_bfloat16 = (_dot(kind, TILE, LANES // TILE, 1) for kind in (_FLOAT32, _BFLOAT16))
