"""paged_attention for CPUs in numba: one pass over the pages, with online softmax. Imported only to compile.

A unit of work is a tile of query rows of one row of the batch and one KV head. A query row is a pair (token, query head
of the KV head). A unit reads its keys 16 at a time, counted from position 0, and converts them to float32. All sums of
a query row are chains of their own, in the order of the keys. So the bits of a query depend neither on the tile, the
batch, the chunk, the block size nor on the number of threads.
"""

import numpy as np
from numba import njit

from pallas_kernels.native import vectors
from pallas_kernels.native.frame import (
    ARGUMENTS,
    DONE,
    NATIVE,
    NEXT,
    UNITS,
    argument,
    asks_for_metadata,
    dimension,
    make_share,
    make_task,
    result,
)
from pallas_kernels.native.memory import (
    fetch_add,
    fill_zeros,
    free,
    load_bfloat16,
    load_float32,
    load_int32,
    load_int64,
    malloc,
    prefetch,
    store_float32,
    store_int64,
)
from pallas_kernels.paged_attention.cpu import (
    ALIBI,
    BFLOAT16,
    CAP,
    FLAGS,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    INT8,
    PAGE_KIND,
    QUERY_KIND,
    SCALE,
    SINKS,
    V_DIM,
    WINDOW,
)

LANES, TILE = vectors.LANES, vectors.TILE
ONE = np.float32(1)
# Query rows of a unit: 32 of up to 128 numbers, with their results, fill half of a first-level cache of 48 KiB.
MOST_ROWS, MOST_NUMBERS = 32, 4096
CACHE_LINE = 64
# Groups of 16 keys that are requested early. 32 rows of 60 to 450 keys, 8 heads over 4 of 64, bf16, one core of Zen 5:
# 0 takes 2.3 ms, 1 to 4 take 1.7 to 2.2.
AHEAD = 1
MIN_SHARED_BYTES = 65_536  # of keys and values; below, one thread is faster: waking another takes about 10 us

# the job's words, in the order of the handler's arguments, then the result and sizes
(
    OPTIONS, Q, STARTS, LENS, TABLES, SINK_LOGITS, SLOPES, DATA, SCALES, OUT,
    ROWS, HEADS, HEAD_DIM, NUM_BLOCKS, PARTS, KV_HEADS, BLOCK_SIZE, WIDTH, TILE_ROWS, LAST_FIELD,
) = (ARGUMENTS + 8 * i for i in range(20))  # fmt: skip
JOB_BYTES = LAST_FIELD  # followed by first_unit[ROWS + 1]: the first unit of each row


@njit(inline="always", **NATIVE)
def option(job, index):
    """An int32 of the options."""
    return load_int32(load_int64(job + OPTIONS) + 4 * index)


@njit(inline="always", **NATIVE)
def float_option(job, index):
    """A float32 of the options."""
    return load_float32(load_int64(job + OPTIONS) + 4 * index)


@njit(inline="always", **NATIVE)
def page_of(job, table, block):
    """The page of a block. Numbers outside the pool are clipped, as by XLA: they would crash the process."""
    return min(max(np.int64(load_int32(table + 4 * block)), 0), load_int64(job + NUM_BLOCKS) - 1)


@njit(inline="always", **NATIVE)
def round_up(number, multiple):
    """The next multiple."""
    return (number + multiple - 1) // multiple * multiple


@njit(**NATIVE)
def size_of(kind):
    """Bytes of a number."""
    if kind == FLOAT32:
        return 4
    return 1 if kind in (INT8, FLOAT8) else 2


@njit(**NATIVE)
def widen(kind, to, source, count, scale):
    """Convert `count` numbers to float32, times scale, in whole vectors of 16."""
    if kind == BFLOAT16:
        vectors.widen_bfloat16(to, source, count, scale)
    elif kind == FLOAT32:
        vectors.widen_float32(to, source, count, scale)
    elif kind == FLOAT16:
        vectors.widen_float16(to, source, count, scale)
    elif kind == INT8:
        vectors.widen_int8(to, source, count, scale)
    else:
        vectors.widen_float8(to, source, count, scale)


