"""paged_attention for CPUs in numba: one pass over the pages, with online softmax. Imported only to compile.

A unit of work is a tile of query rows of one row of the batch and one KV head. A query row is a pair (token, query head
of the KV head). A unit takes its keys 64 at a time, counted from position 0: first the scores of all query rows, then
their weights, then the weighted values. Keys and values are read in groups of LANES, and converted to float32. If
queries and pages are bfloat16, they are multiplied as stored (`is_direct`). Then weights are rounded to bfloat16, as in
Transformers, if the processor multiplies bfloat16. A query row has its own sums, in the order of the keys. So its bits
do not depend on the tile, the batch, the chunk or the number of threads.
"""

import numpy as np
from numba import njit

from pallas_kernels.native import vectors
from pallas_kernels.native.convert import narrow, round_up, size_of, widen
from pallas_kernels.native.frame import (
    CACHE_LINE,
    NATIVE,
    UNITS,
    argument,
    dimension,
    make_kernel,
    make_work,
    result,
    words,
)
from pallas_kernels.native.kinds import BFLOAT16, FLOAT8, INT8
from pallas_kernels.native.memory import (
    copy_bytes,
    fill_zeros,
    load_bfloat16,
    load_float32,
    load_int32,
    load_int64,
    prefetch,
    store_float32,
    store_int64,
)
from pallas_kernels.paged_attention import cpu_vectors
from pallas_kernels.paged_attention.cpu import (
    ALIBI,
    CAP,
    FLAGS,
    PAGE_KIND,
    PAGE_SHAPE,
    QUERY_KIND,
    SCALE,
    SINKS,
    V_DIM,
    WINDOW,
)

LANES, VECTOR, TILE, PAIR = vectors.LANES, vectors.VECTOR, vectors.TILE, vectors.PAIR
SPAN, LINE = cpu_vectors.SPAN, cpu_vectors.LINE
ONE = np.float32(1)
# Query rows of a unit: 32 of up to 128 float32, with their results, take 32 KiB of an L1 cache of 48 KiB.
MOST_ROWS, MOST_NUMBERS = 32, 4096
MIN_SHARED_BYTES = 65_536  # of keys and values; below, one thread is faster: waking another takes about 10 us

# the job's words, in the order of the handler's arguments, then the result and sizes
(
    OPTIONS, Q, STARTS, LENS, TABLES, SINK_LOGITS, SLOPES, DATA, SCALES, OUT,
    ROWS, HEADS, HEAD_DIM, NUM_BLOCKS, PARTS, KV_HEADS, BLOCK_SIZE, WIDTH, TILE_ROWS, JOB_BYTES,
) = words(19)  # fmt: skip
# first_unit[ROWS + 1] follows: the first unit of each row


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
    """Width of a value vector."""
    latent = option(job, V_DIM)
    return latent if latent > 0 else load_int64(job + HEAD_DIM)


@njit(**NATIVE)
def scratch_bytes(job):
    """Bytes of a thread's scratch: see `attend`."""
    rows = load_int64(job + TILE_ROWS)
    wide, wide_values = round_up(load_int64(job + HEAD_DIM), LINE), round_up(value_dim(job), LINE)
    return 4 * (rows * (wide + wide_values + LANES + SPAN + 1 + 2) + LANES * (2 * wide + 1))


@njit(**NATIVE)
def page_line(job, table, head, part, position):
    """Index of a position's key (part 0) or value (part 1) among all key and value vectors of the pages."""
    size, heads, parts = load_int64(job + BLOCK_SIZE), load_int64(job + KV_HEADS), load_int64(job + PARTS)
    block = position // size
    return ((page_of(job, table, block) * parts + part) * heads + head) * size + position - block * size


@njit(**NATIVE)
def read_part(job, table, head, part, first, low, high, to):
    """Convert the keys (part 0) or values (part 1) of LANES positions to float32; zeros outside low to high - 1."""
    size, dim, heads = load_int64(job + BLOCK_SIZE), load_int64(job + HEAD_DIM), load_int64(job + KV_HEADS)
    kind, data, scales = option(job, PAGE_KIND), load_int64(job + DATA), load_int64(job + SCALES)
    wide, bytes_each = 4 * round_up(dim, LINE), size_of(kind)
    begin, end = max(low - first, 0), min(high - first, LANES)
    if begin > 0 or end < LANES or wide != 4 * round_up(dim, LANES):
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
    """Prefetch the keys (part 0) or values (part 1) of positions first to first + LANES - 1 below high."""
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
    """True if keys and values are multiplied in bfloat16, as stored: LANES keys must be contiguous."""
    if option(job, QUERY_KIND) != BFLOAT16 or option(job, PAGE_KIND) != BFLOAT16:
        return False
    whole = load_int64(job + HEAD_DIM) % (2 * LANES) == 0 and value_dim(job) % (2 * LANES) == 0
    return whole and load_int64(job + BLOCK_SIZE) % LANES == 0


