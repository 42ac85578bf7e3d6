"""state_scan for CPUs in numba: one token after the other. Imported only to compile.

A unit of work is a row of the batch, a head, and a block of the state's columns. Columns do not depend on each other,
so a unit computes all tokens of its row. A token has the same order of operations in a prompt and in a decode. So the
bits of a row depend on its own tokens only, not on the chunk, the batch or the number of threads.

A row with several tokens copies its block to scratch: rows of a state are often 512 bytes apart, and such columns use
half of the L1 cache. So does a row whose new state has another slot, or none.
"""

import numpy as np
from numba import njit

from pallas_kernels.native import vectors
from pallas_kernels.native.convert import narrow, size_of, widen
from pallas_kernels.native.frame import NATIVE, argument, dimension, make_kernel, make_work, result, words
from pallas_kernels.native.memory import (
    copy_bytes,
    fill_zeros,
    load_float32,
    load_int32,
    load_int64,
    store_int64,
)
from pallas_kernels.state_scan import cpu_vectors
from pallas_kernels.state_scan.call import EPS
from pallas_kernels.state_scan.cpu import OPTION_CHANNELS, OPTION_DELTA, OPTION_KIND, OPTION_SCALE

LANES, VECTOR = vectors.LANES, vectors.VECTOR
EPSILON, ONE = np.float32(EPS), np.float32(1)
MIN_SHARED_NUMBERS = 65_536  # of the states that are read, times tokens; below, one thread is faster

# the job's words: the handler's arguments, the result, then sizes
(
    OPTIONS, Q, K, V, DECAY, FACTOR, SKIP, STATES, SLOTS, POSITIONS, STARTS, TARGETS, OUT,
    ROWS, TOKENS, HEADS, K_HEADS, K_DIM, V_DIM, NUM_SLOTS, WIDTH, JOB_BYTES,
) = words(21)  # fmt: skip


@njit(inline="always", **NATIVE)
def option(job, index):
    """An int32 of the options."""
    return load_int32(load_int64(job + OPTIONS) + 4 * index)


@njit(inline="always", **NATIVE)
def start_of(job, row):
    """First token of a row. Numbers outside the array are clipped: they would crash the process."""
    return min(max(np.int64(load_int32(load_int64(job + STARTS) + 4 * row)), 0), load_int64(job + TOKENS))


@njit(**NATIVE)
def scratch_bytes(job):
    """Bytes of a thread's scratch: q, k, `kept` and `faded`, a block of v, and a block of the state."""
    k_dim, block = load_int64(job + K_DIM), load_int64(job + WIDTH) * LANES
    return 4 * (4 * k_dim + block + k_dim * block)


@njit(**NATIVE)
def step(is_delta, width, state, line, q, k, v, k_dim, decay, factor, scale, skip):
    """One token of a block of columns: see `cpu_vectors`."""
    if is_delta:
        if width == 4:
            cpu_vectors.delta_4(state, line, q, k, v, k_dim, decay, factor, scale, skip)
        elif width == 2:
            cpu_vectors.delta_2(state, line, q, k, v, k_dim, decay, factor, scale, skip)
        else:
            cpu_vectors.delta_1(state, line, q, k, v, k_dim, decay, factor, scale, skip)
    elif width == 4:
        cpu_vectors.add_4(state, line, q, k, v, k_dim, decay, factor, scale, skip)
    elif width == 2:
        cpu_vectors.add_2(state, line, q, k, v, k_dim, decay, factor, scale, skip)
    else:
        cpu_vectors.add_1(state, line, q, k, v, k_dim, decay, factor, scale, skip)


@njit(**NATIVE)
def step_by_channel(width, state, line, q, k, v, k_dim, faded, kept, factor, scale, skip):
    """The same with a decay for each row of the state."""
    if width == 4:
        cpu_vectors.channels_4(state, line, q, k, v, k_dim, faded, kept, factor, scale, skip)
    elif width == 2:
        cpu_vectors.channels_2(state, line, q, k, v, k_dim, faded, kept, factor, scale, skip)
    else:
        cpu_vectors.channels_1(state, line, q, k, v, k_dim, faded, kept, factor, scale, skip)


