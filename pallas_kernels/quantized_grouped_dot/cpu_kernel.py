"""quantized_grouped_dot for CPUs in numba. Imported only to compile.

Each of the first units of work rounds the used rows of one block to 8 bits. Every later unit multiplies a run by a
block of outputs. A run is neighbouring blocks of one matrix without padding between them, as in `grouped_dot`.
"""

from numba import njit

from pallas_kernels.grouped_dot.cpu_kernel import (
    COUNT,
    FIRST,
    MATRIX,
    RUN_BYTES,
    clear_other_rows,
    list_runs,
    used_blocks,
)
from pallas_kernels.native.convert import round_up, size_of
from pallas_kernels.native.frame import NATIVE, argument, dimension, make_kernel, make_work_in_two_passes, result, words
from pallas_kernels.native.memory import (
    load_int32,
    load_int64,
    store_int64,
)
from pallas_kernels.quantized_dot.cpu_kernel import (
    ALIGNMENT,
    BLOCK,
    LANES,
    MIN_SHARED_BYTES,
    OUTPUTS,
    ROWS,
    TILES,
    WIDE,
    multiply_tile,
    quantise_rows,
)
from pallas_kernels.quantized_grouped_dot.cpu import OPTION_BITS, OPTION_KIND, OPTION_OUTPUTS

(
    X, CODES, SCALES, ZEROS, MINS, OUT, USED_BLOCKS, BLOCK_ROWS, ROWS_OF_BLOCK, INPUTS, NUM_OUTPUTS, GROUPS, KIND, BITS,
    QUANTISED, ROW_SCALES, ROW_SUMS, JOB_BYTES,
) = words(17)  # fmt: skip
# The runs follow, then the scales, sums and codes of the used blocks' rows.


@njit(**NATIVE)
def scratch_bytes(job):
    """Bytes of a thread's scratch: a row of x in float32, or the results of a tile."""
    return 4 * max(round_up(load_int64(job + INPUTS), LANES), ROWS * OUTPUTS)


@njit(**NATIVE)
def quantise(job, block, scratch):
    """Compute one unit: the used rows of a block of x as int8."""
    rows = load_int64(job + BLOCK_ROWS)
    count = min(max(load_int32(load_int64(job + ROWS_OF_BLOCK) + 4 * block), 0), rows)
    quantise_rows(
        load_int64(job + KIND), load_int64(job + X), block * rows, block * rows + count, load_int64(job + INPUTS),
        load_int64(job + GROUPS), load_int64(job + QUANTISED), load_int64(job + ROW_SCALES),
        load_int64(job + ROW_SUMS), scratch,
    )  # fmt: skip


