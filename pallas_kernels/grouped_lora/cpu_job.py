"""The job of a call of grouped_lora on CPU: rows sorted by slot, in groups, and the cursor that prefetches adapters.

An adapter is a few pieces of 4 to 64 KiB, too short for the processor's own prefetching. So a cursor runs AHEAD bytes
before the computation, through the pieces of all groups of a home. A home is the part of the groups that one thread
begins with. Then it helps the other threads.
"""

import numpy as np
from numba import njit

from pallas_kernels.dot import cpu_kernel as dot
from pallas_kernels.grouped_lora import cpu_vectors
from pallas_kernels.native import vectors
from pallas_kernels.native.convert import round_up, size_of
from pallas_kernels.native.frame import ARGUMENTS, NATIVE, words
from pallas_kernels.native.memory import fetch_add, load_int32, load_int64, store_int32, store_int64, thread_limit

TILE, RANKS, LINE = vectors.TILE, cpu_vectors.RANKS, cpu_vectors.LINE
GROUP = 16  # most rows of a group
AHEAD = 4096  # least bytes from the computation to the cursor
MOST_AHEAD = 65_536

(
    KIND, BASE_KIND, POOL_KIND, X, INPUTS, A, B, RANKS_OF, SCALES, PARTS, RANK, PATTERN, SEGMENTS, OUT, OUTPUTS,
    EXPANDS, BLOCKS, GROUPS_AT, HOMES_AT, HOMES, THREADS, PRODUCT_WORDS,
) = words(21)  # fmt: skip
PRODUCT = PRODUCT_WORDS - ARGUMENTS  # where the job of the product with the weights would start: `dot` has its words
JOB_BYTES = PRODUCT + dot.JOB_BYTES
# After the words: a key of each row, slot << 32 | row, sorted. Then the groups, as int32: the first key and the number
# of rows. Then the homes: the next group, and the one after the last.
KEY_BYTES, GROUP_BYTES, HOME_BYTES = 8, 8, 64
FIRST, COUNT = 0, 4  # of a group
NEXT_GROUP, END = 0, 8  # of a home
# The cursor, at the start of a thread's scratch: its group and the one after the last, its piece (a part's A, or B),
# its address, and the bytes of the piece that are left.
AT_GROUP, LAST_GROUP, AT_PIECE, AT, LEFT, CURSOR_BYTES = 0, 8, 16, 24, 32, 64


@njit(inline="always", **NATIVE)
def group_at(job, group):
    """Address of a group."""
    return load_int64(job + GROUPS_AT) + GROUP_BYTES * group


@njit(inline="always", **NATIVE)
def slot_of(job, group):
    """Slot of the rows of a group."""
    return load_int64(job + JOB_BYTES + KEY_BYTES * np.int64(load_int32(group_at(job, group) + FIRST))) >> 32


@njit(inline="always", **NATIVE)
def rank_of(job, slot, part):
    """True rank of an adapter for a part."""
    rank = np.int64(load_int32(load_int64(job + RANKS_OF) + 4 * (slot * load_int64(job + PARTS) + part)))
    return min(max(rank, 0), load_int64(job + RANK))  # a rank out of range would crash the process


@njit(inline="always", **NATIVE)
def largest_rank(job, slot):
    """Largest true rank of an adapter: the rows of B that it needs."""
    most = 0
    for part in range(load_int64(job + PARTS)):
        most = max(most, rank_of(job, slot, part))
    return most


@njit(inline="always", **NATIVE)
def a_of(job, slot, part):
    """Address of A of an adapter's part."""
    line = load_int64(job + INPUTS) * size_of(load_int64(job + POOL_KIND))
    return load_int64(job + A) + (slot * load_int64(job + PARTS) + part) * load_int64(job + RANK) * line


@njit(inline="always", **NATIVE)
def b_of(job, slot):
    """Address of B of an adapter."""
    line = load_int64(job + OUTPUTS) * size_of(load_int64(job + POOL_KIND))
    return load_int64(job + B) + slot * load_int64(job + RANK) * line


@njit(**NATIVE)
def next_piece(job, cursor):
    """Move the cursor to the next piece of its unit. The piece after the last one is empty."""
    group, piece = load_int64(cursor + AT_GROUP), load_int64(cursor + AT_PIECE) + 1
    if piece > load_int64(job + PARTS):
        group, piece = group + 1, 0
    store_int64(cursor + AT_GROUP, group)
    store_int64(cursor + AT_PIECE, piece)
    if group >= load_int64(cursor + LAST_GROUP):
        store_int64(cursor + LEFT, 0)
        return
    slot, size = slot_of(job, group), size_of(load_int64(job + POOL_KIND))
    if piece < load_int64(job + PARTS):
        rank = 0 if load_int64(job + EXPANDS) != 0 else rank_of(job, slot, piece)
        store_int64(cursor + AT, a_of(job, slot, piece))
        store_int64(cursor + LEFT, rank * load_int64(job + INPUTS) * size)
    else:
        store_int64(cursor + AT, b_of(job, slot))
        store_int64(cursor + LEFT, largest_rank(job, slot) * load_int64(job + OUTPUTS) * size)


