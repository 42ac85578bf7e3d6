"""paged_attention for CPUs in numba: one pass over the pages, with online softmax. Imported only to compile.

A unit of work is a tile of query rows of one row of the batch and one KV head. A query row is a pair (token, query head
of the KV head). A unit reads its keys 16 at a time, counted from position 0. It converts them to float32, or multiplies
bfloat16 keys as they are stored. All sums of a query row are chains of their own, in the order of the keys. So
the bits of a query depend neither on the tile, the batch, the chunk nor on the number of threads.
"""

import numpy as np
from numba import njit

from pallas_kernels.native import library, vectors
from pallas_kernels.native.convert import narrow, round_up, size_of, widen
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
from pallas_kernels.native.kinds import BFLOAT16, FLOAT8, INT8
from pallas_kernels.native.memory import (
    copy_bytes,
    fetch_add,
    fill_zeros,
    load_bfloat16,
    load_float32,
    load_int32,
    load_int64,
    malloc,
    prefetch,
    store_float32,
    store_int64,
)
from pallas_kernels.paged_attention.cpu import ALIBI, CAP, FLAGS, PAGE_KIND, QUERY_KIND, SCALE, SINKS, V_DIM, WINDOW

LANES, TILE, PAIR = vectors.LANES, vectors.TILE, vectors.PAIR
ONE = np.float32(1)
# Query rows of a unit: 32 of up to 128 numbers, with their results, fill half of a first-level cache of 48 KiB.
MOST_ROWS, MOST_NUMBERS = 32, 4096
CACHE_LINE = 64
HAS_BFLOAT16 = library.has_feature("avx512bf16")
# without the feature the direct functions are never called, and must not be compiled
score_tile_direct = vectors.score_tile_bfloat16 if HAS_BFLOAT16 else vectors.score_tile
score_pair_direct = vectors.score_pair_bfloat16 if HAS_BFLOAT16 else vectors.score_pair
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
def value_dim(job):
    """Numbers of a value."""
    latent = option(job, V_DIM)
    return latent if latent > 0 else load_int64(job + HEAD_DIM)


@njit(**NATIVE)
def scratch_bytes(job):
    """Bytes of a thread's scratch: see `attend`."""
    rows = load_int64(job + TILE_ROWS)
    wide, wide_values = round_up(load_int64(job + HEAD_DIM), LANES), round_up(value_dim(job), LANES)
    return 4 * (rows * (wide + wide_values + LANES + 1 + 2) + LANES * (2 * wide + TILE + 1))


@njit(**NATIVE)
def page_line(job, table, head, part, position):
    """Index of a position's key (part 0) or value (part 1) among all rows of numbers in the pages."""
    size, heads, parts = load_int64(job + BLOCK_SIZE), load_int64(job + KV_HEADS), load_int64(job + PARTS)
    block = position // size
    return ((page_of(job, table, block) * parts + part) * heads + head) * size + position - block * size


@njit(**NATIVE)
def read_part(job, table, head, part, first, low, high, to):
    """Convert the keys (part 0) or values (part 1) of 16 positions; zeros for those outside low to high - 1."""
    size, dim, heads = load_int64(job + BLOCK_SIZE), load_int64(job + HEAD_DIM), load_int64(job + KV_HEADS)
    kind, data, scales = option(job, PAGE_KIND), load_int64(job + DATA), load_int64(job + SCALES)
    wide, bytes_each = 4 * round_up(dim, LANES), size_of(kind)
    begin, end = max(low - first, 0), min(high - first, LANES)
    if begin > 0 or end < LANES:
        fill_zeros(to, wide * LANES)
    while begin < end:
        position = first + begin
        count = min(size - position % size, end - begin)  # positions in this block
        line = page_line(job, table, head, part, position)
        source, target = data + line * dim * bytes_each, to + begin * wide
        scale = load_float32(scales + 4 * (part * heads + head)) if kind == FLOAT8 else ONE
        if kind != INT8 and wide == 4 * dim:
            widen(kind, target, source, count * dim, scale)
        else:
            for key in range(count):
                if kind == INT8:
                    scale = load_bfloat16(scales + 2 * (line + key))
                widen(kind, target + key * wide, source + key * dim * bytes_each, dim, scale)
        begin += count


@njit(**NATIVE)
def prefetch_part(job, table, head, part, first, high):
    """Begin to read the keys (part 0) or values (part 1) of positions first to first + 15 below high."""
    size, line_bytes = load_int64(job + BLOCK_SIZE), load_int64(job + HEAD_DIM) * size_of(option(job, PAGE_KIND))
    position, end = first, min(first + LANES, high)
    while position < end:
        count = min(size - position % size, end - position)
        start = load_int64(job + DATA) + page_line(job, table, head, part, position) * line_bytes
        for byte in range(0, count * line_bytes, CACHE_LINE):
            prefetch(start + byte)
        position += count