@njit(**NATIVE)
def multiply_one(job, place, tile, scratch):
    """Compute one tile of outputs for the rows of a run. place: address of the run."""
    inputs, outputs, groups = load_int64(job + INPUTS), load_int64(job + NUM_OUTPUTS), load_int64(job + GROUPS)
    bits, kind, first = load_int64(job + BITS), load_int64(job + KIND), load_int64(place + FIRST)
    zeros, mins = load_int64(job + ZEROS), load_int64(job + MINS)
    block = load_int64(place + MATRIX) * (outputs // BLOCK) + tile * WIDE  # a matrix is whole blocks: `refuse`
    multiply_tile(
        bits, inputs, groups, load_int64(job + QUANTISED) + first * inputs,
        load_int64(job + ROW_SUMS) + 4 * first * groups, load_int64(job + ROW_SCALES) + 4 * first,
        load_int64(place + COUNT), load_int64(job + CODES) + block * BLOCK * inputs * bits // 8,
        load_int64(job + SCALES) + block * groups * BLOCK * 4,
        zeros + block * groups * BLOCK if zeros != 0 else 0, mins + block * groups * BLOCK * 4 if mins != 0 else 0,
        min(OUTPUTS, outputs - tile * OUTPUTS), kind,
        load_int64(job + OUT) + (first * outputs + tile * OUTPUTS) * size_of(kind), outputs, scratch,
    )  # fmt: skip


@njit(**NATIVE)
def block_units(job):
    """Number of units that round blocks of x."""
    return load_int64(job + USED_BLOCKS)


@njit(**NATIVE)
def multiply(job, unit, scratch):
    """Compute one unit: up to TILES tiles of outputs, for the rows of a run."""
    tiles = (load_int64(job + NUM_OUTPUTS) + OUTPUTS - 1) // OUTPUTS
    parts = (tiles + TILES - 1) // TILES
    place, start = job + JOB_BYTES + unit // parts * RUN_BYTES, unit % parts * TILES
    for tile in range(start, min(start + TILES, tiles)):
        multiply_one(job, place, tile, scratch)


@njit(inline="always", **NATIVE)
def parts_of(used, rows, groups):
    """Offsets in a job of the scales, sums and codes of `used` blocks of `rows` rows."""
    scales = round_up(JOB_BYTES + RUN_BYTES * used, ALIGNMENT)
    sums = scales + round_up(4 * used * rows, ALIGNMENT)
    return scales, sums, sums + round_up(4 * used * rows * groups, ALIGNMENT)


@njit(**NATIVE)
def job_bytes(frame):
    """Bytes of a job with its runs and the rounded rows of x."""
    used, rows = used_blocks(frame), dimension(frame, 4, 1)
    return parts_of(used, rows, dimension(frame, 6, 1))[2] + used * rows * dimension(frame, 4, 2)


@njit(**NATIVE)
def prepare(frame, job):
    """Write the job's words. Returns the number of units, and whether threads share them."""
    options = argument(frame, 0)
    blocks, rows, inputs = dimension(frame, 4, 0), dimension(frame, 4, 1), dimension(frame, 4, 2)
    outputs, kind = load_int32(options + 4 * OPTION_OUTPUTS), load_int32(options + 4 * OPTION_KIND)
    bits, groups = load_int32(options + 4 * OPTION_BITS), dimension(frame, 6, 1)
    matrices = dimension(frame, 5, 0) // (outputs // BLOCK)
    used = used_blocks(frame)
    scales, sums, codes = parts_of(used, rows, groups)
    store_int64(job + X, argument(frame, 4))
    store_int64(job + CODES, argument(frame, 5))
    store_int64(job + SCALES, argument(frame, 6))
    store_int64(job + ZEROS, argument(frame, 7) if dimension(frame, 7, 0) != 0 else 0)
    store_int64(job + MINS, argument(frame, 8) if dimension(frame, 8, 0) != 0 else 0)
    store_int64(job + OUT, result(frame, 0))
    store_int64(job + USED_BLOCKS, used)
    store_int64(job + BLOCK_ROWS, rows)
    store_int64(job + ROWS_OF_BLOCK, argument(frame, 3))
    store_int64(job + INPUTS, inputs)
    store_int64(job + NUM_OUTPUTS, outputs)
    store_int64(job + GROUPS, groups)
    store_int64(job + KIND, kind)
    store_int64(job + BITS, bits)
    store_int64(job + ROW_SCALES, job + scales)
    store_int64(job + ROW_SUMS, job + sums)
    store_int64(job + QUANTISED, job + codes)
    runs = list_runs(job + JOB_BYTES, used, rows, argument(frame, 2), argument(frame, 3), matrices)
    clear_other_rows(job + JOB_BYTES, runs, blocks * rows, result(frame, 0), outputs * size_of(kind))
    parts = (outputs + OUTPUTS * TILES - 1) // (OUTPUTS * TILES)
    units = used + runs * parts if runs > 0 else 0
    return units, runs * inputs * outputs >= MIN_SHARED_BYTES


work = make_work_in_two_passes(block_units, quantise, multiply)
task, handler = make_kernel(prepare, work, job_bytes, scratch_bytes)
