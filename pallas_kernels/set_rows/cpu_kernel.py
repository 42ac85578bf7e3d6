"""set_rows for CPUs in numba. Imported only to compile. A unit of work is a few rows."""

import numpy as np
from numba import njit

from pallas_kernels.native.frame import NATIVE, argument, dimension, make_kernel, make_work, result, words
from pallas_kernels.native.memory import copy_bytes, load_int32, load_int64, store_int64
from pallas_kernels.set_rows.cpu import OPTION_ROW_BYTES, OPTION_ROWS

UNIT = 16  # rows
MIN_SHARED_BYTES = 1 << 20  # below, one thread is faster

INDEX, ROWS, TABLE, COUNT, TABLE_ROWS, ROW_BYTES, JOB_BYTES = words(6)


@njit(**NATIVE)
def copy_rows(job, unit, scratch):
    """Compute one unit: copy up to UNIT rows."""
    count, size = load_int64(job + COUNT), load_int64(job + ROW_BYTES)
    for row in range(unit * UNIT, min((unit + 1) * UNIT, count)):
        to = np.int64(load_int32(load_int64(job + INDEX) + 4 * row))
        if 0 <= to < load_int64(job + TABLE_ROWS):
            copy_bytes(load_int64(job + TABLE) + to * size, load_int64(job + ROWS) + row * size, size)


@njit(**NATIVE)
def prepare(frame, job):
    """Write the job's words. Returns the number of units, and whether threads share them."""
    count, size = dimension(frame, 2, 0), np.int64(load_int32(argument(frame, 0) + 4 * OPTION_ROW_BYTES))
    store_int64(job + INDEX, argument(frame, 1))
    store_int64(job + ROWS, argument(frame, 2))
    store_int64(job + TABLE, result(frame, 0))
    store_int64(job + COUNT, count)
    store_int64(job + TABLE_ROWS, np.int64(load_int32(argument(frame, 0) + 4 * OPTION_ROWS)))
    store_int64(job + ROW_BYTES, size)
    return (count + UNIT - 1) // UNIT, count * size >= MIN_SHARED_BYTES


task, handler = make_kernel(prepare, make_work(copy_rows), JOB_BYTES)
