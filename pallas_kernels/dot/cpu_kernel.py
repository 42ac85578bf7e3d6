"""dot for CPUs in numba: rows times a matrix [out, in]. Imported only to compile.

A unit of work is a block of OUTPUTS outputs, for all rows. Every sum adds whole vectors in the order of the inputs, and
then adds the lanes in a tree. So a row's bits do not depend on the other rows.
"""

from collections.abc import Callable, Mapping
from typing import Any

from numba import njit

from pallas_kernels.dot import cpu_vectors
from pallas_kernels.dot.cpu import OPTION_KIND, OPTION_OUT_KIND
from pallas_kernels.native import vectors
from pallas_kernels.native.frame import NATIVE, argument, dimension, make_kernel, make_work, result, words
from pallas_kernels.native.kinds import BFLOAT16
from pallas_kernels.native.memory import fill_zeros, load_int32, load_int64, store_int64

LANES, TILE, VECTOR = vectors.LANES, vectors.TILE, vectors.VECTOR
TILE_OUTPUTS = LANES // TILE
OUTPUTS = 64  # of a unit
MOST_ROWS = 16  # most rows of x with sums in scratch memory at a time
MOST_FEW = cpu_vectors.ROWS[-1]  # most rows of x for `few_float32` and `few_bfloat16`
SPLITS, AHEAD = cpu_vectors.SPLITS, cpu_vectors.AHEAD
FIRST_CACHE = 28_672  # bytes of x that stay in the L1 cache, next to a tile's weights
STRIDE = 4 * OUTPUTS  # bytes from row to row of sums
SUM_BYTES = MOST_ROWS * STRIDE
MIN_SHARED_BYTES = 131_072  # of weights; below, one thread is faster

X, WEIGHT, OUT, ROWS, NUM_OUTPUTS, INPUT_BYTES, KIND, OUT_KIND, JOB_BYTES = words(8)




@njit(**NATIVE)
def line_of_x(kind, line):
    """Bytes of a row of x as the products read it. line: bytes of the row, and of a row of weights."""
    return 2 * line if kind == BFLOAT16 and SPLITS else line


@njit(**NATIVE)
def scratch_for(kind, line):
    """Bytes of a thread's scratch for `multiply_rows`: the sums of a block, then rows of x that are split."""
    return SUM_BYTES + (max(FIRST_CACHE, TILE * line_of_x(kind, line)) if kind == BFLOAT16 and SPLITS else 0)


@njit(**NATIVE)
def scratch_bytes(job):
    """Bytes of a thread's scratch."""
    return scratch_for(load_int64(job + KIND), load_int64(job + INPUT_BYTES))


