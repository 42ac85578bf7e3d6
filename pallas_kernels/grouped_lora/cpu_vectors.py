"""Products of rows of x with an adapter, as LLVM IR. See `pallas_kernels.native.vectors`.

x, h and the sums are float32. The adapter is float32 or bfloat16, and is converted in registers. A sum has the same
order in every function: `shrink` adds whole vectors in order and then the lanes as a tree, and `expand` adds ranks in
order. So a row has the same bits alone and in a tile.
"""

from typing import Any

from pallas_kernels.native.memory import prefetch_line
from pallas_kernels.native.vectors import (
    FLOAT,
    FLOAT32,
    I16S,
    INT,
    LANES,
    TILE,
    VECTOR,
    Code,
    from_bfloat16,
    vector_function,
)

TOGETHER = LANES // TILE  # rows of A, or vectors of outputs, that a tile of rows reads at a time
LINE = 64  # bytes of a prefetch
RANKS = 4  # rows of A or B that one row of x reads at a time: with fewer, it waits for the last sum


def _load(code: Code, size: int, address: Any) -> Any:
    """A vector of numbers of `size` bytes as float32."""
    return code.load(address) if size == 4 else from_bfloat16(code, code.load(address, I16S, 2))


def _shrink_tile(size: int, together: int) -> Any:
    """Make a function: the dot products of TILE rows of x with `count` rows of A, before the lanes are added.

    to: TILE vectors for each row of A. count: a multiple of `together`, the rows of A that are read at a time. steps:
    vectors of a row.
    """

    @vector_function(*[INT] * 8)
    def shrink(code: Code, to: Any, x0: Any, x1: Any, x2: Any, x3: Any, a: Any, steps: Any, count: Any) -> None:
        b, rows = code.builder, (x0, x1, x2, x3)
        line = b.mul(steps, code.number(LANES * size))
        with code.each(b.udiv(count, code.number(together))) as block:
            first = code.at(a, (b.mul(block, line), together))
            sums = code.variables([code.floats(0.0)] * (TILE * together))
            with code.each(steps) as i:
                parts = [_load(code, size, code.at(first, (line, j), (i, LANES * size))) for j in range(together)]
                for row, address in enumerate(rows):
                    x = code.load(code.at(address, (i, VECTOR)))
                    for j, part in enumerate(parts):
                        total = sums[j * TILE + row]
                        b.store(code.fma(x, part, b.load(total)), total)
            for index, total in enumerate(sums):
                code.store(b.load(total), code.at(to, (block, TILE * together * VECTOR), (code.number(VECTOR), index)))

    return shrink


def _prefetch(code: Code, early: Any, step: Any, size: int) -> None:
    """Request the `size` bytes at early + step * size: as much as a step of a loop reads."""
    for offset in range(0, size, LINE):
        prefetch_line(code.builder, code.at(early, (step, size), (code.number(offset), 1)))


def _shrink_row(size: int, together: int) -> Any:
    """Make a function: as `_shrink_tile`, for one row of x. to: a vector for each row of A.

    early: address from which to prefetch as many bytes as the function reads.
    """

    @vector_function(*[INT] * 6)
    def shrink(code: Code, to: Any, x: Any, a: Any, steps: Any, count: Any, early: Any) -> None:
        b = code.builder
        line = b.mul(steps, code.number(LANES * size))
        with code.each(b.udiv(count, code.number(together))) as block:
            offset = b.mul(block, b.mul(line, code.number(together)))
            first, ahead = code.at(a, (offset, 1)), code.at(early, (offset, 1))
            sums = code.variables([code.floats(0.0)] * together)
            with code.each(steps) as i:
                _prefetch(code, ahead, i, together * LANES * size)
                row = code.load(code.at(x, (i, VECTOR)))
                for j, total in enumerate(sums):
                    part = _load(code, size, code.at(first, (line, j), (i, LANES * size)))
                    b.store(code.fma(row, part, b.load(total)), total)
            for j, total in enumerate(sums):
                code.store(b.load(total), code.at(to, (block, together * VECTOR), (code.number(VECTOR), j)))

    return shrink


