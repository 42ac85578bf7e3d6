"""quantized_dot for CPUs in numba. Imported only to compile.

The first units of work round rows of x to 8 bits. Every later unit is a block of 64 outputs, for all rows.
"""

import numpy as np
from numba import njit

from pallas_kernels.native import integers, vectors
from pallas_kernels.native.convert import narrow, round_up, size_of, widen
from pallas_kernels.native.frame import NATIVE, argument, dimension, make_kernel, make_work_in_two_passes, result, words
from pallas_kernels.native.memory import (
    fill_zeros,
    load_float32,
    load_int32,
    load_int64,
    store_int64,
)
from pallas_kernels.quantized_dot.cpu import OPTION_BITS, OPTION_KIND, OPTION_OUT_KIND, OPTION_OUTPUTS

LANES, BLOCK, ROWS, WIDE = vectors.LANES, integers.BLOCK, integers.ROWS, integers.WIDE
OUTPUTS = BLOCK * WIDE  # of a tile
TILES = 64 // OUTPUTS  # tiles of outputs in a unit
MIN_SHARED_BYTES = 131_072  # of weights; below, one thread is faster
ALIGNMENT = 64

(
    X, CODES, SCALES, ZEROS, MINS, OUT, ROW_COUNT, INPUTS, NUM_OUTPUTS, GROUPS, KIND, OUT_KIND, BITS,
    QUANTISED, ROW_SCALES, ROW_SUMS, JOB_BYTES,
) = words(16)  # fmt: skip


@njit(**NATIVE)
def scratch_bytes(job):
    """Bytes of a thread's scratch: a row of x in float32, or the results of a tile."""
    return 4 * max(round_up(load_int64(job + INPUTS), LANES), ROWS * OUTPUTS)