@njit(**NATIVE)
def dot_tile(kind, to, x, last_x, w, last_w, line, early):
    """Multiply TILE rows of x by LANES // TILE rows of w. Missing rows repeat the last. early: row of w to prefetch."""
    if kind == BFLOAT16:
        cpu_vectors.dot_tile_bfloat16(to, STRIDE, x, last_x, w, last_w, line // VECTOR, early)
    else:
        cpu_vectors.dot_tile_float32(to, STRIDE, x, last_x, w, last_w, line // VECTOR, early)


@njit(**NATIVE)
def few_rows(rows, x_line):
    """`few` of `dot_few` for `rows` rows: the next of ROWS; 0 where `dot_tile` is faster."""
    few = 1 if rows <= 1 else 2 if rows <= 2 else 4 if rows <= 4 else max(rows, 5) if rows <= 6 else 8
    return few if rows <= MOST_FEW and (few <= 2 or few * x_line <= FIRST_CACHE) else 0


def make_few(functions: Mapping[int, Any]) -> Callable[..., None]:
    """A function that multiplies `few` rows of x, one of ROWS, with the function for that number."""
    (rows, function), *others = functions.items()
    if not others:

        @njit(**NATIVE)
        def last(few, to, x, last_x, w, last_w, line, early):
            function(to, STRIDE, x, last_x, w, last_w, line // VECTOR, early)

        return last
    other = make_few(dict(others))

    @njit(**NATIVE)
    def choose(few, to, x, last_x, w, last_w, line, early):
        if few == rows:
            function(to, STRIDE, x, last_x, w, last_w, line // VECTOR, early)
        else:
            other(few, to, x, last_x, w, last_w, line, early)

    return choose


few_float32, few_bfloat16 = make_few(cpu_vectors.few_float32), make_few(cpu_vectors.few_bfloat16)


@njit(**NATIVE)
def multiply_few(kind, few, x, rows, x_line, weight, count, line, to):
    """Multiply at most `few` rows of x by `count` rows of weights."""
    last_x, last_w = x + (rows - 1) * x_line, weight + (count - 1) * line
    outputs = LANES // few if few <= TILE else 2
    for output in range(0, count, outputs):
        w = weight + output * line
        if kind == BFLOAT16:
            few_bfloat16(few, to + 4 * output, x, last_x, w, last_w, line, w + AHEAD)
        else:
            few_float32(few, to + 4 * output, x, last_x, w, last_w, line, w + AHEAD)


@njit(**NATIVE)
def multiply_tiles(kind, x, rows, x_line, weight, count, line, to, is_first):
    """Multiply rows of x, at most MOST_ROWS, by `count` rows of weights. is_first: the weights are not in the cache."""
    last_x, last_w = x + (rows - 1) * x_line, weight + (count - 1) * line
    for output in range(0, count, TILE_OUTPUTS):
        for row in range(0, rows, TILE):
            # prefetch the next outputs' weights: each of the first tiles of rows requests one row of weights
            next_output = output + TILE_OUTPUTS + min(row // TILE, TILE_OUTPUTS - 1)
            early = weight + next_output * line if is_first else x
            place = to + row * STRIDE + 4 * output
            dot_tile(kind, place, x + row * x_line, last_x, weight + output * line, last_w, line, early)


@njit(**NATIVE)
def multiply_rows(kind, out_kind, x, rows, line, weight, count, out, outputs, scratch):
    """Multiply rows of x by at most OUTPUTS rows of weights.

    line: bytes of a row of x, and of weights. count: rows of weights. out: address of the first row's first result.
    outputs: row stride of the results, in numbers. scratch: `scratch_for` bytes.
    """
    size = 2 if out_kind == BFLOAT16 else 4
    x_line = line_of_x(kind, line)
    few = few_rows(rows, x_line)
    together = rows if few > 0 else max(TILE, min(MOST_ROWS, FIRST_CACHE // x_line // TILE * TILE))
    for start in range(0, rows, together):
        end = min(start + together, rows)
        read = x + start * line
        if x_line != line:
            read = scratch + SUM_BYTES
            for row in range(start, end):
                cpu_vectors.split_pairs(read + (row - start) * x_line, x + row * line, line // VECTOR)
        if few > 0:
            multiply_few(kind, few, read, rows, x_line, weight, count, line, scratch)
        else:
            multiply_tiles(kind, read, end - start, x_line, weight, count, line, scratch, start == 0)
        for row in range(start, end):
            source, target = scratch + (row - start) * STRIDE, out + row * outputs * size
            if out_kind == BFLOAT16:
                vectors.narrow_bfloat16(target, source, count, vectors.ONE)
            else:
                vectors.narrow_float32(target, source, count, vectors.ONE)


@njit(**NATIVE)
def multiply(job, unit, scratch):
    """Compute one unit: a block of outputs, for all rows."""
    line, outputs, out_kind = load_int64(job + INPUT_BYTES), load_int64(job + NUM_OUTPUTS), load_int64(job + OUT_KIND)
    first = unit * OUTPUTS
    multiply_rows(
        load_int64(job + KIND), out_kind, load_int64(job + X), load_int64(job + ROWS), line,
        load_int64(job + WEIGHT) + first * line, min(OUTPUTS, outputs - first),
        load_int64(job + OUT) + first * (2 if out_kind == BFLOAT16 else 4), outputs, scratch,
    )  # fmt: skip


@njit(**NATIVE)
def prepare_product(job, kind, out_kind, x, all_rows, rows, inputs, weight, outputs, out):
    """Write a job's words for the product of `rows` rows, and zeros for the others. Returns the number of units."""
    line, out_line = inputs * (2 if kind == BFLOAT16 else 4), outputs * (2 if out_kind == BFLOAT16 else 4)
    store_int64(job + X, x)
    store_int64(job + WEIGHT, weight)
    store_int64(job + OUT, out)
    store_int64(job + ROWS, rows)
    store_int64(job + NUM_OUTPUTS, outputs)
    store_int64(job + INPUT_BYTES, line)
    store_int64(job + KIND, kind)
    store_int64(job + OUT_KIND, out_kind)
    fill_zeros(out + rows * out_line, (all_rows - rows) * out_line)
    return (outputs + OUTPUTS - 1) // OUTPUTS if rows > 0 else 0


@njit(**NATIVE)
def prepare(frame, job):
    """Write the job's words. Returns the number of units, and whether threads share them."""
    options = argument(frame, 0)
    all_rows, inputs, outputs = dimension(frame, 2, 0), dimension(frame, 2, 1), dimension(frame, 3, 0)
    rows = max(0, min(all_rows, load_int32(argument(frame, 1))))
    units = prepare_product(
        job, load_int32(options + 4 * OPTION_KIND), load_int32(options + 4 * OPTION_OUT_KIND), argument(frame, 2),
        all_rows, rows, inputs, argument(frame, 3), outputs, result(frame, 0),
    )  # fmt: skip
    return units, outputs * load_int64(job + INPUT_BYTES) >= MIN_SHARED_BYTES


task, handler = make_kernel(prepare, make_work(multiply), JOB_BYTES, scratch_bytes)