@vector_function(INT, INT)
def prefetch_lines(code: Code, address: Any, count: Any) -> None:
    """Request `count` lines of LINE bytes."""
    with code.each(count) as i:
        prefetch_line(code.builder, code.at(address, (i, LINE)))


@vector_function(INT, INT, INT, FLOAT32)
def add_lanes(code: Code, to: Any, source: Any, stride: Any, scale: Any) -> None:
    """to[LANES] = scale * the sum of the lanes of LANES vectors. stride: bytes from vector to vector."""
    total = code.sums([code.load(code.at(source, (stride, index))) for index in range(LANES)])
    code.store(code.builder.fmul(total, code.splat(scale)), to)


def _expand_tile(size: int, vectors: int) -> Any:
    """Make a function: TILE rows of outputs += h @ B, for chunks * vectors * LANES outputs.

    h: TILE rows of float32, h_stride bytes apart. line: bytes from row to row of B. ranks: rows of B.
    """

    @vector_function(*[INT] * 10)
    def expand(
        code: Code, to0: Any, to1: Any, to2: Any, to3: Any, h: Any, h_stride: Any, w: Any, line: Any, ranks: Any,
        chunks: Any,
    ) -> None:  # fmt: skip
        b, step = code.builder, code.number(VECTOR)
        with code.each(chunks) as i:
            places = [
                code.at(to, (i, vectors * VECTOR), (step, j)) for to in (to0, to1, to2, to3) for j in range(vectors)
            ]
            sums = code.variables([code.load(place) for place in places])
            with code.each(ranks) as r:
                first = code.at(w, (b.mul(r, line), 1), (i, vectors * LANES * size))
                parts = [_load(code, size, code.at(first, (code.number(LANES * size), j))) for j in range(vectors)]
                for row in range(TILE):
                    factor = code.splat(code.load(code.at(h, (h_stride, row), (r, 4)), FLOAT))
                    for j, part in enumerate(parts):
                        total = sums[row * vectors + j]
                        b.store(code.fma(factor, part, b.load(total)), total)
            for place, total in zip(places, sums, strict=True):
                code.store(b.load(total), place)

    return expand


def _expand_row(size: int, ranks: int) -> Any:
    """Make a function: one row of chunks * LANES outputs += h[ranks] @ B[ranks]. early: as in `_shrink_row`."""

    @vector_function(*[INT] * 6)
    def expand(code: Code, to: Any, h: Any, w: Any, line: Any, chunks: Any, early: Any) -> None:
        factors = [code.splat(code.load(code.at(h, (code.number(4), r)), FLOAT)) for r in range(ranks)]
        with code.each(chunks) as i:
            _prefetch(code, early, i, ranks * LANES * size)
            place = code.at(to, (i, VECTOR))
            total = code.load(place)
            for r, factor in enumerate(factors):
                address = code.at(w, (line, r), (i, LANES * size))
                total = code.fma(factor, _load(code, size, address), total)
            code.store(total, place)

    return expand


shrink_row_float32, shrink_row_bfloat16 = (_shrink_row(size, RANKS) for size in (4, 2))
shrink_row_1_float32, shrink_row_1_bfloat16 = (_shrink_row(size, 1) for size in (4, 2))
shrink_tile_float32, shrink_tile_bfloat16 = (_shrink_tile(size, TOGETHER) for size in (4, 2))
shrink_tile_1_float32, shrink_tile_1_bfloat16 = (_shrink_tile(size, 1) for size in (4, 2))
expand_row_float32, expand_row_bfloat16 = (_expand_row(size, RANKS) for size in (4, 2))
expand_row_1_float32, expand_row_1_bfloat16 = (_expand_row(size, 1) for size in (4, 2))
expand_tile_float32, expand_tile_bfloat16 = (_expand_tile(size, TOGETHER) for size in (4, 2))
expand_tile_1_float32, expand_tile_1_bfloat16 = (_expand_tile(size, 1) for size in (4, 2))
