"""Operations on rows for CPUs in numba. Imported only to compile. A unit of work is a few rows."""

import numpy as np
from numba import njit

from pallas_kernels.native import row_functions, vectors
from pallas_kernels.native.convert import size_of
from pallas_kernels.native.frame import NATIVE, argument, dimension, make_kernel, make_work, result, words
from pallas_kernels.native.kinds import BFLOAT16
from pallas_kernels.native.memory import (
    copy_bytes,
    fill_zeros,
    load_float32,
    load_int32,
    load_int64,
    store_int64,
)
from pallas_kernels.row_ops.cpu import (
    ARGMAX,
    GATHER,
    OPTION_EPS,
    OPTION_KIND,
    OPTION_OPERATION,
    OPTION_WIDTH,
    RMS_NORM,
)

LANES = vectors.LANES
UNIT = 8  # rows
MIN_SHARED_NUMBERS = 65_536  # of the input; below, one thread is faster

# WEIGHT: address of the norm's weights, or of GATHER's indices. LINE: bytes of a row of the result.
OPTIONS, X, WEIGHT, OUT, ROWS, INPUTS, LINE, LAST_ROW, JOB_BYTES = words(8)


@njit(**NATIVE)
def compute_row(job, row):
    """Compute one row."""
    options, inputs = load_int64(job + OPTIONS), load_int64(job + INPUTS)
    operation = load_int32(options + 4 * OPTION_OPERATION)
    is_bfloat16 = load_int32(options + 4 * OPTION_KIND) == BFLOAT16
    size = size_of(load_int32(options + 4 * OPTION_KIND))
    source, weight = load_int64(job + X), load_int64(job + WEIGHT)
    out = load_int64(job + OUT) + row * load_int64(job + LINE)
    if operation == GATHER:
        index = max(0, min(np.int64(load_int32(weight + 4 * row)), load_int64(job + LAST_ROW)))
        copy_bytes(out, source + index * inputs * size, inputs * size)
        return
    x = source + row * inputs * size
    if operation == ARGMAX:
        row_functions.argmax_float32(out, x, np.int64(load_int32(options + 4 * OPTION_WIDTH)))
    elif operation == RMS_NORM:
        share, eps = np.float32(1) / np.float32(inputs), load_float32(options + 4 * OPTION_EPS)
        if is_bfloat16:
            row_functions.rms_norm_bfloat16(out, x, weight, inputs // LANES, share, eps)
        else:
            row_functions.rms_norm_float32(out, x, weight, inputs // LANES, share, eps)
    else:
        half = inputs // 2
        if is_bfloat16:
            row_functions.silu_and_mul_bfloat16(out, x, x + half * size, half // LANES)
        else:
            row_functions.silu_and_mul_float32(out, x, x + half * size, half // LANES)


@njit(**NATIVE)
def compute(job, unit, scratch):
    """Compute one unit: up to UNIT rows."""
    for row in range(unit * UNIT, min((unit + 1) * UNIT, load_int64(job + ROWS))):
        compute_row(job, row)


@njit(**NATIVE)
def prepare(frame, job):
    """Write the job's words. Returns the number of units, and whether threads share them."""
    options = argument(frame, 0)
    operation, size = load_int32(options + 4 * OPTION_OPERATION), size_of(load_int32(options + 4 * OPTION_KIND))
    all_rows, inputs = dimension(frame, 2, 0), dimension(frame, 2, 1)
    line = inputs * size  # bytes of a row of the result
    store_int64(job + LAST_ROW, all_rows - 1)
    if operation == GATHER:
        all_rows = dimension(frame, 3, 0)
    elif operation == ARGMAX:
        line = 4
    elif operation != RMS_NORM:
        line //= 2
    rows = max(0, min(all_rows, load_int32(argument(frame, 1))))
    store_int64(job + OPTIONS, options)
    store_int64(job + X, argument(frame, 2))
    store_int64(job + WEIGHT, 0 if operation == ARGMAX else argument(frame, 3))
    store_int64(job + OUT, result(frame, 0))
    store_int64(job + ROWS, rows)
    store_int64(job + INPUTS, inputs)
    store_int64(job + LINE, line)
    fill_zeros(result(frame, 0) + rows * line, (all_rows - rows) * line)
    return (rows + UNIT - 1) // UNIT, rows * inputs >= MIN_SHARED_NUMBERS


task, handler = make_kernel(prepare, make_work(compute), JOB_BYTES)
