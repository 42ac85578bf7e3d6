"""Exact searches over the vocabulary without sorting it: largest values, thresholds, and the inverse of a CDF.

There are two methods. Two levels: reduce each block of the vocabulary, then search only the blocks that matter.
Bisection: halve the range of float32 bit patterns 31 times, which finds the exact threshold. NVIDIA GPUs instead split
the range into 16 parts, 8 times.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from jpaged.models.layers import row_sum

# Largest block of two-level searches, in ids. `_block` may choose a smaller one that divides the vocabulary.
BLOCK = 512
CANDIDATE_BLOCK = 64  # largest block for `likeliest`
SMALLEST_BLOCK = 32

_INFINITY = 0x7F800000  # bits of float32's infinity


def block_maxima(x: Float[Array, "rows vocab"], block: int = BLOCK) -> Float[Array, "rows blocks"]:
    """The largest value of each block. block: BLOCK or CANDIDATE_BLOCK."""
    return _of_blocks(x, jnp.max, -jnp.inf, block)


def block_maxima_and_nan(
    x: Float[Array, "rows vocab"], logits: Float[Array, "rows vocab"], block: int = BLOCK
) -> tuple[Float[Array, "rows blocks"], Bool[Array, " rows"]]:
    """`block_maxima` of x, and True for rows of logits with a NaN, or with infinities of both signs in one block.

    x: the logits, after masks and penalties. XLA's maximum on CPU ignores a NaN among numbers, but a sum does not.
    `isnan` is slower there, because XLA stores its result: for 64 x 151,936 it takes 14 ms, the sum 2 ms. On an NVIDIA
    GPU one operation computes both, because two would read the logits twice.
    """

    def one_pass(x: Array, logits: Array) -> tuple[Array, Array]:
        both = (_in_blocks(x, -jnp.inf, block), _in_blocks(logits, 0.0, block))
        start = (jnp.float32(-jnp.inf), jnp.float32(0))
        return lax.reduce(both, start, lambda a, b: (jnp.maximum(a[0], b[0]), a[1] + b[1]), (2,))

    def two_passes(x: Array, logits: Array) -> tuple[Array, Array]:
        return block_maxima(x, block), _of_blocks(logits, jnp.sum, 0.0, block)

    maxima, sums = lax.platform_dependent(x, logits, cuda=one_pass, default=two_passes)
    return maxima, jnp.isnan(sums).any(axis=1)


def argmax(
    x: Float[Array, "rows vocab"], block: int = BLOCK, maxima: Float[Array, "rows blocks"] | None = None
) -> tuple[Float[Array, " rows"], Int[Array, " rows"]]:
    """The largest value and its lowest id, from the block with the largest maximum.

    maxima: `block_maxima(x, block)`; None: computed here. `jnp.argmax` takes 13 times as long for 64 x 151,936 on CPU.
    Both results come from the winning block, because a second use of x is costly. An H200 would store all of x (665
    instead of 534 MB for 256 x 128,256), and a CPU would compute it twice.
    """
    winner = jnp.argmax(block_maxima(x, block) if maxima is None else maxima, axis=1)
    inside = _take_blocks(x, winner[:, None], block)[:, 0]
    ids = winner * inside.shape[1] + jnp.argmax(inside, axis=1)
    ids = jnp.minimum(ids, x.shape[1] - 1)  # if all values are -inf, the index may be in the padding
    return inside.max(axis=1), ids.astype(jnp.int32)


def likeliest(
    x: Float[Array, "rows vocab"], count: int, maxima: Float[Array, "rows blocks"] | None = None
) -> tuple[Float[Array, "rows count"], Int[Array, "rows count"]]:
    """The `count` largest values and their ids, like `lax.top_k`. Equal values are in the order of their ids.

    Reads only the blocks with the largest maxima. maxima: `block_maxima(x, CANDIDATE_BLOCK)`; None: computed here.
    """
    rows, vocab = x.shape
    block = _block(vocab, CANDIDATE_BLOCK)
    if vocab <= 2 * count * block or vocab % block:
        values, ids = lax.top_k(x, count)
        return values, ids.astype(jnp.int32)
    _, chosen = lax.top_k(block_maxima(x, CANDIDATE_BLOCK) if maxima is None else maxima, count)
    chosen = jnp.sort(chosen, axis=1)  # so that equal values stay in the order of their ids
    inside = _take_blocks(x, chosen, CANDIDATE_BLOCK).reshape(rows, -1)
    values, places = lax.top_k(inside, count)
    ids = jnp.take_along_axis(chosen, places // block, axis=1) * block + places % block
    return values, ids.astype(jnp.int32)


def row_sums(x: Num[Array, "*lead n"], *, fixed: bool) -> Num[Array, "*lead"]:
    """Sums over the last axis. fixed: add in the same order in every program (`SamplerOptions.fixed_sums`)."""
    return row_sum(x) if fixed else x.sum(axis=-1)


def invert_cdf(
    weights: Float[Array, "rows vocab"], uniform: Float[Array, " rows"], *, fixed: bool = False
) -> Int[Array, " rows"]:
    """The first id whose running sum of weights exceeds uniform * total. Finds the block, then the id in it."""
    blocked = _in_blocks(weights, 0.0)
    blocks, size = blocked.shape[1:]
    ends = jnp.cumsum(row_sums(blocked, fixed=fixed), axis=1)
    target = uniform * ends[:, -1]
    block = jnp.minimum(jnp.sum(ends <= target[:, None], axis=1), blocks - 1)
    # Rounding may select an empty block at the end. Then use the last block that has weight.
    filled = (ends > 0) & (jnp.diff(ends, axis=1, prepend=0.0) > 0)
    last_filled = blocks - 1 - jnp.argmax(filled[:, ::-1], axis=1)
    block = jnp.minimum(block, last_filled)
    before = jnp.where(block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    inside = jnp.take_along_axis(blocked, block[:, None, None], axis=1)[:, 0]
    running = jnp.cumsum(inside, axis=1)
    place = jnp.sum(running <= (target - before)[:, None], axis=1)
    last = size - 1 - jnp.argmax(inside[:, ::-1] > 0, axis=1)
    first = jnp.argmax(inside > 0, axis=1)
    return (block * size + jnp.clip(place, first, last)).astype(jnp.int32)


def kth_largest(x: Float[Array, "rows vocab"], top_k: Int[Array, " rows"]) -> Float[Array, " rows"]:
    """The top_k-th largest value of each row, by bisection. x: <= 0. top_k: 0 = all ids."""
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, x.shape[1]), x.shape[1])
    return -smallest_bound(-x, jnp.ones(x.shape, jnp.int32), wanted)


def top_p_edge(
    x: Float[Array, "rows vocab"], threshold: Float[Array, " rows"], top_p: Float[Array, " rows"], *,
    fixed: bool = False,
) -> Float[Array, " rows"]:  # fmt: skip
    """The smallest value that top_p keeps, by bisection. Only values of x >= threshold count. x: <= 0."""
    weights = jnp.where(x >= threshold[:, None], jnp.exp(x), 0.0)
    edge = -smallest_bound(-x, weights, top_p * row_sums(weights, fixed=fixed), fixed=fixed)
    # with top_p = 1, rounding of the sums must not drop an id
    return jnp.where(top_p < 1, jnp.maximum(edge, threshold), threshold)


def typical_range(
    x: Float[Array, "rows n"], kept: Bool[Array, "rows n"], typical_p: Float[Array, " rows"], *,
    bisect: bool = False, fixed: bool = False,
) -> tuple[Float[Array, " rows"], Float[Array, " rows"]]:  # fmt: skip
    """Locally typical sampling (Meister et al. 2022). Returns (centre, reach): keep x with |x - centre| <= reach.

    These are the fewest ids, nearest in surprise to the entropy, with typical_p of the mass. bisect: without a sort.
    """
    weights = jnp.where(kept, jnp.exp(x), 0.0)
    total = row_sums(weights, fixed=fixed)
    # The surprise, log(total) - x, equals the entropy where x equals the mean of x.
    centre = row_sums(jnp.where(weights > 0, weights * x, 0.0), fixed=fixed) / total  # -inf has weight 0
    distance = jnp.where(kept, jnp.abs(x - centre[:, None]), jnp.inf)
    wanted = typical_p * total
    if bisect:
        return centre, smallest_bound(distance, weights, wanted, fixed=fixed)
    order = jnp.argsort(distance, axis=1)
    reached = jnp.cumsum(jnp.take_along_axis(weights, order, axis=1), axis=1) >= wanted[:, None]
    at = jnp.where(reached[:, -1], jnp.argmax(reached, axis=1), jnp.sum(kept, axis=1) - 1)
    return centre, jnp.take_along_axis(distance, jnp.take_along_axis(order, at[:, None], axis=1), axis=1)[:, 0]


def smallest_bound(
    x: Float[Array, "rows n"], weights: Num[Array, "rows n"], wanted: Num[Array, " rows"], *, fixed: bool = False
) -> Float[Array, " rows"]:
    """The smallest b in x, which is >= 0, such that the weights of entries <= b sum to `wanted` or more.

    Infinity if all weights sum to less. weights: >= 0, in the dtype of `wanted`.
    """
    # An NVIDIA GPU reads x and weights 8 times instead of 31: 46 kernels instead of 161. CPUs and TPUs get slower.
    halves = functools.partial(bound_by_halves, fixed=fixed)
    return lax.platform_dependent(x, weights, wanted, cuda=bound_by_sixteenths, default=halves)


def bound_by_halves(
    x: Float[Array, "rows n"], weights: Num[Array, "rows n"], wanted: Num[Array, " rows"], *, fixed: bool = False
) -> Float[Array, " rows"]:
    """`smallest_bound` by 31 halvings of the bit patterns from 0 to infinity: they rise with a float's value."""
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)  # abs: -0.0 becomes 0.0

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        ok = row_sums(jnp.where(bits <= middle[:, None], weights, 0), fixed=fixed) >= wanted
        return jnp.where(ok, low, middle + 1), jnp.where(ok, middle, high)

    rows = x.shape[0]
    infinity = jnp.full(rows, _INFINITY, jnp.int32)
    _, bound = lax.fori_loop(0, 31, halve, (jnp.zeros(rows, jnp.int32), infinity))
    return lax.bitcast_convert_type(bound, jnp.float32)


