"""grouped_lora for CPUs in numba. Imported only to compile.

Rows are sorted by slot. A unit of work is up to UNIT rows of one slot: their h, and then all their outputs. So a unit
waits for no other one. Within a unit, tiles of TILE rows share each read of the adapter.
"""

import numpy as np
from numba import njit

from pallas_kernels.grouped_lora import cpu_vectors
from pallas_kernels.grouped_lora.cpu import (
    OPTION_BASE_KIND,
    OPTION_EXPANDS,
    OPTION_KIND,
    OPTION_POOL_KIND,
)
from pallas_kernels.native import vectors
from pallas_kernels.native.convert import narrow, round_up, size_of, widen
from pallas_kernels.native.frame import NATIVE, argument, dimension, make_kernel, make_work, result, words
from pallas_kernels.native.kinds import BFLOAT16, FLOAT32
from pallas_kernels.native.memory import (
    load_float32,
    load_int32,
    load_int64,
    store_int32,
    store_int64,
    thread_limit,
)

LANES, TILE, VECTOR, ONE = vectors.LANES, vectors.TILE, vectors.VECTOR, vectors.ONE
TOGETHER, RANKS = cpu_vectors.TOGETHER, cpu_vectors.RANKS
UNIT = 16  # most rows of a unit
BLOCK = 2048  # outputs at a time: their float32 sums stay in the L1 cache
MIN_SHARED_BYTES = 131_072  # of the adapters that are read; below, one thread is faster

(
    KIND, BASE_KIND, POOL_KIND, X, INPUTS, A, B, RANKS_OF, SCALES, PARTS, RANK, PATTERN, SEGMENTS, OUT, OUTPUTS,
    EXPANDS, UNITS_AT, JOB_BYTES,
) = words(17)  # fmt: skip
# After the words: a key of each row, slot << 32 | row, sorted. Then a unit's first key and number of rows, as int32.
KEY_BYTES, UNIT_BYTES = 8, 8


@njit(inline="always", **NATIVE)
def h_stride(job):
    """Bytes of a row of h: the ranks of a part, and a vector that is not used."""
    return 4 * (round_up(load_int64(job + RANK), LANES) + LANES)


@njit(inline="always", **NATIVE)
def sums_bytes(job):
    """Bytes of the sums of a part: a vector for each row of x and of A."""
    return TILE * VECTOR * (load_int64(job + RANK) + LANES)


@njit(**NATIVE)
def scratch_bytes(job):
    """Bytes of a thread's scratch: h of all parts, the sums of a part, float32 rows of x, and a block of outputs."""
    x = 0 if load_int64(job + KIND) == FLOAT32 else 4 * load_int64(job + INPUTS)
    return TILE * (load_int64(job + PARTS) * h_stride(job) + x + 4 * BLOCK) + sums_bytes(job)


@njit(inline="always", **NATIVE)
def row_of(job, index):
    """The row of a key."""
    return load_int64(job + JOB_BYTES + KEY_BYTES * index) & 0xFFFFFFFF


@njit(inline="always", **NATIVE)
def rank_of(job, slot, part):
    """True rank of an adapter for a part."""
    rank = np.int64(load_int32(load_int64(job + RANKS_OF) + 4 * (slot * load_int64(job + PARTS) + part)))
    return min(max(rank, 0), load_int64(job + RANK))  # a rank out of range would crash the process