@njit(**NATIVE)
def narrow(kind, to, source, count, scale):
    """Convert `count` float32 numbers, times scale, to another type."""
    if kind == BFLOAT16:
        vectors.narrow_bfloat16(to, source, count, scale)
    elif kind == FLOAT32:
        vectors.narrow_float32(to, source, count, scale)
    else:
        vectors.narrow_float16(to, source, count, scale)


@njit(inline="always", **NATIVE)
def value_dim(job):
    """Numbers of a value."""
    latent = option(job, V_DIM)
    return latent if latent > 0 else load_int64(job + HEAD_DIM)


@njit(**NATIVE)
def scratch_bytes(job):
    """Bytes of a thread's scratch: see `attend`."""
    rows = load_int64(job + TILE_ROWS)
    wide, wide_values = round_up(load_int64(job + HEAD_DIM), LANES), round_up(value_dim(job), LANES)
    return 4 * (rows * (wide + wide_values + LANES + 1 + 2) + LANES * (wide + wide_values + TILE + 1) + LANES)


@njit(**NATIVE)
def read_keys(job, table, head, first, low, high, keys, values):
    """Write the keys first to first + 15 and their values to the scratch; zeros for those not in low to high - 1."""
    size, dim, parts = load_int64(job + BLOCK_SIZE), load_int64(job + HEAD_DIM), load_int64(job + PARTS)
    heads, kind = load_int64(job + KV_HEADS), option(job, PAGE_KIND)
    data, scales, bytes_each = load_int64(job + DATA), load_int64(job + SCALES), size_of(kind)
    wide = 4 * round_up(dim, LANES)
    begin, end = max(low - first, 0), min(high - first, LANES)
    if begin > 0 or end < LANES:
        fill_zeros(keys, wide * LANES)
        if parts == 2:
            fill_zeros(values, wide * LANES)
    while begin < end:
        block = (first + begin) // size
        offset = first + begin - block * size
        count = min(size - offset, end - begin)  # keys of this block
        page = page_of(job, table, block)
        for part in range(parts):
            line = ((page * parts + part) * heads + head) * size + offset
            to, source = (keys if part == 0 else values) + begin * wide, data + line * dim * bytes_each
            scale = load_float32(scales + 4 * (part * heads + head)) if kind == FLOAT8 else ONE
            if kind != INT8 and wide == 4 * dim:
                widen(kind, to, source, count * dim, scale)
                continue
            for key in range(count):
                if kind == INT8:
                    scale = load_bfloat16(scales + 2 * (line + key))
                widen(kind, to + key * wide, source + key * dim * bytes_each, dim, scale)
        begin += count


@njit(**NATIVE)
def prefetch_keys(job, table, head, first, high):
    """Begin to read the keys first to first + 15 below high, and their values."""
    size, dim, parts = load_int64(job + BLOCK_SIZE), load_int64(job + HEAD_DIM), load_int64(job + PARTS)
    heads, data = load_int64(job + KV_HEADS), load_int64(job + DATA)
    line_bytes = dim * size_of(option(job, PAGE_KIND))
    position, end = first, min(first + LANES, high)
    while position < end:
        block = position // size
        offset = position - block * size
        page = page_of(job, table, block)
        count = min(size - offset, end - position)
        for part in range(parts):
            start = data + (((page * parts + part) * heads + head) * size + offset) * line_bytes
            for byte in range(0, count * line_bytes, CACHE_LINE):
                prefetch(start + byte)
        position += count