@njit(**NATIVE)
def quantise_rows(kind, x, first, end, inputs, groups, to, scales, sums, scratch):
    """Store rows of x as int8, with their scales and the sums of their groups. All addresses are of row 0."""
    for row in range(first, end):
        widen(kind, scratch, x + row * inputs * size_of(kind), inputs, vectors.ONE)
        codes = to + row * inputs
        integers.quantise_row(codes, scales + 4 * row, scratch, inputs // LANES)
        for group in range(groups):
            at = codes + group * (inputs // groups)
            integers.sum_bytes(sums + 4 * (row * groups + group), at, inputs // groups // integers.INPUTS)


@njit(**NATIVE)
def quantise(job, unit, scratch):
    """Compute one unit: up to ROWS rows of x as int8."""
    quantise_rows(
        load_int64(job + KIND), load_int64(job + X), unit * ROWS, min(unit * ROWS + ROWS, load_int64(job + ROW_COUNT)),
        load_int64(job + INPUTS), load_int64(job + GROUPS), load_int64(job + QUANTISED), load_int64(job + ROW_SCALES),
        load_int64(job + ROW_SUMS), scratch,
    )  # fmt: skip


@njit(**NATIVE)
def multiply_row(bits, to, x, inputs, sums, codes, scales, zeros, mins, groups, vectors_in_group):
    """Multiply one row of x by the weights of one block of outputs. Stores the results at `to`."""
    if bits == 8:
        integers.multiply_row_int8(to, x, inputs, x, sums, codes, 0, scales, zeros, mins, groups, vectors_in_group)
    else:
        integers.multiply_row_int4(to, x, inputs, x, sums, codes, 0, scales, zeros, mins, groups, vectors_in_group)


@njit(**NATIVE)
def multiply_tile(
    bits, inputs, groups, x, sums, row_scales, rows, codes, scales, zeros, mins, count, out_kind, out, outputs, scratch
):
    """Compute `count` outputs, at most a tile, for all rows.

    x, sums, row_scales: of the first row. codes, scales, zeros, mins: of the first block; zeros and mins may be 0.
    out: address of the first result. outputs: row stride of the results, in numbers.
    """
    block_bytes, vectors_in_group = BLOCK * inputs * bits // 8, inputs // groups // integers.INPUTS
    step = block_bytes if count > BLOCK else 0  # the last tile may be one block only
    last = x + (rows - 1) * inputs
    for row in range(0, rows, ROWS):
        x_row, sums_row = x + row * inputs, sums + 4 * row * groups
        if rows - row == 1:
            for block in range((count + BLOCK - 1) // BLOCK):
                multiply_row(
                    bits, scratch + 4 * BLOCK * block, x_row, inputs, sums_row, codes + block * block_bytes,
                    scales + 4 * BLOCK * groups * block, zeros + BLOCK * groups * block if zeros != 0 else 0,
                    mins + 4 * BLOCK * groups * block if mins != 0 else 0, groups, vectors_in_group,
                )  # fmt: skip
        elif bits == 8:
            integers.multiply_int8(
                scratch, x_row, inputs, last, sums_row, codes, step, scales, zeros, mins, groups, vectors_in_group
            )
        else:
            integers.multiply_int4(
                scratch, x_row, inputs, last, sums_row, codes, step, scales, zeros, mins, groups, vectors_in_group
            )
        for i in range(min(ROWS, rows - row)):
            target = out + (row + i) * outputs * size_of(out_kind)
            narrow(out_kind, target, scratch + 4 * i * OUTPUTS, count, load_float32(row_scales + 4 * (row + i)))


@njit(**NATIVE)
def multiply_one(job, tile, scratch):
    """Compute one tile of outputs, for all rows."""
    inputs, outputs, groups = load_int64(job + INPUTS), load_int64(job + NUM_OUTPUTS), load_int64(job + GROUPS)
    bits, out_kind = load_int64(job + BITS), load_int64(job + OUT_KIND)
    first, block, zeros, mins = tile * OUTPUTS, tile * WIDE, load_int64(job + ZEROS), load_int64(job + MINS)
    multiply_tile(
        bits, inputs, groups, load_int64(job + QUANTISED), load_int64(job + ROW_SUMS), load_int64(job + ROW_SCALES),
        load_int64(job + ROW_COUNT), load_int64(job + CODES) + block * BLOCK * inputs * bits // 8,
        load_int64(job + SCALES) + block * groups * BLOCK * 4,
        zeros + block * groups * BLOCK if zeros != 0 else 0, mins + block * groups * BLOCK * 4 if mins != 0 else 0,
        min(OUTPUTS, outputs - first), out_kind, load_int64(job + OUT) + first * size_of(out_kind), outputs, scratch,
    )  # fmt: skip


@njit(**NATIVE)
def row_units(job):
    """Number of units that round rows of x."""
    return (load_int64(job + ROW_COUNT) + ROWS - 1) // ROWS


@njit(**NATIVE)
def multiply(job, unit, scratch):
    """Compute one unit: up to TILES tiles of outputs, for all rows."""
    tiles = (load_int64(job + NUM_OUTPUTS) + OUTPUTS - 1) // OUTPUTS
    for tile in range(unit * TILES, min((unit + 1) * TILES, tiles)):
        multiply_one(job, tile, scratch)


@njit(inline="always", **NATIVE)
def used_rows(frame):
    """Number of rows that the call uses."""
    return max(0, min(dimension(frame, 2, 0), np.int64(load_int32(argument(frame, 1)))))


@njit(inline="always", **NATIVE)
def parts_of(rows, groups):
    """Offsets in a job of the scales, sums and codes of `rows` rows of x."""
    scales = round_up(JOB_BYTES, ALIGNMENT)
    sums = scales + round_up(4 * rows, ALIGNMENT)
    return scales, sums, sums + round_up(4 * rows * groups, ALIGNMENT)


@njit(**NATIVE)
def job_bytes(frame):
    """Bytes of a job with the rounded rows of x."""
    rows = used_rows(frame)
    return parts_of(rows, dimension(frame, 4, 1))[2] + rows * dimension(frame, 2, 1)


@njit(**NATIVE)
def prepare(frame, job):
    """Write the job's words. Returns the number of units, and whether threads share them."""
    options = argument(frame, 0)
    all_rows, rows, inputs = dimension(frame, 2, 0), used_rows(frame), dimension(frame, 2, 1)
    outputs, groups = load_int32(options + 4 * OPTION_OUTPUTS), dimension(frame, 4, 1)
    scales, sums, codes = parts_of(rows, groups)
    out_kind = load_int32(options + 4 * OPTION_OUT_KIND)
    store_int64(job + X, argument(frame, 2))
    store_int64(job + CODES, argument(frame, 3))
    store_int64(job + SCALES, argument(frame, 4))
    store_int64(job + ZEROS, argument(frame, 5) if dimension(frame, 5, 0) != 0 else 0)
    store_int64(job + MINS, argument(frame, 6) if dimension(frame, 6, 0) != 0 else 0)
    store_int64(job + OUT, result(frame, 0))
    store_int64(job + ROW_COUNT, rows)
    store_int64(job + INPUTS, inputs)
    store_int64(job + NUM_OUTPUTS, outputs)
    store_int64(job + GROUPS, groups)
    store_int64(job + KIND, load_int32(options + 4 * OPTION_KIND))
    store_int64(job + OUT_KIND, out_kind)
    store_int64(job + BITS, load_int32(options + 4 * OPTION_BITS))
    store_int64(job + ROW_SCALES, job + scales)
    store_int64(job + ROW_SUMS, job + sums)
    store_int64(job + QUANTISED, job + codes)
    blocks = OUTPUTS * TILES
    units = (outputs + blocks - 1) // blocks + (rows + ROWS - 1) // ROWS if rows > 0 else 0
    fill_zeros(result(frame, 0) + rows * outputs * size_of(out_kind), (all_rows - rows) * outputs * size_of(out_kind))
    return units, inputs * outputs >= MIN_SHARED_BYTES


work = make_work_in_two_passes(row_units, quantise, multiply)
task, handler = make_kernel(prepare, work, job_bytes, scratch_bytes)
