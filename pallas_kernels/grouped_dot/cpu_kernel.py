"""grouped_dot for CPUs in numba. Imported only to compile.

Neighbouring blocks of the same matrix are one run of rows, if no row between them is padding. A unit of work is a run
and a block of outputs, and is computed as in `dot`. So a row has the same bits in any block, and as in `dot`.
"""

import numpy as np
from numba import njit

from pallas_kernels.dot.cpu_kernel import MIN_SHARED_BYTES, MOST_ROWS, OUTPUTS, multiply_rows
from pallas_kernels.native.convert import size_of
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
from pallas_kernels.native.memory import fetch_add, fill_zeros, load_int32, load_int64, malloc, store_int64

X, WEIGHTS, OUT, NUM_OUTPUTS, INPUT_BYTES, KIND, LAST_FIELD = (ARGUMENTS + 8 * i for i in range(7))
JOB_BYTES = LAST_FIELD  # followed by the runs
FIRST, COUNT, MATRIX, RUN_BYTES = 0, 8, 16, 24  # of a run: its first row among those of all blocks, number of rows


@njit(**NATIVE)
def scratch_bytes(job):
    """Bytes of a thread's scratch: the sums of a block of outputs."""
    return 4 * MOST_ROWS * OUTPUTS


@njit(**NATIVE)
def multiply(job, unit, scratch):
    """Compute one unit: a block of outputs, for the rows of a run."""
    line, outputs, kind = load_int64(job + INPUT_BYTES), load_int64(job + NUM_OUTPUTS), load_int64(job + KIND)
    parts = (outputs + OUTPUTS - 1) // OUTPUTS
    place, output = job + JOB_BYTES + unit // parts * RUN_BYTES, unit % parts * OUTPUTS
    first = load_int64(place + FIRST)
    multiply_rows(
        kind, kind, load_int64(job + X) + first * line, load_int64(place + COUNT), line,
        load_int64(job + WEIGHTS) + (load_int64(place + MATRIX) * outputs + output) * line,
        min(OUTPUTS, outputs - output), load_int64(job + OUT) + (first * outputs + output) * size_of(kind), outputs,
        scratch,
    )  # fmt: skip


@njit(**NATIVE)
def work(job, scratch):
    """Claim units and compute them until none is left."""
    units = load_int64(job + UNITS)
    unit = fetch_add(job + NEXT, 1)
    while unit < units:
        multiply(job, unit, scratch)
        fetch_add(job + DONE, 1)
        unit = fetch_add(job + NEXT, 1)


task = make_task(work, scratch_bytes)
run = make_run(work, scratch_bytes)


@njit(**NATIVE)
def list_runs(to, used, rows, matrix_of_block, rows_of_block, matrices):
    """Write the runs of the first `used` blocks of `rows` rows to an address. Returns their number."""
    runs, end, last = 0, -1, -1
    for block in range(used):
        # numbers out of range are clipped, as by XLA: they would crash the process
        matrix = min(max(np.int64(load_int32(matrix_of_block + 4 * block)), 0), matrices - 1)
        count = min(max(np.int64(load_int32(rows_of_block + 4 * block)), 0), rows)
        first = block * rows
        if count == 0:
            continue
        if first == end and matrix == last:
            place = to + (runs - 1) * RUN_BYTES + COUNT
            store_int64(place, load_int64(place) + count)
        else:
            place = to + runs * RUN_BYTES
            store_int64(place + FIRST, first)
            store_int64(place + COUNT, count)
            store_int64(place + MATRIX, matrix)
            runs += 1
        end, last = first + count, matrix
    return runs


@njit(**NATIVE)
def clear_other_rows(places, runs, all_rows, out, row_bytes):
    """Set the results of all rows that are in no run to zero. places: address of the runs. out: of the results."""
    end = 0
    for index in range(runs + 1):
        place = places + index * RUN_BYTES
        start = load_int64(place + FIRST) if index < runs else all_rows
        fill_zeros(out + end * row_bytes, (start - end) * row_bytes)
        end = start + (load_int64(place + COUNT) if index < runs else 0)


@njit(**NATIVE)
def handler(frame, task):
    """The function that XLA calls. task: address of the C function `task`, for helper threads."""
    if asks_for_metadata(frame):
        return 0
    blocks, rows, inputs = dimension(frame, 4, 0), dimension(frame, 4, 1), dimension(frame, 4, 2)
    matrices, outputs = dimension(frame, 5, 0), dimension(frame, 5, 1)
    kind = load_int32(argument(frame, 0))
    used = max(0, min(blocks, np.int64(load_int32(argument(frame, 1)))))
    job = malloc(JOB_BYTES + RUN_BYTES * used)
    if job == 0:
        return out_of_memory(frame)
    line = inputs * size_of(kind)
    store_int64(job + X, argument(frame, 4))
    store_int64(job + WEIGHTS, argument(frame, 5))
    store_int64(job + OUT, result(frame, 0))
    store_int64(job + NUM_OUTPUTS, outputs)
    store_int64(job + INPUT_BYTES, line)
    store_int64(job + KIND, kind)
    runs = list_runs(job + JOB_BYTES, used, rows, argument(frame, 2), argument(frame, 3), matrices)
    clear_other_rows(job + JOB_BYTES, runs, blocks * rows, result(frame, 0), outputs * size_of(kind))
    units = runs * ((outputs + OUTPUTS - 1) // OUTPUTS)
    return run(frame, task, job, units, MOST_THREADS if runs * outputs * line >= MIN_SHARED_BYTES else 1)