@njit(**NATIVE)
def attend(job, row, tile, head, scratch):
    """Compute one unit: a tile of query rows of a row of the batch, and a KV head."""
    dim, kv_heads = load_int64(job + HEAD_DIM), load_int64(job + KV_HEADS)
    q_per_kv = load_int64(job + HEADS) // kv_heads
    v_dim, q_kind = value_dim(job), option(job, QUERY_KIND)
    wide, wide_values = round_up(dim, LANES), round_up(v_dim, LANES)
    start = np.int64(load_int32(load_int64(job + STARTS) + 4 * row))
    count = load_int32(load_int64(job + STARTS) + 4 * row + 4) - start
    past = load_int32(load_int64(job + LENS) + 4 * row) - count
    begin = tile * load_int64(job + TILE_ROWS)
    rows = min(load_int64(job + TILE_ROWS), count * q_per_kv - begin)
    padded = round_up(rows, TILE)
    table = load_int64(job + TABLES) + 4 * row * load_int64(job + WIDTH)
    window, scale, cap = np.int64(option(job, WINDOW)), float_option(job, SCALE), float_option(job, CAP)
    flags = option(job, FLAGS)
    bent = cap > 0 or flags & ALIBI != 0

    queries = scratch
    outs = queries + 4 * padded * wide
    totals = outs + 4 * padded * wide_values
    keys = totals + 4 * padded * LANES
    values = keys + 4 * LANES * wide if load_int64(job + PARTS) == 2 else keys
    scores = values + 4 * LANES * wide
    spare = scores + 4 * TILE * LANES
    positions = spare + 4 * LANES
    tops = positions + 8 * padded
    fill_zeros(queries, 4 * padded * (wide + wide_values + LANES))
    for i in range(rows):
        token, lane = (begin + i) // q_per_kv, (begin + i) % q_per_kv
        source = ((start + token) * kv_heads + head) * q_per_kv + lane
        widen(q_kind, queries + 4 * i * wide, load_int64(job + Q) + source * dim * size_of(q_kind), dim, ONE)
        store_int64(positions + 8 * i, past + token)
        store_float32(tops + 4 * i, np.float32(vectors.LOWEST))

    high = min(past + (begin + rows - 1) // q_per_kv + 1, load_int64(job + WIDTH) * load_int64(job + BLOCK_SIZE))
    low = 0 if window == 0 else max(0, past + begin // q_per_kv + 1 - window)
    for ahead in range(AHEAD):
        prefetch_keys(job, table, head, low // LANES * LANES + ahead * LANES, high)
    for first in range(low // LANES * LANES, high, LANES):
        prefetch_keys(job, table, head, first + AHEAD * LANES, high)
        read_keys(job, table, head, first, low, high, keys, values)
        for quad in range(0, padded, TILE):
            vectors.score_tile(scores, queries + 4 * quad * wide, keys, wide // LANES)
            for i in range(quad, quad + TILE):
                place = scores + 4 * (i - quad) * LANES
                position = load_int64(positions + 8 * i)
                end = min(LANES, position + 1 - first)
                from_ = 0 if window == 0 else max(0, position + 1 - window - first)
                if i >= rows or end <= from_:
                    fill_zeros(place, 4 * LANES)
                    continue
                factor = scale
                if bent:
                    slope = np.float32(0)
                    if flags & ALIBI != 0:
                        slope = load_float32(load_int64(job + SLOPES) + 4 * (head * q_per_kv + (begin + i) % q_per_kv))
                    vectors.bend_scores(place, scale, cap, slope, np.float32(position - first))
                    factor = ONE
                vectors.add_scores(
                    place, tops + 4 * i, totals + 4 * i * LANES, outs + 4 * i * wide_values, wide_values // LANES,
                    factor, from_, end,
                )  # fmt: skip
            vectors.add_values(outs + 4 * quad * wide_values, scores, values, 4 * wide, wide_values // LANES)

    for i in range(rows):
        token, lane = (begin + i) // q_per_kv, (begin + i) % q_per_kv
        vectors.sum_lanes(totals + 4 * i * LANES)
        total, factor = load_float32(totals + 4 * i * LANES), ONE
        if flags & SINKS != 0:
            sink = load_float32(load_int64(job + SINK_LOGITS) + 4 * (head * q_per_kv + lane))
            top = load_float32(tops + 4 * i)
            store_float32(spare, min(top - sink, np.float32(0)))
            store_float32(spare + 4, min(sink - top, np.float32(0)))
            vectors.exp_lanes(spare)
            factor = load_float32(spare)
            total = total * factor + load_float32(spare + 4)
        factor = factor / total if total != 0 else np.float32(0)
        target = ((start + token) * kv_heads + head) * q_per_kv + lane
        out = load_int64(job + OUT) + target * v_dim * size_of(q_kind)
        narrow(q_kind, out, outs + 4 * i * wide_values, v_dim, factor)


@njit(**NATIVE)
def work(job, scratch):
    """Claim units and compute them until none is left. The last tiles of a row have the most keys and come first."""
    units, rows, kv_heads = load_int64(job + UNITS), load_int64(job + ROWS), load_int64(job + KV_HEADS)
    first_unit = job + JOB_BYTES
    claimed = fetch_add(job + NEXT, 1)
    while claimed < units:
        unit = units - 1 - claimed
        low, high = 0, rows  # the row is at least low and below high
        while high - low > 1:
            middle = (low + high) // 2
            if load_int64(first_unit + 8 * middle) <= unit:
                low = middle
            else:
                high = middle
        inside = unit - load_int64(first_unit + 8 * low)
        attend(job, low, inside // kv_heads, inside % kv_heads, scratch)
        fetch_add(job + DONE, 1)
        claimed = fetch_add(job + NEXT, 1)


task = make_task(work, scratch_bytes)


share = make_share(work)


@njit(**NATIVE)
def handler(frame, task):
    """The function that XLA calls. task: address of the C function `task`, for helper threads."""
    if asks_for_metadata(frame):
        return 0
    rows = dimension(frame, 3, 0)
    job = malloc(JOB_BYTES + 8 * (rows + 1))
    for i in range(9):
        store_int64(job + OPTIONS + 8 * i, argument(frame, i))
    store_int64(job + OUT, result(frame, 0))
    tokens, heads, dim = dimension(frame, 1, 0), dimension(frame, 1, 1), dimension(frame, 1, 2)
    store_int64(job + ROWS, rows)
    store_int64(job + HEADS, heads)
    store_int64(job + HEAD_DIM, dim)
    kv_heads = dimension(frame, 7, 2)
    store_int64(job + NUM_BLOCKS, dimension(frame, 7, 0))
    store_int64(job + PARTS, dimension(frame, 7, 1))
    store_int64(job + KV_HEADS, kv_heads)
    store_int64(job + BLOCK_SIZE, dimension(frame, 7, 3))
    store_int64(job + WIDTH, dimension(frame, 4, 1))
    most = max(TILE, min(MOST_ROWS, MOST_NUMBERS // round_up(dim, LANES) // TILE * TILE))
    starts, lens = load_int64(job + STARTS), load_int64(job + LENS)
    q_per_kv, longest, keys = heads // kv_heads, 1, 0
    for row in range(rows):
        longest = max(longest, load_int32(starts + 4 * row + 4) - load_int32(starts + 4 * row))
    tile_rows = min(most, round_up(longest * q_per_kv, TILE))
    store_int64(job + TILE_ROWS, tile_rows)
    units = 0
    for row in range(rows):
        store_int64(job + JOB_BYTES + 8 * row, units)
        count = load_int32(starts + 4 * row + 4) - load_int32(starts + 4 * row)
        tiles = (count * q_per_kv + tile_rows - 1) // tile_rows
        units += tiles * kv_heads
        keys += tiles * load_int32(lens + 4 * row)
    store_int64(job + JOB_BYTES + 8 * rows, units)
    store_int64(job + NEXT, 0)
    store_int64(job + DONE, 0)
    store_int64(job + UNITS, units)
    used = np.int64(load_int32(starts + 4 * rows))
    line = heads * value_dim(job) * size_of(option(job, QUERY_KIND))
    fill_zeros(load_int64(job + OUT) + used * line, (tokens - used) * line)  # padding tokens
    scratch = malloc(scratch_bytes(job))
    shared = keys * kv_heads * dim * 4 >= MIN_SHARED_BYTES
    share(frame, task, job, scratch, 1024 if shared else 1)
    free(scratch)
    return 0
