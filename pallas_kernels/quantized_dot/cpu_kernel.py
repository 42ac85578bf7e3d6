"""quantized_dot for CPUs in numba. Imported only to compile.

The first units of work round rows of x to 8 bits. Each of the others is a block of outputs, for all rows.
"""

from numba import njit

from pallas_kernels.native import integers, vectors
from pallas_kernels.native.convert import narrow, round_up, size_of, widen
from pallas_kernels.native.frame import (
    ARGUMENTS,
    DONE,
    MOST_THREADS,
    NATIVE,
    NEXT,
    SPINS,
    UNITS,
    argument,
    asks_for_metadata,
    dimension,
    make_run,
    make_task,
    out_of_memory,
    result,
)
from pallas_kernels.native.memory import (
    fetch_add,
    fill_zeros,
    load_float32,
    load_int32,
    load_int64,
    malloc,
    pause,
    store_int64,
    yield_processor,
)
from pallas_kernels.quantized_dot.cpu import OPTION_BITS, OPTION_KIND, OPTION_OUT_KIND, OPTION_OUTPUTS

LANES, BLOCK, ROWS, WIDE = vectors.LANES, integers.BLOCK, integers.ROWS, integers.WIDE
OUTPUTS = BLOCK * WIDE  # of a tile
TILES = 64 // OUTPUTS  # of outputs, in a unit
MIN_SHARED_BYTES = 131_072  # of weights; below, one thread is faster
ALIGNMENT = 64

(
    X, CODES, SCALES, ZEROS, MINS, OUT, ROW_COUNT, INPUTS, NUM_OUTPUTS, GROUPS, KIND, OUT_KIND, BITS,
    QUANTISED, ROW_SCALES, ROW_SUMS, LAST_FIELD,
) = (ARGUMENTS + 8 * i for i in range(17))  # fmt: skip


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
    """Compute one unit: up to 8 rows of x."""
    quantise_rows(
        load_int64(job + KIND), load_int64(job + X), unit * ROWS, min(unit * ROWS + ROWS, load_int64(job + ROW_COUNT)),
        load_int64(job + INPUTS), load_int64(job + GROUPS), load_int64(job + QUANTISED), load_int64(job + ROW_SCALES),
        load_int64(job + ROW_SUMS), scratch,
    )  # fmt: skip


@njit(**NATIVE)
def multiply_row(bits, to, x, inputs, sums, codes, scales, zeros, mins, groups, vectors_in_group):
    """One row of x times one block of outputs."""
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
    out: address of the first result. outputs: results from row to row.
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
def multiply(job, tile, scratch):
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
def work(job, scratch):
    """Claim units and compute them until none is left."""
    units, first = load_int64(job + UNITS), (load_int64(job + ROW_COUNT) + ROWS - 1) // ROWS
    tiles = (load_int64(job + NUM_OUTPUTS) + OUTPUTS - 1) // OUTPUTS
    unit = fetch_add(job + NEXT, 1)
    while unit < min(first, units):
        quantise(job, unit, scratch)
        fetch_add(job + DONE, 1)
        unit = fetch_add(job + NEXT, 1)
    spins = 0
    while unit < units and fetch_add(job + DONE, 0) < first:  # each of those units has been begun by a thread
        spins += 1
        pause()
        if spins % SPINS == 0:
            yield_processor(0)
    while unit < units:
        start = (unit - first) * TILES
        for tile in range(start, min(start + TILES, tiles)):
            multiply(job, tile, scratch)
        fetch_add(job + DONE, 1)
        unit = fetch_add(job + NEXT, 1)


task = make_task(work, scratch_bytes)
run = make_run(work, scratch_bytes)


@njit(**NATIVE)
def handler(frame, task):
    """The function that XLA calls. task: address of the C function `task`, for helper threads."""
    if asks_for_metadata(frame):
        return 0
    options = argument(frame, 0)
    all_rows, inputs = dimension(frame, 2, 0), dimension(frame, 2, 1)
    outputs = load_int32(options + 4 * OPTION_OUTPUTS)
    rows = max(0, min(all_rows, load_int32(argument(frame, 1))))
    groups = dimension(frame, 4, 1)
    start, scales_size = round_up(LAST_FIELD, ALIGNMENT), round_up(4 * rows, ALIGNMENT)
    sums_size = round_up(4 * rows * groups, ALIGNMENT)
    job = malloc(start + scales_size + sums_size + rows * inputs)
    if job == 0:
        return out_of_memory(frame)
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
    store_int64(job + ROW_SCALES, job + start)
    store_int64(job + ROW_SUMS, job + start + scales_size)
    store_int64(job + QUANTISED, job + start + scales_size + sums_size)
    blocks = OUTPUTS * TILES
    units = (outputs + blocks - 1) // blocks + (rows + ROWS - 1) // ROWS if rows > 0 else 0
    fill_zeros(result(frame, 0) + rows * outputs * size_of(out_kind), (all_rows - rows) * outputs * size_of(out_kind))
    return run(frame, task, job, units, MOST_THREADS if inputs * outputs >= MIN_SHARED_BYTES else 1)