@njit(**NATIVE)
def shrink(job, slot, part, count, x0, x1, x2, x3, sums, h):
    """Compute h of a part for a tile of `count` rows of x."""
    kind, inputs, rank = load_int64(job + POOL_KIND), load_int64(job + INPUTS), rank_of(job, slot, part)
    steps, line, parts = inputs // LANES, inputs * size_of(kind), load_int64(job + PARTS)
    a = load_int64(job + A) + (slot * parts + part) * load_int64(job + RANK) * line
    if count == 1:
        if kind == BFLOAT16:
            cpu_vectors.shrink_row_bfloat16(sums, x0, a, steps, rank)
        else:
            cpu_vectors.shrink_row_float32(sums, x0, a, steps, rank)
    else:
        whole = rank // TOGETHER * TOGETHER
        rest, rest_sums = a + whole * line, sums + whole * TILE * VECTOR
        if kind == BFLOAT16:
            cpu_vectors.shrink_tile_bfloat16(sums, x0, x1, x2, x3, a, steps, whole)
            cpu_vectors.shrink_tile_1_bfloat16(rest_sums, x0, x1, x2, x3, rest, steps, rank - whole)
        else:
            cpu_vectors.shrink_tile_float32(sums, x0, x1, x2, x3, a, steps, whole)
            cpu_vectors.shrink_tile_1_float32(rest_sums, x0, x1, x2, x3, rest, steps, rank - whole)
    scale = load_float32(load_int64(job + SCALES) + 4 * (slot * parts + part))
    stride = VECTOR if count == 1 else TILE * VECTOR
    for row in range(count):
        for first in range(0, rank, LANES):
            source = sums + row * VECTOR + first * stride
            cpu_vectors.add_lanes(h + row * h_stride(job) + 4 * first, source, stride, scale)


