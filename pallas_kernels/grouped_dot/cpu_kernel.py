"""grouped_dot for CPUs in numba. Imported only to compile.

A run is neighbouring blocks of one matrix, with no padding between their rows. A unit of work is a run times a block
of outputs, computed as in `dot`. So a row has the bits that `dot` gives it, in any block.
"""

import numpy as np
from numba import njit

from pallas_kernels.dot.cpu_kernel import MIN_SHARED_BYTES, OUTPUTS, multiply_rows, scratch_for
from pallas_kernels.native.convert import size_of
from pallas_kernels.native.frame import NATIVE, argument, dimension, make_kernel, make_work, result, words
from pallas_kernels.native.memory import fill_zeros, load_int32, load_int64, store_int64

X, WEIGHTS, OUT, NUM_OUTPUTS, INPUT_BYTES, KIND, JOB_BYTES = words(6)  # the runs follow
FIRST, COUNT, MATRIX, RUN_BYTES = 0, 8, 16, 24  # of a run: its first row among those of all blocks, number of rows


@njit(**NATIVE)
def scratch_bytes(job):
    """Bytes of a thread's scratch."""
    return scratch_for(load_int64(job + KIND), load_int64(job + INPUT_BYTES))


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
def list_runs(to, used, rows, matrix_of_block, rows_of_block, matrices):
    """Store the runs of the first `used` blocks, of `rows` rows each, at `to`. Returns the number of runs."""
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
    """Zero the results of all rows that are in no run. places: address of the runs. out: address of the results."""
    end = 0
    for index in range(runs + 1):
        place = places + index * RUN_BYTES
        start = load_int64(place + FIRST) if index < runs else all_rows
        fill_zeros(out + end * row_bytes, (start - end) * row_bytes)
        end = start + (load_int64(place + COUNT) if index < runs else 0)


@njit(inline="always", **NATIVE)
def used_blocks(frame):
    """Number of blocks that the call uses."""
    return max(0, min(dimension(frame, 4, 0), np.int64(load_int32(argument(frame, 1)))))


@njit(**NATIVE)
def job_bytes(frame):
    """Bytes of a job with its runs."""
    return JOB_BYTES + RUN_BYTES * used_blocks(frame)


@njit(**NATIVE)
def prepare(frame, job):
    """Write the job's words. Returns the number of units, and whether threads share them."""
    blocks, rows, inputs = dimension(frame, 4, 0), dimension(frame, 4, 1), dimension(frame, 4, 2)
    matrices, outputs = dimension(frame, 5, 0), dimension(frame, 5, 1)
    kind, used = load_int32(argument(frame, 0)), used_blocks(frame)
    line = inputs * size_of(kind)
    store_int64(job + X, argument(frame, 4))
    store_int64(job + WEIGHTS, argument(frame, 5))
    store_int64(job + OUT, result(frame, 0))
    store_int64(job + NUM_OUTPUTS, outputs)
    store_int64(job + INPUT_BYTES, line)
    store_int64(job + KIND, kind)
    runs = list_runs(job + JOB_BYTES, used, rows, argument(frame, 2), argument(frame, 3), matrices)
    clear_other_rows(job + JOB_BYTES, runs, blocks * rows, result(frame, 0), outputs * size_of(kind))
    return runs * ((outputs + OUTPUTS - 1) // OUTPUTS), runs * outputs * line >= MIN_SHARED_BYTES


task, handler = make_kernel(prepare, make_work(multiply), job_bytes, scratch_bytes)