@njit(**NATIVE)
def find_values(job, table, head, first, low, high, spare):
    """Address of the bfloat16 values of LANES positions; of a copy, with zeros outside low to high - 1, if needed."""
    line = 2 * load_int64(job + HEAD_DIM)
    part = load_int64(job + PARTS) - 1
    source = load_int64(job + DATA) + page_line(job, table, head, part, first) * line
    begin, end = max(low - first, 0), min(high - first, LANES)
    if begin == 0 and end == LANES:
        return source
    fill_zeros(spare, LANES * line)  # values outside may be NaN, and 0 * NaN is NaN
    copy_bytes(spare + begin * line, source + begin * line, (end - begin) * line)
    return spare


@njit(**NATIVE)
def score(direct, padded, scores, queries, keys, line):
    """Compute the scores of `padded` query rows and LANES keys. line: bytes of a query, and of a key."""
    stride, steps = 4 * SPAN, line // VECTOR
    if padded == PAIR and direct:
        cpu_vectors.score_pair_bfloat16(scores, stride, queries, keys, steps)
    elif padded == PAIR:
        cpu_vectors.score_pair(scores, stride, queries, keys, steps)
    else:
        for i in range(0, padded, TILE):
            if direct:
                cpu_vectors.score_tile_bfloat16(scores + i * stride, stride, queries + i * line, keys, steps)
            else:
                cpu_vectors.score_tile(scores + i * stride, stride, queries + i * line, keys, steps)


@njit(**NATIVE)
def add_scores(direct, scores, top, total, out, chunks, scale, low, high):
    """One step of softmax for a query row and 64 keys: see `cpu_vectors.add_scores`."""
    if direct:
        cpu_vectors.add_scores_bfloat16(scores, top, total, out, chunks, scale, low, high)
    else:
        cpu_vectors.add_scores(scores, top, total, out, chunks, scale, low, high)


@njit(**NATIVE)
def accumulate(direct, padded, outs, weights, values, line, chunks):
    """Add the weighted values of LANES keys to the results of `padded` query rows. line: bytes of a value."""
    stride, width = 4 * SPAN, VECTOR * chunks  # row strides of weights and of results, in bytes
    if padded == PAIR and direct:
        cpu_vectors.add_pair_bfloat16(outs, weights, stride, values, line, chunks)
    elif padded == PAIR:
        cpu_vectors.add_pair(outs, weights, stride, values, line, chunks)
    else:
        for i in range(0, padded, TILE):
            if direct:
                cpu_vectors.add_values_bfloat16(outs + i * width, weights + i * stride, stride, values, line, chunks)
            else:
                cpu_vectors.add_values(outs + i * width, weights + i * stride, stride, values, line, chunks)