@njit(inline="always", **NATIVE)
def is_direct(job):
    """Whether keys are multiplied as they are stored: bfloat16, with 16 keys in a row."""
    if not HAS_BFLOAT16 or option(job, QUERY_KIND) != BFLOAT16 or option(job, PAGE_KIND) != BFLOAT16:
        return False
    return load_int64(job + HEAD_DIM) % (2 * LANES) == 0 and load_int64(job + BLOCK_SIZE) % LANES == 0


@njit(**NATIVE)
def score(direct, few, scores, queries, keys, line):
    """Scores of a few query rows and 16 keys. line: bytes of a row."""
    if direct and few:
        score_pair_direct(scores, queries, keys, line // 64)
    elif direct:
        score_tile_direct(scores, queries, keys, line // 64)
    elif few:
        vectors.score_pair(scores, queries, keys, line // 64)
    else:
        vectors.score_tile(scores, queries, keys, line // 64)


@njit(**NATIVE)
def accumulate(direct, few, out, weights, values, line, chunks):
    """Add the weighted values of 16 keys to a few results. line: bytes of a value."""
    if direct and few:
        vectors.add_pair_bfloat16(out, weights, values, line, chunks)
    elif direct:
        vectors.add_values_bfloat16(out, weights, values, line, chunks)
    elif few:
        vectors.add_pair(out, weights, values, line, chunks)
    else:
        vectors.add_values(out, weights, values, line, chunks)


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
    together = PAIR if rows <= PAIR else TILE
    padded = round_up(rows, together)
    table = load_int64(job + TABLES) + 4 * row * load_int64(job + WIDTH)
    window, scale, cap = np.int64(option(job, WINDOW)), float_option(job, SCALE), float_option(job, CAP)
    flags = option(job, FLAGS)
    bent, direct, few = cap > 0 or flags & ALIBI != 0, is_direct(job), together == PAIR
    data, value_part = load_int64(job + DATA), load_int64(job + PARTS) - 1
    line = 2 * dim if direct else 4 * wide  # bytes of a query, and of a key

    queries = scratch
    outs = queries + 4 * padded * wide
    totals = outs + 4 * padded * wide_values
    keys = totals + 4 * padded * LANES
    values = keys + 4 * LANES * wide
    scores = values + 4 * LANES * wide
    spare = scores + 4 * TILE * LANES
    positions = spare + 4 * LANES
    tops = positions + 8 * padded
    fill_zeros(queries, 4 * padded * (wide + wide_values + LANES))
    for i in range(rows):
        token, lane = (begin + i) // q_per_kv, (begin + i) % q_per_kv
        source = load_int64(job + Q) + (((start + token) * kv_heads + head) * q_per_kv + lane) * dim * size_of(q_kind)
        if direct:
            copy_bytes(queries + i * line, source, line)
        else:
            widen(q_kind, queries + i * line, source, dim, ONE)
        store_int64(positions + 8 * i, past + token)
        store_float32(tops + 4 * i, np.float32(vectors.LOWEST))

    high = min(past + (begin + rows - 1) // q_per_kv + 1, load_int64(job + WIDTH) * load_int64(job + BLOCK_SIZE))
    low = 0 if window == 0 else max(0, past + begin // q_per_kv + 1 - window)
    begin_group = low // LANES * LANES
    prefetch_part(job, table, head, 0, begin_group, high)
    prefetch_part(job, table, head, value_part, begin_group, high)
    for first in range(begin_group, high, LANES):
        prefetch_part(job, table, head, 0, first + LANES, high)
        group_keys = keys
        if direct:
            group_keys = data + page_line(job, table, head, 0, first) * line
        else:
            read_part(job, table, head, 0, first, low, high, keys)
        # a value that no query sees may be NaN, and 0 * NaN is NaN
        in_pages = direct and padded <= TILE and first >= low and first + LANES <= high
        group_values, value_line = values, 4 * wide
        if in_pages:
            group_values, value_line = data + page_line(job, table, head, value_part, first) * line, line
        else:
            read_part(job, table, head, value_part, first, low, high, values)
        for start_row in range(0, padded, together):
            score(direct, few, scores, queries + start_row * line, group_keys, line)
            for i in range(start_row, start_row + together):
                place = scores + 4 * (i - start_row) * LANES
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
            if start_row == 0:
                prefetch_part(job, table, head, value_part, first + LANES, high)
            out = outs + 4 * start_row * wide_values
            accumulate(in_pages, few, out, scores, group_values, value_line, wide_values // LANES)

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
run = make_run(work, scratch_bytes)


@njit(**NATIVE)
def handler(frame, task):
    """The function that XLA calls. task: address of the C function `task`, for helper threads."""
    if asks_for_metadata(frame):
        return 0
    rows = dimension(frame, 3, 0)
    job = malloc(JOB_BYTES + 8 * (rows + 1))
    if job == 0:
        return out_of_memory(frame)
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
    used = np.int64(load_int32(starts + 4 * rows))
    line = heads * value_dim(job) * size_of(option(job, QUERY_KIND))
    fill_zeros(load_int64(job + OUT) + used * line, (tokens - used) * line)  # padding tokens
    shared = keys * kv_heads * dim * 4 >= MIN_SHARED_BYTES
    return run(frame, task, job, units, MOST_THREADS if shared else 1)