def bound_by_sixteenths(
    x: Float[Array, "rows n"], weights: Num[Array, "rows n"], wanted: Num[Array, " rows"]
) -> Float[Array, " rows"]:
    """`smallest_bound`, four bits an iteration, highest first. One reduction computes the sums for 15 bounds."""
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.uint32)
    zero = jnp.zeros((), weights.dtype)

    def add(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(a + b for a, b in zip(left, right, strict=True))

    def cut(turn: Array, low: Array) -> Array:
        size = jnp.uint32(1) << (28 - 4 * turn).astype(jnp.uint32)
        ends = [jnp.minimum(low + part * size - 1, jnp.uint32(_INFINITY)) for part in range(1, 16)]
        terms = tuple(jnp.where(bits <= end[:, None], weights, zero) for end in ends)
        sums = lax.reduce(terms, (zero,) * 15, add, (1,))
        return low + size * jnp.sum(jnp.stack(sums) < wanted, axis=0, dtype=jnp.uint32)

    bound = lax.fori_loop(0, 8, cut, jnp.zeros(x.shape[0], jnp.uint32))
    return lax.bitcast_convert_type(jnp.minimum(bound, _INFINITY), jnp.float32)


def _take_blocks(
    x: Float[Array, "rows vocab"], chosen: Int[Array, "rows n"], largest: int
) -> Float[Array, "rows n block"]:
    """The blocks of each row with the numbers `chosen`. largest: BLOCK or CANDIDATE_BLOCK."""
    rows, vocab = x.shape
    block = _block(vocab, largest)

    def from_blocks(x: Array, chosen: Array) -> Array:
        return jnp.take_along_axis(_in_blocks(x, -jnp.inf, largest), chosen[:, :, None], axis=1)

    def from_lines(x: Array, chosen: Array) -> Array:
        lines = _lines(x).reshape(-1, 128)
        first = chosen * block // 128  # index of a block's first line in its row
        line = first[:, :, None] + jnp.arange(max(1, block // 128))
        row = jnp.arange(rows)[:, None, None]
        taken = jnp.take(lines, (row // 8 * (vocab // 128) + line) * 8 + row % 8, axis=0, mode="clip")
        if block >= 128:
            return taken.reshape(*chosen.shape, block)
        parts = taken.reshape(*chosen.shape, 128 // block, block)
        wanted = chosen[:, :, None] % (128 // block) == jnp.arange(128 // block)
        return jnp.where(wanted[..., None], parts, -jnp.inf).max(axis=2)

    if not _has_lines(x):
        return from_blocks(x, chosen)
    # A reshape to blocks copies all logits on TPU: 155 MB read and 311 MB written for 256 x 151,936.
    return lax.platform_dependent(x, chosen, tpu=from_lines, default=from_blocks)


def _of_blocks(
    x: Float[Array, "rows vocab"], reduce: Callable[..., Array], fill: float, largest: int
) -> Float[Array, "rows blocks"]:
    """One value for each block of a row. reduce: jnp.max or jnp.sum; fill: its neutral value."""
    rows, vocab = x.shape
    block = _block(vocab, largest)

    def by_blocks(x: Array) -> Array:
        return reduce(_in_blocks(x, fill, largest), axis=2)

    def by_lines(x: Array) -> Array:
        lines = _lines(x)
        if block >= 128:
            values = reduce(lines, axis=3).reshape(rows // 8, vocab // block, block // 128, 8)
            return reduce(values, axis=2).swapaxes(1, 2).reshape(rows, -1)
        part = jnp.arange(128) // block
        parts = [reduce(jnp.where(part == i, lines, fill), axis=3) for i in range(128 // block)]
        return jnp.stack(parts, axis=-1).swapaxes(1, 2).reshape(rows, -1)

    if not _has_lines(x):
        return by_blocks(x)
    # Here the copy reads and writes 155 MB for 256 x 151,936.
    return lax.platform_dependent(x, tpu=by_lines, default=by_blocks)


def _has_lines(x: Float[Array, "rows vocab"]) -> bool:
    """True if x consists of whole TPU memory tiles: 8 rows x 128 ids."""
    return x.shape[0] % 8 == 0 and x.shape[1] % 128 == 0


def _lines(x: Float[Array, "rows vocab"]) -> Float[Array, "tiles_of_rows lines 8 128"]:
    """x in the order of a TPU's memory: 128 ids of 8 rows, then the next 128 ids of these rows."""
    return x.reshape(x.shape[0] // 8, 8, x.shape[1] // 128, 128).swapaxes(1, 2)


def _block(vocab: int, largest: int = BLOCK) -> int:
    """Ids per block: the largest power of two that divides the vocabulary, because padding would copy the logits."""
    divisor = min(largest, vocab & -vocab)
    return divisor if divisor >= SMALLEST_BLOCK else largest


def _in_blocks(x: Float[Array, "rows vocab"], fill: float, largest: int = BLOCK) -> Float[Array, "rows blocks block"]:
    rows, vocab = x.shape
    block = _block(vocab, largest)
    count = -(-vocab // block)
    if count * block > vocab:
        x = jnp.pad(x, ((0, 0), (0, count * block - vocab)), constant_values=fill)
    return x.reshape(rows, count, block)
