"""write_qkv for CPUs in numba: bias, norm, rotary embedding and the write, in one pass. Imported only to compile.

A unit of work is 8 tokens with all their heads. A head is computed in float32, and rounded where the reference rounds.
"""

import math

import numpy as np
from numba import njit

from pallas_kernels.native import vectors
from pallas_kernels.native.convert import narrow, round_up, size_of, widen
from pallas_kernels.native.frame import NATIVE, argument, dimension, make_kernel, make_work, result, words
from pallas_kernels.native.kinds import FLOAT32
from pallas_kernels.native.memory import (
    fill_zeros,
    load_float32,
    load_int32,
    load_int64,
    store_float32,
    store_int64,
)
from pallas_kernels.write_kv.cpu import BIAS, EPS, FLAGS, KIND, NORM, PAGE_KIND, ROPE

LANES, ONE = vectors.LANES, vectors.ONE
UNIT = 8  # tokens
MIN_SHARED_NUMBERS = 131_072  # below, one thread is faster

# the job's words, in the order of the handler's arguments, then the results and sizes
(
    OPTIONS, QKV, SLOTS, BIASES, COS, SIN, Q_NORM, K_NORM, PAGES_IN, Q, PAGES,
    TOKENS, KV_HEADS, ROWS_A_HEAD, HEAD_DIM, HALF, NUM_SLOTS, BLOCK_SIZE, JOB_BYTES,
) = words(18)  # fmt: skip


@njit(inline="always", **NATIVE)
def option(job, index):
    """An int32 of the options."""
    return load_int32(load_int64(job + OPTIONS) + 4 * index)


@njit(**NATIVE)
def scratch_bytes(job):
    """Bytes of a thread's scratch: two rows and a vector."""
    return 4 * (2 * round_up(load_int64(job + HEAD_DIM), LANES) + LANES)


@njit(**NATIVE)
def round_row(kind, row, other, count):
    """Round float32 numbers to another type, in place. other: scratch."""
    if kind != FLOAT32:
        narrow(kind, other, row, count, ONE)
        widen(kind, row, other, count, ONE)


@njit(**NATIVE)
def rotate(row, cos, sin, half):
    """Rotary embedding, in place."""
    if half % LANES == 0:
        vectors.rotate(row, cos, sin, half // LANES)
        return
    for i in range(half):
        x, y = load_float32(row + 4 * i), load_float32(row + 4 * (half + i))
        c, s = load_float32(cos + 4 * i), load_float32(sin + 4 * i)
        store_float32(row + 4 * i, x * c - y * s)
        store_float32(row + 4 * (half + i), y * c + x * s)


@njit(**NATIVE)
def finish(job, token, head, lane, row, other):
    """Compute one row in float32: a query of the KV head, its key, or its value. other: scratch."""
    dim, lanes = load_int64(job + HEAD_DIM), load_int64(job + ROWS_A_HEAD)
    flags, kind = option(job, FLAGS), option(job, KIND)
    chunks = round_up(dim, LANES) // LANES
    line = (token * load_int64(job + KV_HEADS) + head) * lanes + lane
    widen(kind, row, load_int64(job + QKV) + line * dim * size_of(kind), dim, ONE)
    if flags & BIAS != 0:
        widen(FLOAT32, other, load_int64(job + BIASES) + (head * lanes + lane) * dim * 4, dim, ONE)
        vectors.add_rows(row, other, chunks)
        round_row(kind, row, other, dim)
    if lane == lanes - 1:
        return
    if flags & NORM != 0:
        vectors.sum_squares(other, row, chunks)
        eps = load_float32(load_int64(job + OPTIONS) + 4 * EPS)
        factor = ONE / np.float32(math.sqrt(load_float32(other) / np.float32(dim) + eps))
        narrow(kind, other, row, dim, factor)
        widen(kind, row, other, dim, ONE)
        weights = load_int64(job + Q_NORM) if lane < lanes - 2 else load_int64(job + K_NORM)
        widen(kind, other, weights, dim, ONE)
        vectors.multiply_rows(row, other, chunks)
        round_row(kind, row, other, dim)
    if flags & ROPE != 0:
        half = load_int64(job + HALF)
        rotate(row, load_int64(job + COS) + 4 * token * half, load_int64(job + SIN) + 4 * token * half, half)


@njit(**NATIVE)
def write_token(job, token, scratch):
    """Compute and store all rows of a token."""
    dim, lanes, heads = load_int64(job + HEAD_DIM), load_int64(job + ROWS_A_HEAD), load_int64(job + KV_HEADS)
    kind, page_kind, size = option(job, KIND), option(job, PAGE_KIND), load_int64(job + BLOCK_SIZE)
    row, other = scratch, scratch + 4 * round_up(dim, LANES)
    q = load_int64(job + Q) + token * heads * (lanes - 2) * dim * size_of(kind)
    slot = np.int64(load_int32(load_int64(job + SLOTS) + 4 * token))
    if slot < 0:
        fill_zeros(q, heads * (lanes - 2) * dim * size_of(kind))
        return
    block = slot // size
    for head in range(heads):
        for lane in range(lanes):
            finish(job, token, head, lane, row, other)
            if lane < lanes - 2:
                narrow(kind, q + (head * (lanes - 2) + lane) * dim * size_of(kind), row, dim, ONE)
            elif slot < load_int64(job + NUM_SLOTS):
                if kind != page_kind:
                    round_row(kind, row, other, dim)
                line = ((block * 2 + lane - (lanes - 2)) * heads + head) * size + slot - block * size
                narrow(page_kind, load_int64(job + PAGES) + line * dim * size_of(page_kind), row, dim, ONE)


@njit(**NATIVE)
def write_tokens(job, unit, scratch):
    """Compute one unit: up to UNIT tokens."""
    for token in range(unit * UNIT, min((unit + 1) * UNIT, load_int64(job + TOKENS))):
        write_token(job, token, scratch)


@njit(**NATIVE)
def prepare(frame, job):
    """Write the job's words. Returns the number of units, and whether threads share them."""
    for i in range(9):
        store_int64(job + OPTIONS + 8 * i, argument(frame, i))
    store_int64(job + Q, result(frame, 0))
    store_int64(job + PAGES, result(frame, 1))
    tokens, heads, lanes, dim = (
        dimension(frame, 1, 0), dimension(frame, 1, 1), dimension(frame, 1, 2), dimension(frame, 1, 3)
    )
    store_int64(job + TOKENS, tokens)
    store_int64(job + KV_HEADS, heads)
    store_int64(job + ROWS_A_HEAD, lanes)
    store_int64(job + HEAD_DIM, dim)
    store_int64(job + HALF, dimension(frame, 4, 1))
    # a page may be several pages of these heads (`KVPages.whole`)
    numbers = dimension(frame, 8, 0) * dimension(frame, 8, 2) * dimension(frame, 8, 3) * dimension(frame, 8, 4)
    store_int64(job + NUM_SLOTS, numbers // (heads * dim))
    store_int64(job + BLOCK_SIZE, dimension(frame, 8, 3))
    return (tokens + UNIT - 1) // UNIT, tokens * heads * lanes * dim >= MIN_SHARED_NUMBERS


task, handler = make_kernel(prepare, make_work(write_tokens), JOB_BYTES, scratch_bytes)
