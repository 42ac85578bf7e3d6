"""Sampling when each device has the logits of a part of the vocabulary. Results are the same as on one device.

- Greedy sampling exchanges only each part's largest logit and its id.
- Otherwise an all-to-all gives each device all logits of some rows, which it samples (`by_rows`).
  It sends each logit once. An all-gather would send it to every device.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jpaged.models.sharding import TENSOR, Shards
from jpaged.runtime.sampling.sampler import Sampled, token_or_error
from jpaged.runtime.sampling.vocab_search import BLOCK, argmax, block_maxima_and_nan

# With at least this many rows, a row's bits do not depend on the number of rows (XLA on CPU).
MIN_ROWS = 8


def greedy(
    logits: Float[Array, "rows part"], allowed: Bool[Array, " vocab"] | None, *, vocab: int, shards: Shards
) -> Sampled:
    """The most likely token of each row. logits: of this device's part of the vocabulary; may have padding."""
    size = logits.shape[1]
    ids = shards.first(size) + jnp.arange(size)
    usable = ids < vocab
    if allowed is not None:
        usable &= jnp.take(allowed, ids, mode="clip")
    work = jnp.where(usable, logits, -jnp.inf)
    maxima, is_nan = block_maxima_and_nan(work, logits, BLOCK)
    peak, best = argmax(work, BLOCK, maxima)
    # float32, int32 and bool in one collective
    found = jnp.stack([lax.bitcast_convert_type(peak, jnp.int32), shards.first(size) + best, is_nan.astype(jnp.int32)])
    peaks, bests, nans = lax.all_gather(found, TENSOR).swapaxes(0, 1)
    peaks = lax.bitcast_convert_type(peaks, jnp.float32)
    winner = jnp.argmax(peaks, axis=0)[None]  # on a tie the first device, which has the lower id
    take = lambda each: jnp.take_along_axis(each, winner, axis=0)[0]  # noqa: E731
    return Sampled(token_or_error(take(peaks), take(bests), (nans > 0).any(axis=0)))


def by_rows(
    logits: Float[Array, "rows part"], of_rows: Any, sample: Callable[..., Any], *, vocab: int, shards: Shards
) -> Any:
    """`sample(logits, of_rows)` for all rows. Each device computes some rows, and gets the results of all.

    logits: of this device's part of the vocabulary. of_rows: tree of arrays [rows, ...] that all devices have.
    `sample` gets some rows of both, with the whole vocabulary.
    """
    rows, count = logits.shape[0], shards.count
    each = -(-rows // count)
    if rows >= MIN_ROWS:
        each = -(-each // MIN_ROWS) * MIN_ROWS

    def padded(array: Array) -> Array:
        return jnp.pad(array, [(0, each * count - rows)] + [(0, 0)] * (array.ndim - 1))

    own = lax.all_to_all(padded(logits), TENSOR, split_axis=0, concat_axis=1, tiled=True)[:, :vocab]
    first = shards.first(each)
    mine = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(padded(array), first, each), of_rows)
    return jax.tree.map(lambda array: lax.all_gather(array, TENSOR, tiled=True)[:rows], sample(own, mine))