@njit(**NATIVE)
def scan(job, unit, scratch):
    """Compute one unit."""
    heads, k_heads, k_dim = load_int64(job + HEADS), load_int64(job + K_HEADS), load_int64(job + K_DIM)
    v_dim, width = load_int64(job + V_DIM), load_int64(job + WIDTH)
    block = width * LANES
    blocks = v_dim // block
    row, head, first = unit // (heads * blocks), unit // blocks % heads, unit % blocks * block
    begin, end = start_of(job, row), start_of(job, row + 1)
    if begin >= end:
        return
    num_slots, target = load_int64(job + NUM_SLOTS), np.int64(load_int32(load_int64(job + TARGETS) + 4 * row))
    slot = min(max(np.int64(load_int32(load_int64(job + SLOTS) + 4 * row)), 0), num_slots - 1)
    stored, line = load_int64(job + STATES) + 4 * ((slot * heads + head) * k_dim * v_dim + first), 4 * v_dim
    q, k = scratch, scratch + 4 * k_dim
    kept, faded = k + 4 * k_dim, k + 8 * k_dim
    v = faded + 4 * k_dim
    state, state_line = stored, line
    if end - begin > 1 or target != slot:
        state, state_line = v + 4 * block, 4 * block
    is_new = load_int32(load_int64(job + POSITIONS) + 4 * row) == 0
    if is_new or state != stored:
        for i in range(k_dim):
            if is_new:
                fill_zeros(state + i * state_line, 4 * block)
            else:
                copy_bytes(state + i * state_line, stored + i * line, 4 * block)
    kind, is_delta = option(job, OPTION_KIND), option(job, OPTION_DELTA) != 0
    by_channel = option(job, OPTION_CHANNELS) != 0
    size, scale = size_of(kind), load_float32(load_int64(job + OPTIONS) + 4 * OPTION_SCALE)
    skip = load_float32(load_int64(job + SKIP) + 4 * head)
    for t in range(begin, end):
        place = (t * k_heads + head // (heads // k_heads)) * k_dim * size
        widen(kind, q, load_int64(job + Q) + place, k_dim, ONE)
        widen(kind, k, load_int64(job + K) + place, k_dim, ONE)
        if is_delta:
            cpu_vectors.l2_norm(q, k_dim // LANES, EPSILON)
            cpu_vectors.l2_norm(k, k_dim // LANES, EPSILON)
        place = ((t * heads + head) * v_dim + first) * size
        widen(kind, v, load_int64(job + V) + place, block, ONE)
        factor = load_float32(load_int64(job + FACTOR) + 4 * (t * heads + head))
        decays = load_int64(job + DECAY)
        if by_channel:
            cpu_vectors.fade(decays + 4 * (t * heads + head) * k_dim, k, kept, faded, k_dim // LANES)
            step_by_channel(width, state, state_line, q, k, v, k_dim, faded, kept, factor, scale, skip)
        else:
            decay = load_float32(decays + 4 * (t * heads + head))
            step(is_delta, width, state, state_line, q, k, v, k_dim, decay, factor, scale, skip)
        narrow(kind, load_int64(job + OUT) + place, v, block, ONE)
    if state != stored and 0 <= target < num_slots:
        stored += 4 * (target - slot) * heads * k_dim * v_dim
        for i in range(k_dim):
            copy_bytes(stored + i * line, state + i * state_line, 4 * block)


@njit(**NATIVE)
def prepare(frame, job):
    """Write the job's words. Returns the number of units, and whether threads share them."""
    for index in range(12):
        store_int64(job + OPTIONS + 8 * index, argument(frame, index))
    store_int64(job + STATES, result(frame, 1))  # the memory of the argument
    store_int64(job + OUT, result(frame, 0))
    tokens, heads, v_dim = dimension(frame, 3, 0), dimension(frame, 3, 1), dimension(frame, 3, 2)
    rows, k_dim = dimension(frame, 8, 0), dimension(frame, 2, 2)
    vectors_each = v_dim // LANES
    width = 4 if vectors_each % 4 == 0 else 2 if vectors_each % 2 == 0 else 1
    store_int64(job + ROWS, rows)
    store_int64(job + TOKENS, tokens)
    store_int64(job + HEADS, heads)
    store_int64(job + K_HEADS, dimension(frame, 2, 1))
    store_int64(job + K_DIM, k_dim)
    store_int64(job + V_DIM, v_dim)
    store_int64(job + NUM_SLOTS, dimension(frame, 7, 0))
    store_int64(job + WIDTH, width)
    live, line = start_of(job, rows), heads * v_dim * size_of(option(job, OPTION_KIND))
    fill_zeros(result(frame, 0) + live * line, (tokens - live) * line)  # padding tokens
    return rows * heads * (vectors_each // width), live * heads * k_dim * v_dim >= MIN_SHARED_NUMBERS


task, handler = make_kernel(prepare, make_work(scan), JOB_BYTES, scratch_bytes)
