"""grouped_lora and lora_dot for CPUs in numba. Imported only to compile.

Rows are sorted by slot. A group is up to GROUP rows of one slot. A thread computes their h, and then all their outputs,
so it waits for no other thread. Within a group, tiles of TILE rows share each read of the adapter.

`lora_dot` multiplies by the weights first, in blocks of outputs as in `dot`. A group adds to whole rows, so threads
wait for all blocks before they compute groups.
"""

import numpy as np
from numba import njit

from pallas_kernels.dot import cpu_kernel as dot
from pallas_kernels.grouped_lora import cpu_vectors
from pallas_kernels.grouped_lora.cpu import (
    OPTION_BASE_KIND,
    OPTION_EXPANDS,
    OPTION_KIND,
    OPTION_MULTIPLIES,
    OPTION_POOL_KIND,
)
from pallas_kernels.grouped_lora.cpu_job import (
    BASE_KIND,
    BLOCKS,
    COUNT,
    CURSOR_BYTES,
    END,
    EXPANDS,
    FIRST,
    GROUP_BYTES,
    GROUPS_AT,
    HOME_BYTES,
    HOMES,
    HOMES_AT,
    INPUTS,
    JOB_BYTES,
    KEY_BYTES,
    KIND,
    LINE,
    OUT,
    OUTPUTS,
    PARTS,
    PATTERN,
    POOL_KIND,
    PRODUCT,
    RANK,
    RANKS,
    RANKS_OF,
    SCALES,
    SEGMENTS,
    THREADS,
    A,
    B,
    X,
    a_of,
    b_of,
    claim,
    group_at,
    home_at,
    largest_rank,
    list_groups,
    list_homes,
    list_rows,
    rank_of,
    start_cursor,
    take,
)
from pallas_kernels.native import vectors
from pallas_kernels.native.convert import narrow, round_up, size_of, widen
from pallas_kernels.native.frame import (
    DONE,
    NATIVE,
    NEXT,
    UNITS,
    argument,
    dimension,
    make_kernel,
    result,
    wait_until,
)
from pallas_kernels.native.kinds import BFLOAT16, FLOAT32
from pallas_kernels.native.memory import (
    fetch_add,
    fill_zeros,
    load_float32,
    load_int32,
    load_int64,
    store_int64,
    thread_limit,
)

LANES, TILE, VECTOR, ONE = vectors.LANES, vectors.TILE, vectors.VECTOR, vectors.ONE
TOGETHER = cpu_vectors.TOGETHER
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
    groups = TILE * (load_int64(job + PARTS) * h_stride(job) + x + 4 * BLOCK) + sums_bytes(job)
    blocks = dot.scratch_bytes(job + PRODUCT) if load_int64(job + BLOCKS) > 0 else 0
    return CURSOR_BYTES + max(groups, blocks)


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
def compute_group(job, group, cursor, scratch):
    """Compute the rows of a group, in tiles."""
    place = group_at(job, group)
    first, count = np.int64(load_int32(place + FIRST)), np.int64(load_int32(place + COUNT))
    for tile in range(0, count, TILE):
        own = cursor if tile == 0 else 0
        compute_tile(job, first + tile, min(TILE, count - tile), own, scratch)


@njit(**NATIVE)
def work(job, scratch):
    """Compute blocks of the product with the weights, then groups, until none is left."""
    cursor, rest, homes, blocks = scratch, scratch + CURSOR_BYTES, load_int64(job + HOMES), load_int64(job + BLOCKS)
    block = fetch_add(job + NEXT, 1)
    while block < blocks:
        dot.multiply(job + PRODUCT, block, rest)
        fetch_add(job + DONE, 1)
        block = fetch_add(job + NEXT, 1)
    home, finished = fetch_add(job + THREADS, 1) % homes, 0
    for _ in range(homes):
        end, has_started = load_int64(home_at(job, home) + END), False
        group = claim(job, home)
        while group < end:
            if not has_started:
                wait_until(job, blocks)  # a group adds to whole rows, which all threads multiply
                start_cursor(job, cursor, group, end)
                has_started = True
            compute_group(job, group, cursor, rest)
            finished += 1
            group = claim(job, home)
        home = (home + 1) % homes
    store_int64(job + NEXT, load_int64(job + UNITS))  # helpers that start later see that nothing is left
    fetch_add(job + DONE, finished)


@njit(inline="always", **NATIVE)
def needed_rows(frame):
    """Number of rows that the call needs."""
    return max(0, min(dimension(frame, 3, 0), np.int64(load_int32(argument(frame, 1)))))


@njit(**NATIVE)
def job_bytes(frame):
    """Bytes of a job with its keys, groups and homes."""
    return JOB_BYTES + (KEY_BYTES + GROUP_BYTES) * needed_rows(frame) + HOME_BYTES * thread_limit()


@njit(**NATIVE)
def prepare_blocks(frame, job, rows):
    """Write the words of the product with the weights. Returns the bytes of weights."""
    kind, inputs, outputs = load_int64(job + KIND), load_int64(job + INPUTS), load_int64(job + OUTPUTS)
    blocks = dot.prepare_product(
        job + PRODUCT, kind, load_int64(job + BASE_KIND), load_int64(job + X), dimension(frame, 3, 0), rows, inputs,
        argument(frame, 10), outputs, load_int64(job + OUT),
    )  # fmt: skip
    store_int64(job + BLOCKS, blocks)
    return outputs * inputs * size_of(kind) if blocks > 0 else 0


@njit(**NATIVE)
def prepare(frame, job):
    """Write the job's words. Returns the number of blocks and groups, and whether threads share them."""
    options, rows = argument(frame, 0), needed_rows(frame)
    slots, parts, rank = dimension(frame, 7, 1), dimension(frame, 7, 2), dimension(frame, 6, 2)
    inputs, outputs = dimension(frame, 4, 1), dimension(frame, 6, 3)
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
    store_int64(job + BLOCKS, 0)
    store_int64(job + THREADS, 0)
    store_int64(job + GROUPS_AT, job + JOB_BYTES + KEY_BYTES * rows)
    store_int64(job + HOMES_AT, job + JOB_BYTES + (KEY_BYTES + GROUP_BYTES) * rows)
    groups, total = list_groups(job, list_rows(job + JOB_BYTES, argument(frame, 3), rows))
    weight_bytes = prepare_blocks(frame, job, rows) if load_int32(options + 4 * OPTION_MULTIPLIES) != 0 else 0
    is_shared = max(total, weight_bytes) >= MIN_SHARED_BYTES
    homes = max(1, min(groups, thread_limit() if is_shared else 1))
    store_int64(job + HOMES, homes)
    list_homes(job, groups, total, homes)
    return load_int64(job + BLOCKS) + groups, is_shared


task, handler = make_kernel(prepare, work, job_bytes, scratch_bytes)
