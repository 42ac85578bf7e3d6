"""dot for CPUs in numba: rows times a matrix [out, in]. Imported only to compile.

A unit of work is a block of OUTPUTS outputs, for all rows. Every sum adds whole vectors in the order of the inputs, and
then adds the lanes in a tree. So a row's bits do not depend on the other rows.
"""

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
FEW = 8 if LANES == 16 else TILE  # most rows of x for `dot_few`, which reads one row of weights at a time
FIRST_CACHE = 28_672  # bytes of x that stay in the L1 cache, next to a tile's weights
MIN_SHARED_BYTES = 131_072  # of weights; below, one thread is faster

X, WEIGHT, OUT, ROWS, NUM_OUTPUTS, INPUT_BYTES, KIND, OUT_KIND, JOB_BYTES = words(8)


@njit(**NATIVE)
def scratch_bytes(job):
    """Bytes of a thread's scratch: the sums of a block."""
    return 4 * MOST_ROWS * OUTPUTS


@njit(**NATIVE)
def dot_tile(kind, to, x, last_x, w, last_w, line, early):
    """Multiply TILE rows of x by LANES // TILE rows of w. Missing rows repeat the last. early: row of w to prefetch."""
    if kind == BFLOAT16:
        cpu_vectors.dot_tile_bfloat16(to, 4 * OUTPUTS, x, last_x, w, last_w, line // VECTOR, early)
    else:
        cpu_vectors.dot_tile_float32(to, 4 * OUTPUTS, x, last_x, w, last_w, line // VECTOR, early)


@njit(**NATIVE)
def few_rows(rows, line):
    """`few` of `dot_few` for `rows` rows: the next power of two; 0 where `dot_tile` is faster."""
    few = 1
    while few < rows:
        few *= 2
    return few if few <= FEW and (few <= 2 or few * line <= FIRST_CACHE) else 0


@njit(**NATIVE)
def dot_few(kind, few, to, x, last_x, w, last_w, line):
    """Multiply `few` rows of x by LANES // few rows of w. Missing rows repeat the last one."""
    steps, stride = line // VECTOR, 4 * OUTPUTS
    if kind == BFLOAT16:
        if few == 1:
            cpu_vectors.dot_1_bfloat16(to, stride, x, last_x, w, last_w, steps, 0)
        elif few == 2:
            cpu_vectors.dot_2_bfloat16(to, stride, x, last_x, w, last_w, steps, 0)
        elif few == 4:
            cpu_vectors.dot_4_bfloat16(to, stride, x, last_x, w, last_w, steps, 0)
        else:
            cpu_vectors.dot_8_bfloat16(to, stride, x, last_x, w, last_w, steps, 0)
    elif few == 1:
        cpu_vectors.dot_1_float32(to, stride, x, last_x, w, last_w, steps, 0)
    elif few == 2:
        cpu_vectors.dot_2_float32(to, stride, x, last_x, w, last_w, steps, 0)
    elif few == 4:
        cpu_vectors.dot_4_float32(to, stride, x, last_x, w, last_w, steps, 0)
    else:
        cpu_vectors.dot_8_float32(to, stride, x, last_x, w, last_w, steps, 0)


@njit(**NATIVE)
def multiply_rows(kind, out_kind, x, rows, line, weight, count, out, outputs, scratch):
    """Multiply rows of x by at most OUTPUTS rows of weights.

    line: bytes of a row of x, and of weights. count: rows of weights. out: address of the first row's first result.
    outputs: row stride of the results, in numbers. scratch: memory for MOST_ROWS * OUTPUTS float32 numbers.
    """
    size = 2 if out_kind == BFLOAT16 else 4
    last_x, last_w = x + (rows - 1) * line, weight + (count - 1) * line
    few = few_rows(rows, line)
    together = MOST_ROWS if few > 0 else max(TILE, min(MOST_ROWS, FIRST_CACHE // line // TILE * TILE))
    for start in range(0, rows, together):
        end = min(start + together, rows)
        if few > 0:
            for output in range(0, count, LANES // few):
                dot_few(kind, few, scratch + 4 * output, x, last_x, weight + output * line, last_w, line)
        else:
            for output in range(0, count, TILE_OUTPUTS):
                for row in range(start, end, TILE):
                    to = scratch + 4 * ((row - start) * OUTPUTS + output)
                    # prefetch the next outputs' weights: each of the first tiles of rows requests one row of weights
                    next_output = output + TILE_OUTPUTS + min(row // TILE, TILE_OUTPUTS - 1)
                    early = weight + next_output * line if start == 0 else x
                    dot_tile(kind, to, x + row * line, last_x, weight + output * line, last_w, line, early)
        for row in range(start, end):
            source, target = scratch + 4 * (row - start) * OUTPUTS, out + row * outputs * size
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
def prepare(frame, job):
    """Write the job's words. Returns the number of units, and whether threads share them."""
    options = argument(frame, 0)
    kind, out_kind = load_int32(options + 4 * OPTION_KIND), load_int32(options + 4 * OPTION_OUT_KIND)
    all_rows, inputs, outputs = dimension(frame, 2, 0), dimension(frame, 2, 1), dimension(frame, 3, 0)
    rows = max(0, min(all_rows, load_int32(argument(frame, 1))))
    store_int64(job + X, argument(frame, 2))
    store_int64(job + WEIGHT, argument(frame, 3))
    store_int64(job + OUT, result(frame, 0))
    store_int64(job + ROWS, rows)
    store_int64(job + NUM_OUTPUTS, outputs)
    line = inputs * (2 if kind == BFLOAT16 else 4)
    store_int64(job + INPUT_BYTES, line)
    store_int64(job + KIND, kind)
    store_int64(job + OUT_KIND, out_kind)
    units = (outputs + OUTPUTS - 1) // OUTPUTS if rows > 0 else 0
    out_line = outputs * (2 if out_kind == BFLOAT16 else 4)
    fill_zeros(result(frame, 0) + rows * out_line, (all_rows - rows) * out_line)
    return units, outputs * line >= MIN_SHARED_BYTES


task, handler = make_kernel(prepare, make_work(multiply), JOB_BYTES, scratch_bytes)
