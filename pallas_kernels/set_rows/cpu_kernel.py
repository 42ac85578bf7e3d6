"""set_rows for CPUs in numba. Imported only to compile. A unit of work is a few rows."""

import numpy as np
from numba import njit

from pallas_kernels.native.frame import (
    ARGUMENTS,
    DONE,
    MOST_THREADS,
    NATIVE,
    NEXT,
    UNITS,
    argument,
    asks_for_metadata,
    dimension,
    make_run,
    make_task,
    out_of_memory,
    result,
)
from pallas_kernels.native.memory import copy_bytes, fetch_add, load_int32, load_int64, malloc, store_int64
from pallas_kernels.set_rows.cpu import OPTION_ROW_BYTES, OPTION_ROWS

UNIT = 16  # rows
MIN_SHARED_BYTES = 1 << 20  # below, one thread is faster

INDEX, ROWS, TABLE, COUNT, TABLE_ROWS, ROW_BYTES, LAST_FIELD = (ARGUMENTS + 8 * i for i in range(7))


@njit(**NATIVE)
def scratch_bytes(job):
    """Bytes of a thread's scratch: it is not used."""
    return 64


@njit(**NATIVE)
def work(job, scratch):
    """Claim units and copy them until none is left."""
    units, count, size = load_int64(job + UNITS), load_int64(job + COUNT), load_int64(job + ROW_BYTES)
    unit = fetch_add(job + NEXT, 1)
    while unit < units:
        for row in range(unit * UNIT, min((unit + 1) * UNIT, count)):
            to = np.int64(load_int32(load_int64(job + INDEX) + 4 * row))
            if 0 <= to < load_int64(job + TABLE_ROWS):
                copy_bytes(load_int64(job + TABLE) + to * size, load_int64(job + ROWS) + row * size, size)
        fetch_add(job + DONE, 1)
        unit = fetch_add(job + NEXT, 1)


task = make_task(work, scratch_bytes)
run = make_run(work, scratch_bytes)


@njit(**NATIVE)
def handler(frame, task):
    """The function that XLA calls. task: address of the C function `task`, for helper threads."""
    if asks_for_metadata(frame):
        return 0
    job = malloc(LAST_FIELD)
    if job == 0:
        return out_of_memory(frame)
    count, size = dimension(frame, 2, 0), np.int64(load_int32(argument(frame, 0) + 4 * OPTION_ROW_BYTES))
    store_int64(job + INDEX, argument(frame, 1))
    store_int64(job + ROWS, argument(frame, 2))
    store_int64(job + TABLE, result(frame, 0))
    store_int64(job + COUNT, count)
    store_int64(job + TABLE_ROWS, np.int64(load_int32(argument(frame, 0) + 4 * OPTION_ROWS)))
    store_int64(job + ROW_BYTES, size)
    units = (count + UNIT - 1) // UNIT
    return run(frame, task, job, units, MOST_THREADS if count * size >= MIN_SHARED_BYTES else 1)