@njit(**NATIVE)
def expand_row(kind, ranks, to, h, b, line, outputs):
    """Add `ranks` (at most RANKS) rows of B to one row of outputs."""
    if ranks == RANKS:
        if kind == BFLOAT16:
            cpu_vectors.expand_row_bfloat16(to, h, b, line, outputs // LANES)
        else:
            cpu_vectors.expand_row_float32(to, h, b, line, outputs // LANES)
        return
    for rank in range(ranks):
        if kind == BFLOAT16:
            cpu_vectors.expand_row_1_bfloat16(to, h + 4 * rank, b + rank * line, line, outputs // LANES)
        else:
            cpu_vectors.expand_row_1_float32(to, h + 4 * rank, b + rank * line, line, outputs // LANES)


@njit(**NATIVE)
def expand_tile(kind, ranks, to0, to1, to2, to3, h, stride, b, line, outputs):
    """Add `ranks` rows of B to a tile of rows of outputs."""
    whole = outputs // (LANES * TOGETHER)
    done = whole * LANES * TOGETHER
    rest, chunks, far = b + done * size_of(kind), (outputs - done) // LANES, 4 * done
    if kind == BFLOAT16:
        cpu_vectors.expand_tile_bfloat16(to0, to1, to2, to3, h, stride, b, line, ranks, whole)
        cpu_vectors.expand_tile_1_bfloat16(
            to0 + far, to1 + far, to2 + far, to3 + far, h, stride, rest, line, ranks, chunks
        )
    else:
        cpu_vectors.expand_tile_float32(to0, to1, to2, to3, h, stride, b, line, ranks, whole)
        cpu_vectors.expand_tile_1_float32(
            to0 + far, to1 + far, to2 + far, to3 + far, h, stride, rest, line, ranks, chunks
        )


@njit(**NATIVE)
def expand_block(job, slot, count, start, end, to0, to1, to2, to3, h):
    """Add B h to outputs `start` to `end` of a tile of `count` rows. to0 to to3: addresses of output `start`."""
    kind, outputs, parts = load_int64(job + POOL_KIND), load_int64(job + OUTPUTS), load_int64(job + PARTS)
    pattern, stride, size = load_int64(job + PATTERN), h_stride(job), size_of(kind)
    line = outputs * size
    b = load_int64(job + B) + slot * load_int64(job + RANK) * line
    most = 0
    for part in range(parts):
        most = max(most, rank_of(job, slot, part))
    # One row reads RANKS whole rows of B after the other, in the order of memory. A tile keeps its sums in registers.
    step = RANKS if count == 1 else max(most, 1)
    for first in range(0, most, step):
        segment_start = 0
        for segment in range(load_int64(job + SEGMENTS)):
            part = np.int64(load_int32(pattern + 8 * segment))
            segment_end = segment_start + load_int32(pattern + 8 * segment + 4)
            low, high = max(segment_start, start), min(segment_end, end)
            segment_start = segment_end
            ranks = min(rank_of(job, slot, part) - first, step)
            if low >= high or ranks <= 0:
                continue
            far, own = 4 * (low - start), h + part * TILE * stride + 4 * first
            source = b + first * line + low * size
            if count == 1:
                expand_row(kind, ranks, to0 + far, own, source, line, high - low)
            else:
                expand_tile(
                    kind, ranks, to0 + far, to1 + far, to2 + far, to3 + far, own, stride, source, line, high - low
                )


@njit(**NATIVE)
def compute_tile(job, index, count, scratch):
    """Compute a tile: `count` rows of one slot, from the key `index` on."""
    slot = load_int64(job + JOB_BYTES + KEY_BYTES * index) >> 32
    parts, outputs, inputs = load_int64(job + PARTS), load_int64(job + OUTPUTS), load_int64(job + INPUTS)
    kind, base_kind, out = load_int64(job + KIND), load_int64(job + BASE_KIND), load_int64(job + OUT)
    # missing rows repeat the last one: they compute it again, and store the same bits
    row0, row1 = row_of(job, index), row_of(job, index + min(1, count - 1))
    row2, row3 = row_of(job, index + min(2, count - 1)), row_of(job, index + count - 1)
    h, stride = scratch, h_stride(job)
    sums = h + TILE * parts * stride
    block = sums + sums_bytes(job)
    wide = block + TILE * 4 * BLOCK
    line, wide_line = inputs * size_of(kind), 4 * inputs
    x = load_int64(job + X)
    x0, x1, x2, x3 = x + row0 * line, x + row1 * line, x + row2 * line, x + row3 * line
    if load_int64(job + EXPANDS) != 0:
        scale = load_float32(load_int64(job + SCALES) + 4 * slot)
        for tile_row in range(TILE if count > 1 else 1):
            source = x + row_of(job, index + min(tile_row, count - 1)) * line
            widen(kind, h + tile_row * stride, source, inputs, scale)
    else:
        if kind != FLOAT32:
            for tile_row in range(TILE if count > 1 else 1):
                source = x + row_of(job, index + min(tile_row, count - 1)) * line
                widen(kind, wide + tile_row * wide_line, source, inputs, ONE)
            x0, x1, x2, x3 = wide, wide + wide_line, wide + 2 * wide_line, wide + 3 * wide_line
        for part in range(parts):
            shrink(job, slot, part, 1 if count == 1 else TILE, x0, x1, x2, x3, sums, h + part * TILE * stride)
    if base_kind == FLOAT32:
        for start in range(0, outputs, BLOCK):
            expand_block(
                job, slot, count, start, min(start + BLOCK, outputs), out + 4 * (row0 * outputs + start),
                out + 4 * (row1 * outputs + start), out + 4 * (row2 * outputs + start),
                out + 4 * (row3 * outputs + start), h,
            )  # fmt: skip
        return
    size, far = size_of(base_kind), 4 * BLOCK
    for start in range(0, outputs, BLOCK):
        end = min(start + BLOCK, outputs)
        for tile_row in range(TILE if count > 1 else 1):
            place = out + (row_of(job, index + min(tile_row, count - 1)) * outputs + start) * size
            widen(base_kind, block + tile_row * far, place, end - start, ONE)
        expand_block(job, slot, count, start, end, block, block + far, block + 2 * far, block + 3 * far, h)
        for tile_row in range(count):
            place = out + (row_of(job, index + tile_row) * outputs + start) * size
            narrow(base_kind, place, block + tile_row * far, end - start, ONE)


@njit(**NATIVE)
def compute(job, unit, scratch):
    """Compute one unit: rows of one slot, in tiles."""
    place = load_int64(job + UNITS_AT) + UNIT_BYTES * unit
    first, count = np.int64(load_int32(place)), np.int64(load_int32(place + 4))
    for start in range(0, count, TILE):
        compute_tile(job, first + start, min(TILE, count - start), scratch)


@njit(**NATIVE)
def sort(keys, count):
    """Sort int64 numbers, by Shell's method: the keys are few, or mostly in order."""
    gap = 1
    while gap < count // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for index in range(gap, count):
            key, to = load_int64(keys + 8 * index), index
            while to >= gap and load_int64(keys + 8 * (to - gap)) > key:
                store_int64(keys + 8 * to, load_int64(keys + 8 * (to - gap)))
                to -= gap
            store_int64(keys + 8 * to, key)
        gap //= 3


@njit(**NATIVE)
def list_rows(keys, slot_of_row, rows):
    """Store the keys of the rows that have an adapter, sorted. Returns their number."""
    count, is_sorted, last = 0, True, np.int64(-1)
    for row in range(rows):
        slot = np.int64(load_int32(slot_of_row + 4 * row))
        if slot >= 0:
            store_int64(keys + KEY_BYTES * count, (slot << 32) | row)
            is_sorted &= slot >= last
            last = slot
            count += 1
    if not is_sorted:
        sort(keys, count)
    return count


@njit(**NATIVE)
def list_units(job, count):
    """Store the units of `count` keys. Returns their number, and the bytes of the adapters that they read."""
    keys, to, units, size = job + JOB_BYTES, load_int64(job + UNITS_AT), 0, size_of(load_int64(job + POOL_KIND))
    most = min(UNIT, round_up(max(1, count // thread_limit()), TILE))  # rows of a unit: each thread has one
    width, work, slot, first = load_int64(job + INPUTS) + load_int64(job + OUTPUTS), 0, np.int64(-1), 0
    for index in range(count):
        own = load_int64(keys + KEY_BYTES * index) >> 32
        if own != slot or index - first == most:
            slot, first = own, index
            store_int32(to + UNIT_BYTES * units, np.int32(index))
            units += 1
            for part in range(load_int64(job + PARTS)):
                work += rank_of(job, slot, part) * width * size
        store_int32(to + UNIT_BYTES * (units - 1) + 4, np.int32(index - first + 1))
    return units, work


@njit(inline="always", **NATIVE)
def needed_rows(frame):
    """Number of rows that the call needs."""
    return max(0, min(dimension(frame, 3, 0), np.int64(load_int32(argument(frame, 1)))))


@njit(**NATIVE)
def job_bytes(frame):
    """Bytes of a job with its keys and units."""
    return JOB_BYTES + (KEY_BYTES + UNIT_BYTES) * needed_rows(frame)


@njit(**NATIVE)
def prepare(frame, job):
    """Write the job's words. Returns the number of units, and whether threads share them."""
    options, rows = argument(frame, 0), needed_rows(frame)
    slots, parts, rank = dimension(frame, 7, 1), dimension(frame, 7, 2), dimension(frame, 6, 2)
    inputs, outputs = dimension(frame, 4, 1), dimension(frame, 10, 1)
    # a layer out of range is clipped, as by XLA: it would crash the process
    layer = min(max(np.int64(load_int32(argument(frame, 2))), 0), dimension(frame, 7, 0) - 1)
    size = size_of(load_int32(options + 4 * OPTION_POOL_KIND))
    store_int64(job + KIND, load_int32(options + 4 * OPTION_KIND))
    store_int64(job + BASE_KIND, load_int32(options + 4 * OPTION_BASE_KIND))
    store_int64(job + POOL_KIND, load_int32(options + 4 * OPTION_POOL_KIND))
    store_int64(job + EXPANDS, load_int32(options + 4 * OPTION_EXPANDS))
    store_int64(job + X, argument(frame, 4))
    store_int64(job + INPUTS, inputs)
    store_int64(job + A, argument(frame, 5) + layer * slots * parts * rank * inputs * size)
    store_int64(job + B, argument(frame, 6) + layer * slots * rank * outputs * size)
    store_int64(job + RANKS_OF, argument(frame, 7) + 4 * layer * slots * parts)
    store_int64(job + SCALES, argument(frame, 8) + 4 * layer * slots * parts)
    store_int64(job + PARTS, parts)
    store_int64(job + RANK, rank)
    store_int64(job + PATTERN, argument(frame, 9))
    store_int64(job + SEGMENTS, dimension(frame, 9, 0))
    store_int64(job + OUT, result(frame, 0))
    store_int64(job + OUTPUTS, outputs)
    store_int64(job + UNITS_AT, job + JOB_BYTES + KEY_BYTES * rows)
    units, work = list_units(job, list_rows(job + JOB_BYTES, argument(frame, 3), rows))
    return units, work >= MIN_SHARED_BYTES


task, handler = make_kernel(prepare, make_work(compute), job_bytes, scratch_bytes)
