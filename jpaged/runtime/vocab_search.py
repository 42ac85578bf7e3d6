"""Exact searches over the vocabulary without sorting it: largest values, thresholds, and the inverse of a CDF.

Two methods. In two levels: reduce blocks of the vocabulary first, then look into the blocks that matter. By bisection:
halve the range of float32 bit patterns 31 times, which finds a threshold itself and not an approximation.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# Largest block of the two-level searches; a smaller one if it divides the vocabulary.
BLOCK = 512
CANDIDATE_BLOCK = 64  # of the search for the likeliest ids
SMALLEST_BLOCK = 32


def block_maxima(x: Float[Array, "rows vocab"], block: int = BLOCK) -> Float[Array, "rows blocks"]:
    """The largest value of each block. block: BLOCK or CANDIDATE_BLOCK."""
    return _in_blocks(x, -jnp.inf, block).max(axis=2)


def block_maxima_and_nan(
    x: Float[Array, "rows vocab"], logits: Float[Array, "rows vocab"], block: int = BLOCK
) -> tuple[Float[Array, "rows blocks"], Bool[Array, " rows"]]:
    """`block_maxima` of x, and whether a row of logits has a NaN, or infinities of both signs in one block.

    x: the logits, after masks and penalties. XLA's maximum on CPU ignores a NaN next to numbers, and a sum does not.
    `isnan` stores its result there: for 64 x 151,936 it takes 14 ms, the sum 2 ms.

    On an NVIDIA card one operation computes both: as two they read the logits twice.
    """

    def one_pass(x: Array, logits: Array) -> tuple[Array, Array]:
        both = (_in_blocks(x, -jnp.inf, block), _in_blocks(logits, 0.0, block))
        start = (jnp.float32(-jnp.inf), jnp.float32(0))
        return lax.reduce(both, start, lambda a, b: (jnp.maximum(a[0], b[0]), a[1] + b[1]), (2,))

    def two_passes(x: Array, logits: Array) -> tuple[Array, Array]:
        return block_maxima(x, block), _in_blocks(logits, 0.0, block).sum(axis=2)

    maxima, sums = lax.platform_dependent(x, logits, cuda=one_pass, default=two_passes)
    return maxima, jnp.isnan(sums).any(axis=1)


def argmax(
    x: Float[Array, "rows vocab"], block: int = BLOCK, maxima: Float[Array, "rows blocks"] | None = None
) -> tuple[Float[Array, " rows"], Int[Array, " rows"]]:
    """The largest value, and the lowest id that has it: the winning block, then the index in it.

    maxima: `block_maxima(x, block)`; None: computed here.

    `jnp.argmax` takes 13 times as long for 64 x 151,936 on CPU. Both results come from the winning block. A second use
    of x would store all of it on an H200 (665 instead of 534 MB for 256 x 128,256), or compute it twice on CPU.
    """
    blocks = _in_blocks(x, -jnp.inf, block)
    winner = jnp.argmax(blocks.max(axis=2) if maxima is None else maxima, axis=1)
    inside = jnp.take_along_axis(blocks, winner[:, None, None], axis=1)[:, 0]
    ids = winner * blocks.shape[2] + jnp.argmax(inside, axis=1)
    ids = jnp.minimum(ids, x.shape[1] - 1)  # if all are -inf, the argmax may be in the padding
    return inside.max(axis=1), ids.astype(jnp.int32)


def likeliest(
    x: Float[Array, "rows vocab"], count: int, maxima: Float[Array, "rows blocks"] | None = None
) -> tuple[Float[Array, "rows count"], Int[Array, "rows count"]]:
    """The `count` largest values and their ids, like `lax.top_k`; equal values in the order of their ids.

    Reads only the blocks with the largest maxima. maxima: `block_maxima(x, CANDIDATE_BLOCK)`; None: computed here.
    """
    blocks = _in_blocks(x, -jnp.inf, CANDIDATE_BLOCK)
    rows, num_blocks, block = blocks.shape
    if num_blocks <= 2 * count or x.shape[1] % block:
        values, ids = lax.top_k(x, count)
        return values, ids.astype(jnp.int32)
    _, chosen = lax.top_k(blocks.max(axis=2) if maxima is None else maxima, count)
    chosen = jnp.sort(chosen, axis=1)  # so that equal values stay in the order of their ids
    inside = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(rows, -1)
    values, places = lax.top_k(inside, count)
    ids = jnp.take_along_axis(chosen, places // block, axis=1) * block + places % block
    return values, ids.astype(jnp.int32)


def invert_cdf(weights: Float[Array, "rows vocab"], uniform: Float[Array, " rows"]) -> Int[Array, " rows"]:
    """The first id at which the running sum of weights exceeds uniform * their total: by blocks, then inside one."""
    blocked = _in_blocks(weights, 0.0)
    blocks, size = blocked.shape[1:]
    ends = jnp.cumsum(blocked.sum(axis=2), axis=1)
    target = uniform * ends[:, -1]
    block = jnp.minimum(jnp.sum(ends <= target[:, None], axis=1), blocks - 1)
    # Rounding may select an empty block at the very end. Use the last block with weight instead.
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
    """The k-th largest value of each row, by bisection. x <= 0; top_k 0 = all."""
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, x.shape[1]), x.shape[1])
    return -smallest_bound(-x, lambda kept: jnp.sum(kept, axis=1, dtype=jnp.int32) >= wanted)


def top_p_edge(
    x: Float[Array, "rows vocab"], threshold: Float[Array, " rows"], top_p: Float[Array, " rows"]
) -> Float[Array, " rows"]:
    """The smallest value that top_p keeps, among values x <= 0 at the threshold or above; by bisection."""
    weights = jnp.where(x >= threshold[:, None], jnp.exp(x), 0.0)
    mass = top_p * weights.sum(axis=1)
    edge = -smallest_bound(-x, lambda kept: jnp.sum(jnp.where(kept, weights, 0.0), axis=1) >= mass)
    # with top_p = 1, rounding of the sums must not drop an id
    return jnp.where(top_p < 1, jnp.maximum(edge, threshold), threshold)


def typical_range(
    x: Float[Array, "rows n"], kept: Bool[Array, "rows n"], typical_p: Float[Array, " rows"], *, bisect: bool = False
) -> tuple[Float[Array, " rows"], Float[Array, " rows"]]:
    """Locally typical sampling (Meister et al. 2022): the centre and the reach of the values of x that stay.

    These are the fewest ids whose surprise is nearest to the entropy and that together have typical_p of the mass.
    bisect: find the reach by bisection instead of a sort.
    """
    weights = jnp.where(kept, jnp.exp(x), 0.0)
    total = weights.sum(axis=1)
    # The surprise log(total) - x equals the entropy where x equals its own mean.
    centre = jnp.sum(jnp.where(weights > 0, weights * x, 0.0), axis=1) / total  # -inf has no weight
    distance = jnp.where(kept, jnp.abs(x - centre[:, None]), jnp.inf)
    wanted = typical_p * total
    if bisect:
        reach = smallest_bound(distance, lambda near: jnp.sum(jnp.where(near, weights, 0.0), axis=1) >= wanted)
        return centre, reach
    order = jnp.argsort(distance, axis=1)
    reached = jnp.cumsum(jnp.take_along_axis(weights, order, axis=1), axis=1) >= wanted[:, None]
    at = jnp.where(reached[:, -1], jnp.argmax(reached, axis=1), jnp.sum(kept, axis=1) - 1)
    return centre, jnp.take_along_axis(distance, jnp.take_along_axis(order, at[:, None], axis=1), axis=1)[:, 0]


def smallest_bound(
    x: Float[Array, "rows n"], enough: Callable[[Bool[Array, "rows n"]], Bool[Array, " rows"]]
) -> Float[Array, " rows"]:
    """The smallest value of x >= 0 such that the entries up to it are `enough`; infinity if all of them are not.

    Bisection: the bits of a non-negative float32 rise with its value, so 31 halvings of the integers from 0 to infinity
    find it exactly.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)  # abs: -0.0 becomes 0.0

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        ok = enough(bits <= middle[:, None])
        return jnp.where(ok, low, middle + 1), jnp.where(ok, middle, high)

    rows = x.shape[0]
    infinity = jnp.full(rows, 0x7F800000, jnp.int32)
    _, bound = lax.fori_loop(0, 31, halve, (jnp.zeros(rows, jnp.int32), infinity))
    return lax.bitcast_convert_type(bound, jnp.float32)


def _block(vocab: int, largest: int = BLOCK) -> int:
    """Entries of a block: the largest power of two that divides the vocabulary. Padding would copy the logits."""
    divisor = min(largest, vocab & -vocab)
    return divisor if divisor >= SMALLEST_BLOCK else largest


def _in_blocks(x: Float[Array, "rows vocab"], fill: float, largest: int = BLOCK) -> Float[Array, "rows blocks block"]:
    rows, vocab = x.shape
    block = _block(vocab, largest)
    count = -(-vocab // block)
    if count * block > vocab:
        x = jnp.pad(x, ((0, 0), (0, count * block - vocab)), constant_values=fill)
    return x.reshape(rows, count, block)
