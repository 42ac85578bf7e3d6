"""causal_conv for CPUs in numba: one token after the other. Imported only to compile.

A unit of work is a row of the batch and up to BLOCK channels. Its inputs are converted to float32 in scratch, TOKENS at
a time, after the width - 1 inputs before them. A token's inputs are added oldest first, in a prompt and in a decode. So
the bits of a row depend on its own tokens only.
"""

import numpy as np
from numba import njit

from pallas_kernels.causal_conv import cpu_vectors
from pallas_kernels.causal_conv.cpu import OPTION_KIND, OPTION_SILU, OPTION_STATE_KIND
from pallas_kernels.native import vectors
from pallas_kernels.native.convert import narrow, size_of, widen
from pallas_kernels.native.frame import NATIVE, argument, dimension, make_kernel, make_work, result, words
from pallas_kernels.native.memory import copy_bytes, fill_zeros, load_int32, load_int64, store_int64

LANES = vectors.LANES
ONE = np.float32(1)
BLOCK, TOKENS = 256, 16  # channels and tokens at a time: inputs of 19 KiB with a width of 4
MIN_SHARED_NUMBERS = 65_536  # of the input; below, one thread is faster

# the job's words: the handler's arguments, the result, then sizes
(
    OPTIONS, X, WEIGHT, BIAS, STATES, SLOTS, POSITIONS, STARTS, TARGETS, OUT, ROWS, ALL_TOKENS, CHANNELS, BEFORE,
    NUM_SLOTS, JOB_BYTES,
) = words(15)  # fmt: skip


@njit(inline="always", **NATIVE)
def option(job, index):
    """An int32 of the options."""
    return load_int32(load_int64(job + OPTIONS) + 4 * index)


@njit(inline="always", **NATIVE)
def start_of(job, row):
    """First token of a row. Numbers outside the array are clipped: they would crash the process."""
    return min(max(np.int64(load_int32(load_int64(job + STARTS) + 4 * row)), 0), load_int64(job + ALL_TOKENS))


@njit(**NATIVE)
def scratch_bytes(job):
    """Bytes of a thread's scratch: inputs, and an output."""
    return 4 * BLOCK * (load_int64(job + BEFORE) + TOKENS + 1)


@njit(**NATIVE)
def convolve(job, unit, scratch):
    """Compute one unit."""
    channels, before = load_int64(job + CHANNELS), load_int64(job + BEFORE)
    blocks = (channels + BLOCK - 1) // BLOCK
    row, first = unit // blocks, unit % blocks * BLOCK
    begin, end = start_of(job, row), start_of(job, row + 1)
    if begin >= end:
        return
    count, line = min(BLOCK, channels - first), 4 * BLOCK
    kind, state_kind = option(job, OPTION_KIND), option(job, OPTION_STATE_KIND)
    size, state_size = size_of(kind), size_of(state_kind)
    num_slots, target = load_int64(job + NUM_SLOTS), np.int64(load_int32(load_int64(job + TARGETS) + 4 * row))
    slot = min(max(np.int64(load_int32(load_int64(job + SLOTS) + 4 * row)), 0), num_slots - 1)
    state = load_int64(job + STATES) + (slot * before * channels + first) * state_size
    y = scratch + (before + TOKENS) * line
    if load_int32(load_int64(job + POSITIONS) + 4 * row) == 0:
        fill_zeros(scratch, before * line)
    else:
        for j in range(before):
            widen(state_kind, scratch + j * line, state + j * channels * state_size, count, ONE)
    while begin < end:
        tokens = min(TOKENS, end - begin)
        for i in range(tokens):
            inputs, place = scratch + i * line, ((begin + i) * channels + first) * size
            widen(kind, inputs + before * line, load_int64(job + X) + place, count, ONE)
            cpu_vectors.convolve(
                y, inputs, line, load_int64(job + WEIGHT) + 4 * first, 4 * channels, load_int64(job + BIAS) + 4 * first,
                before + 1, count // LANES,
            )  # fmt: skip
            if option(job, OPTION_SILU) != 0:
                cpu_vectors.silu(y, count // LANES)
            narrow(kind, load_int64(job + OUT) + place, y, count, ONE)
        for j in range(before):  # the last inputs are those before the next token
            copy_bytes(scratch + j * line, scratch + (tokens + j) * line, 4 * count)
        begin += tokens
    if not 0 <= target < num_slots:
        return
    state += (target - slot) * before * channels * state_size
    for j in range(before):
        narrow(state_kind, state + j * channels * state_size, scratch + j * line, count, ONE)


@njit(**NATIVE)
def prepare(frame, job):
    """Write the job's words. Returns the number of units, and whether threads share them."""
    for index in range(9):
        store_int64(job + OPTIONS + 8 * index, argument(frame, index))
    store_int64(job + STATES, result(frame, 1))  # the memory of the argument
    store_int64(job + OUT, result(frame, 0))
    tokens, channels, rows = dimension(frame, 1, 0), dimension(frame, 1, 1), dimension(frame, 5, 0)
    store_int64(job + ROWS, rows)
    store_int64(job + ALL_TOKENS, tokens)
    store_int64(job + CHANNELS, channels)
    store_int64(job + BEFORE, dimension(frame, 2, 0) - 1)
    store_int64(job + NUM_SLOTS, dimension(frame, 4, 0))
    live, line = start_of(job, rows), channels * size_of(option(job, OPTION_KIND))
    fill_zeros(result(frame, 0) + live * line, (tokens - live) * line)  # padding tokens
    return rows * ((channels + BLOCK - 1) // BLOCK), live * channels >= MIN_SHARED_NUMBERS


task, handler = make_kernel(prepare, make_work(convolve), JOB_BYTES, scratch_bytes)
