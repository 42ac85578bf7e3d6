"""grouped_lora for CPUs in numba. Imported only to compile.

Rows are sorted by slot. A group is up to GROUP rows of one slot. A thread computes their h, and then all their outputs,
so it waits for no other thread. Within a group, tiles of TILE rows share each read of the adapter. A unit of work is
several groups.
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
from pallas_kernels.grouped_lora.cpu_job import (
    BASE_KIND,
    COUNT,
    CURSOR_BYTES,
    EXPANDS,
    FIRST,
    GROUP_BYTES,
    GROUPS_AT,
    INPUTS,
    JOB_BYTES,
    KEY_BYTES,
    KIND,
    OUT,
    OUTPUTS,
    PARTS,
    PATTERN,
    POOL_KIND,
    RANK,
    RANKS_OF,
    SCALES,
    SEGMENTS,
    UNIT,
    A,
    B,
    X,
    a_of,
    b_of,
    group_at,
    largest_rank,
    list_groups,
    list_rows,
    list_units,
    rank_of,
    start_cursor,
    take,
)
from pallas_kernels.native import vectors
from pallas_kernels.native.convert import narrow, round_up, size_of, widen
from pallas_kernels.native.frame import NATIVE, argument, dimension, make_kernel, make_work, result
from pallas_kernels.native.kinds import BFLOAT16, FLOAT32
from pallas_kernels.native.memory import (
    fill_zeros,
    load_float32,
    load_int32,
    load_int64,
    store_int64,
)

LANES, TILE, VECTOR, ONE = vectors.LANES, vectors.TILE, vectors.VECTOR, vectors.ONE
TOGETHER, RANKS, LINE = cpu_vectors.TOGETHER, cpu_vectors.RANKS, cpu_vectors.LINE
PIECE = 512  # bytes of a row of A, times RANKS, between two steps of the cursor
BLOCK = 2048  # outputs at a time: their float32 sums stay in the L1 cache
MIN_SHARED_BYTES = 131_072  # of the adapters that are read; below, one thread is faster


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
    return CURSOR_BYTES + TILE * (load_int64(job + PARTS) * h_stride(job) + x + 4 * BLOCK) + sums_bytes(job)


@njit(inline="always", **NATIVE)
def row_of(job, index):
    """The row of a key."""
    return load_int64(job + JOB_BYTES + KEY_BYTES * index) & 0xFFFFFFFF


@njit(**NATIVE)
def shrink(job, slot, part, count, x0, x1, x2, x3, cursor, sums, h):
    """Compute h of a part for a tile of `count` rows of x. cursor: 0 if the adapter has been read before."""
    kind, inputs, rank = load_int64(job + POOL_KIND), load_int64(job + INPUTS), rank_of(job, slot, part)
    steps, line, parts = inputs // LANES, inputs * size_of(kind), load_int64(job + PARTS)
    stride = VECTOR if count == 1 else TILE * VECTOR
    some = max(1, PIECE // line) * RANKS
    for first in range(0, rank, some):
        a, to, ranks = a_of(job, slot, part) + first * line, sums + first * stride, min(some, rank - first)
        together = RANKS if count == 1 else TOGETHER
        whole = ranks // together * together
        rest, rest_to = a + whole * line, to + whole * stride
        early = take(job, cursor, ranks * line, a)
        if count == 1:
            if kind == BFLOAT16:
                cpu_vectors.shrink_row_bfloat16(to, x0, a, steps, whole, early)
                cpu_vectors.shrink_row_1_bfloat16(rest_to, x0, rest, steps, ranks - whole, early + whole * line)
            else:
                cpu_vectors.shrink_row_float32(to, x0, a, steps, whole, early)
                cpu_vectors.shrink_row_1_float32(rest_to, x0, rest, steps, ranks - whole, early + whole * line)
            continue
        cpu_vectors.prefetch_lines(early, ranks * line // LINE)
        if kind == BFLOAT16:
            cpu_vectors.shrink_tile_bfloat16(to, x0, x1, x2, x3, a, steps, whole)
            cpu_vectors.shrink_tile_1_bfloat16(rest_to, x0, x1, x2, x3, rest, steps, ranks - whole)
        else:
            cpu_vectors.shrink_tile_float32(to, x0, x1, x2, x3, a, steps, whole)
            cpu_vectors.shrink_tile_1_float32(rest_to, x0, x1, x2, x3, rest, steps, ranks - whole)
    # whole vectors of ranks are added up: memory that was not written could hold numbers that are slow to add
    fill_zeros(sums + rank * stride, (round_up(rank, LANES) - rank) * stride)
    scale = load_float32(load_int64(job + SCALES) + 4 * (slot * parts + part))
    for row in range(count):
        for first in range(0, rank, LANES):
            source = sums + row * VECTOR + first * stride
            cpu_vectors.add_lanes(h + row * h_stride(job) + 4 * first, source, stride, scale)


@njit(**NATIVE)
def expand_row(kind, ranks, to, h, b, line, outputs, early):
    """Add `ranks` (at most RANKS) rows of B to one row of outputs."""
    if ranks == RANKS:
        if kind == BFLOAT16:
            cpu_vectors.expand_row_bfloat16(to, h, b, line, outputs // LANES, early)
        else:
            cpu_vectors.expand_row_float32(to, h, b, line, outputs // LANES, early)
        return
    size = outputs * size_of(kind)
    for rank in range(ranks):
        if kind == BFLOAT16:
            cpu_vectors.expand_row_1_bfloat16(
                to, h + 4 * rank, b + rank * line, line, outputs // LANES, early + rank * size
            )
        else:
            cpu_vectors.expand_row_1_float32(
                to, h + 4 * rank, b + rank * line, line, outputs // LANES, early + rank * size
            )


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
def expand_block(job, slot, count, start, end, to0, to1, to2, to3, cursor, h):
    """Add B h to outputs `start` to `end` of a tile of `count` rows. to0 to to3: addresses of output `start`."""
    kind, outputs, pattern = load_int64(job + POOL_KIND), load_int64(job + OUTPUTS), load_int64(job + PATTERN)
    stride, size = h_stride(job), size_of(kind)
    line, b, most = outputs * size, b_of(job, slot), largest_rank(job, slot)
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
            early = take(job, cursor, ranks * (high - low) * size, source)
            if count == 1:
                expand_row(kind, ranks, to0 + far, own, source, line, high - low, early)
            else:
                cpu_vectors.prefetch_lines(early, ranks * (high - low) * size // LINE)
                expand_tile(
                    kind, ranks, to0 + far, to1 + far, to2 + far, to3 + far, own, stride, source, line, high - low
                )


@njit(**NATIVE)
def compute_tile(job, index, count, cursor, scratch):
    """Compute a tile: `count` rows of one slot, from the key `index` on. cursor: as in `shrink`."""
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
            shrink(job, slot, part, 1 if count == 1 else TILE, x0, x1, x2, x3, cursor, sums, h + part * TILE * stride)
    if base_kind == FLOAT32:
        for start in range(0, outputs, BLOCK):
            expand_block(
                job, slot, count, start, min(start + BLOCK, outputs), out + 4 * (row0 * outputs + start),
                out + 4 * (row1 * outputs + start), out + 4 * (row2 * outputs + start),
                out + 4 * (row3 * outputs + start), cursor, h,
            )  # fmt: skip
        return
    size, far = size_of(base_kind), 4 * BLOCK
    for start in range(0, outputs, BLOCK):
        end = min(start + BLOCK, outputs)
        for tile_row in range(TILE if count > 1 else 1):
            place = out + (row_of(job, index + min(tile_row, count - 1)) * outputs + start) * size
            widen(base_kind, block + tile_row * far, place, end - start, ONE)
        expand_block(job, slot, count, start, end, block, block + far, block + 2 * far, block + 3 * far, cursor, h)
        for tile_row in range(count):
            place = out + (row_of(job, index + tile_row) * outputs + start) * size
            narrow(base_kind, place, block + tile_row * far, end - start, ONE)


@njit(**NATIVE)
def compute(job, unit, scratch):
    """Compute one unit: its groups, in tiles."""
    cursor, start = scratch, np.int64(load_int32(group_at(job, unit) + UNIT))
    end = np.int64(load_int32(group_at(job, unit + 1) + UNIT))
    start_cursor(job, cursor, start, end)
    for group in range(start, end):
        place = group_at(job, group)
        first, count = np.int64(load_int32(place + FIRST)), np.int64(load_int32(place + COUNT))
        for tile in range(0, count, TILE):
            own = cursor if tile == 0 else 0
            compute_tile(job, first + tile, min(TILE, count - tile), own, scratch + CURSOR_BYTES)


@njit(inline="always", **NATIVE)
def needed_rows(frame):
    """Number of rows that the call needs."""
    return max(0, min(dimension(frame, 3, 0), np.int64(load_int32(argument(frame, 1)))))


@njit(**NATIVE)
def job_bytes(frame):
    """Bytes of a job with its keys and groups."""
    return JOB_BYTES + (KEY_BYTES + GROUP_BYTES) * needed_rows(frame) + GROUP_BYTES


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
    store_int64(job + GROUPS_AT, job + JOB_BYTES + KEY_BYTES * rows)
    groups, total = list_groups(job, list_rows(job + JOB_BYTES, argument(frame, 3), rows))
    return list_units(job, groups, total), total >= MIN_SHARED_BYTES


task, handler = make_kernel(prepare, make_work(compute), job_bytes, scratch_bytes)