@njit(**NATIVE)
def attend(job, row, tile, head, scratch):
    """Compute one unit: a tile of query rows of a row of the batch, and a KV head."""
    dim, kv_heads = load_int64(job + HEAD_DIM), load_int64(job + KV_HEADS)
    q_per_kv = load_int64(job + HEADS) // kv_heads
    v_dim, q_kind = value_dim(job), option(job, QUERY_KIND)
    wide, wide_values = round_up(dim, LINE), round_up(v_dim, LINE)
    start = np.int64(load_int32(load_int64(job + STARTS) + 4 * row))
    count = load_int32(load_int64(job + STARTS) + 4 * row + 4) - start
    past = load_int32(load_int64(job + LENS) + 4 * row) - count
    begin = tile * load_int64(job + TILE_ROWS)
    rows = min(load_int64(job + TILE_ROWS), count * q_per_kv - begin)
    padded = PAIR if rows <= PAIR else round_up(rows, TILE)
    table = load_int64(job + TABLES) + 4 * row * load_int64(job + WIDTH)
    window, scale, cap = np.int64(option(job, WINDOW)), float_option(job, SCALE), float_option(job, CAP)
    flags = option(job, FLAGS)
    bent, direct = cap > 0 or flags & ALIBI != 0, is_direct(job)
    data, value_part = load_int64(job + DATA), load_int64(job + PARTS) - 1
    line = 2 * dim if direct else 4 * wide  # bytes of a query, and of a key

    queries = scratch
    outs = queries + 4 * padded * wide
    totals = outs + 4 * padded * wide_values
    keys = totals + 4 * padded * LANES
    values = keys + 4 * LANES * wide
    scores = values + 4 * LANES * wide
    spare = scores + 4 * padded * SPAN
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
        store_float32(tops + 4 * i, np.float32(cpu_vectors.LOWEST))

    high = min(past + (begin + rows - 1) // q_per_kv + 1, load_int64(job + WIDTH) * load_int64(job + BLOCK_SIZE))
    low = 0 if window == 0 else max(0, past + begin // q_per_kv + 1 - window)
    begin_group = low // LANES * LANES
    stride, chunks = 4 * SPAN, wide_values // LANES
    for first in range(begin_group, min(high, low // SPAN * SPAN + SPAN), LANES):
        prefetch_part(job, table, head, 0, first, high)
    for span in range(low // SPAN * SPAN, high, SPAN):
        begin_group, end_group = max(span, low // LANES * LANES), min(span + SPAN, high)
        for first in range(begin_group, end_group, LANES):
            prefetch_part(job, table, head, value_part, first, high)
            group_keys = keys
            if direct:
                group_keys = data + page_line(job, table, head, 0, first) * line
            else:
                read_part(job, table, head, 0, first, low, high, keys)
            score(direct, padded, scores + 4 * (first - span), queries, group_keys, line)
        for i in range(padded):
            place = scores + i * stride
            position = load_int64(positions + 8 * i)
            end = min(end_group - span, position + 1 - span)
            from_ = 0 if window == 0 else max(0, position + 1 - window - span)
            if i >= rows or end <= from_:
                fill_zeros(place, stride)
                continue
            factor = scale
            if bent:
                slope = np.float32(0)
                if flags & ALIBI != 0:
                    slope = load_float32(load_int64(job + SLOPES) + 4 * (head * q_per_kv + (begin + i) % q_per_kv))
                for group in range(begin_group - span, end_group - span, LANES):
                    distance = np.float32(position - span - group)
                    cpu_vectors.bend_scores(place + 4 * group, scale, cap, slope, distance)
                factor = ONE
            total, out = totals + 4 * i * LANES, outs + 4 * i * wide_values
            add_scores(direct, place, tops + 4 * i, total, out, chunks, factor, from_, end)
        for first in range(begin_group, end_group, LANES):
            prefetch_part(job, table, head, 0, first + SPAN, high)
            group_values, value_line = values, 4 * wide
            if direct:
                group_values, value_line = find_values(job, table, head, first, low, high, values), line
            else:
                read_part(job, table, head, value_part, first, low, high, values)
            weights = scores + 4 * (first - span)
            accumulate(direct, padded, outs, weights, group_values, value_line, chunks)

    for i in range(rows):
        token, lane = (begin + i) // q_per_kv, (begin + i) % q_per_kv
        cpu_vectors.sum_lanes(totals + 4 * i * LANES)
        total, factor = load_float32(totals + 4 * i * LANES), ONE
        if flags & SINKS != 0:
            sink = load_float32(load_int64(job + SINK_LOGITS) + 4 * (head * q_per_kv + lane))
            top = load_float32(tops + 4 * i)
            store_float32(spare, min(top - sink, np.float32(0)))
            store_float32(spare + 4, min(sink - top, np.float32(0)))
            cpu_vectors.exp_lanes(spare)
            factor = load_float32(spare)
            total = total * factor + load_float32(spare + 4)
        factor = factor / total if total != 0 else np.float32(0)
        target = ((start + token) * kv_heads + head) * q_per_kv + lane
        out = load_int64(job + OUT) + target * v_dim * size_of(q_kind)
        narrow(q_kind, out, outs + 4 * i * wide_values, v_dim, factor)


@njit(**NATIVE)
def attend_unit(job, claimed, scratch):
    """Compute one unit. The last tiles of a row have the most keys and come first."""
    first_unit, kv_heads = job + JOB_BYTES, load_int64(job + KV_HEADS)
    unit = load_int64(job + UNITS) - 1 - claimed
    low, high = 0, load_int64(job + ROWS)  # the row is at least low and below high
    while high - low > 1:
        middle = (low + high) // 2
        if load_int64(first_unit + 8 * middle) <= unit:
            low = middle
        else:
            high = middle
    inside = unit - load_int64(first_unit + 8 * low)
    attend(job, low, inside // kv_heads, inside % kv_heads, scratch)


@njit(**NATIVE)
def job_bytes(frame):
    """Bytes of a job with the first unit of each row."""
    return JOB_BYTES + 8 * (dimension(frame, 3, 0) + 1)


@njit(**NATIVE)
def prepare(frame, job):
    """Write the job's words. Returns the number of units, and whether threads share them."""
    rows = dimension(frame, 3, 0)
    for i in range(9):
        store_int64(job + OPTIONS + 8 * i, argument(frame, i))
    store_int64(job + OUT, result(frame, 0))
    tokens, heads, dim = dimension(frame, 1, 0), dimension(frame, 1, 1), dimension(frame, 1, 2)
    store_int64(job + ROWS, rows)
    store_int64(job + HEADS, heads)
    store_int64(job + HEAD_DIM, dim)
    kv_heads = np.int64(option(job, PAGE_SHAPE + 2))
    store_int64(job + NUM_BLOCKS, np.int64(option(job, PAGE_SHAPE)))
    store_int64(job + PARTS, np.int64(option(job, PAGE_SHAPE + 1)))
    store_int64(job + KV_HEADS, kv_heads)
    store_int64(job + BLOCK_SIZE, np.int64(option(job, PAGE_SHAPE + 3)))
    store_int64(job + WIDTH, dimension(frame, 4, 1))
    most = max(TILE, min(MOST_ROWS, MOST_NUMBERS // round_up(dim, LINE) // TILE * TILE))
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
    return units, keys * kv_heads * dim * 4 >= MIN_SHARED_BYTES


task, handler = make_kernel(prepare, make_work(attend_unit), job_bytes, scratch_bytes)