@njit(**NATIVE)
def advance(job, cursor, size):
    """Move the cursor by `size` bytes, and prefetch them."""
    while size > 0 and load_int64(cursor + AT_GROUP) < load_int64(cursor + LAST_GROUP):
        at, left = load_int64(cursor + AT), load_int64(cursor + LEFT)
        some = min(size, left)
        cpu_vectors.prefetch_lines(at, (some + LINE - 1) // LINE)
        store_int64(cursor + AT, at + some)
        store_int64(cursor + LEFT, left - some)
        size -= some
        if some == left:
            next_piece(job, cursor)


@njit(**NATIVE)
def start_cursor(job, cursor, start, end):
    """Put the cursor before the computation of the groups `start` to `end`."""
    store_int64(cursor + AT_GROUP, start)
    store_int64(cursor + LAST_GROUP, end)
    store_int64(cursor + AT_PIECE, -1)
    next_piece(job, cursor)
    # one row reads RANKS rows of B at a time: the cursor must have passed all of them
    ahead = AHEAD + RANKS * load_int64(job + OUTPUTS) * size_of(load_int64(job + POOL_KIND))
    advance(job, cursor, min(ahead, MOST_AHEAD))


@njit(**NATIVE)
def take(job, cursor, size, otherwise):
    """Move the cursor by `size` bytes, which the caller prefetches. Returns their address.

    At the end of a piece they are prefetched here. Then, and without a cursor, the address is `otherwise`.
    """
    if cursor == 0:
        return otherwise
    at, left = load_int64(cursor + AT), load_int64(cursor + LEFT)
    if size >= left:
        advance(job, cursor, size)
        return otherwise
    store_int64(cursor + AT, at + size)
    store_int64(cursor + LEFT, left - size)
    return at


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
def bytes_of(job, slot):
    """Bytes of an adapter that are read, about."""
    width, total = load_int64(job + INPUTS) + load_int64(job + OUTPUTS) // load_int64(job + PARTS), 0
    for part in range(load_int64(job + PARTS)):
        total += rank_of(job, slot, part) * width
    return total * size_of(load_int64(job + POOL_KIND))


@njit(**NATIVE)
def list_groups(job, count):
    """Store the groups of `count` keys. Returns their number, and the bytes of the adapters that they read."""
    keys, groups, total, slot, first = job + JOB_BYTES, 0, 0, np.int64(-1), 0
    most = min(GROUP, round_up(max(1, count // thread_limit()), TILE))  # each thread has a group
    for index in range(count):
        own = load_int64(keys + KEY_BYTES * index) >> 32
        if own != slot or index - first == most:
            slot, first = own, index
            store_int32(group_at(job, groups) + FIRST, np.int32(index))
            groups += 1
            total += bytes_of(job, slot)
        store_int32(group_at(job, groups - 1) + COUNT, np.int32(index - first + 1))
    return groups, total


@njit(inline="always", **NATIVE)
def home_at(job, home):
    """Address of a home."""
    return load_int64(job + HOMES_AT) + HOME_BYTES * home


@njit(**NATIVE)
def list_homes(job, groups, total, homes):
    """Divide the groups into `homes` homes of about the same bytes."""
    home, before = 0, 0
    store_int64(home_at(job, 0) + NEXT_GROUP, 0)
    for group in range(groups):
        while home + 1 < homes and before * homes >= total * (home + 1):
            store_int64(home_at(job, home) + END, group)
            home += 1
            store_int64(home_at(job, home) + NEXT_GROUP, group)
        before += bytes_of(job, slot_of(job, group))
    while home + 1 < homes:
        store_int64(home_at(job, home) + END, groups)
        home += 1
        store_int64(home_at(job, home) + NEXT_GROUP, groups)
    store_int64(home_at(job, home) + END, groups)


@njit(**NATIVE)
def claim(job, home):
    """The next group of a home for the calling thread. Not below the home's end: there is none left."""
    place = home_at(job, home)
    end = load_int64(place + END)
    return fetch_add(place + NEXT_GROUP, 1) if load_int64(place + NEXT_GROUP) < end else end
