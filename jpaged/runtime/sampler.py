"""Logits to tokens. Pure functions over a batch of rows; what a row gets does not depend on the others.

Random rows take one uniform number each, from a key made of the request's seed, the sample's index and the token's
position, and invert the cumulative distribution in two levels. (Gumbel noise over the vocabulary took 422 ms for
64 x 151,936 on CPU, this 23.) Top-k and top-p are thresholds found by bisection on the bits of the logits: exact,
and without a sort of the vocabulary.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jpaged.engine.step_plan import SamplerVariant
from jpaged.runtime.state import Field

# Vocabulary entries in one block of the two-level inversion.
CDF_BLOCK = 512
# Temperatures up to this one are greedy: dividing by less overflows float32 (vLLM draws the line here, too).
GREEDY_BELOW = 1e-5


@flax.struct.dataclass
class Sampled:
    """What a step samples. The last four only from SamplerVariant.FULL, else None."""

    # Any: JAX rebuilds pytrees with whatever leaves it has in hand, shapes and None among them
    token_ids: Any            # int32[rows]
    logprobs: Any = None      # float32[rows]
    ranks: Any = None         # int32[rows]
    top_ids: Any = None       # int32[rows, num_logprobs]
    top_logprobs: Any = None  # float32[rows, num_logprobs]


def sample(
    logits: Float[Array, "rows vocab"],
    fields: Int[Array, "rows num_fields"],
    positions: Int[Array, " rows"],
    allowed: Bool[Array, " vocab"] | None,
    *,
    variant: SamplerVariant,
    num_logprobs: int,
) -> Sampled:
    """Choose a token a row.

    logits:    float32, as the model gives them.
    fields:    the rows of the request table (`state.Field`).
    positions: int32; the place in its sequence of the token that is chosen.
    allowed:   ids that may be chosen; None = all. Log-probabilities are of the model's own distribution, before this;
               but of a beam what it chooses from, at its temperature.
    """
    masked = logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)
    greedy = jnp.argmax(masked, axis=-1).astype(jnp.int32)
    if variant is SamplerVariant.GREEDY:
        return Sampled(greedy)

    temperature = _float(fields[:, Field.TEMPERATURE])
    is_random = temperature > GREEDY_BELOW
    scaled = masked / jnp.where(is_random, temperature, 1.0)[:, None]
    scaled -= scaled.max(axis=-1, keepdims=True)
    min_p = _float(fields[:, Field.MIN_P])
    # p >= min_p * p_max, in logarithms; log(0) = -inf keeps everything
    scaled = jnp.where(scaled >= jnp.log(min_p)[:, None], scaled, -jnp.inf)
    if variant is SamplerVariant.FULL:
        scaled = _keep_top_k(scaled, fields[:, Field.TOP_K])
        scaled = _keep_top_p(scaled, _float(fields[:, Field.TOP_P]))
    token_ids = jnp.where(is_random, _invert_cdf(jnp.exp(scaled), _uniforms(fields, positions)), greedy)
    if variant is SamplerVariant.RANDOM:
        return Sampled(token_ids)

    # A beam is scored by what may be chosen, at its temperature; everybody else by the model's own distribution.
    beam_temperature = _float(fields[:, Field.BEAM_TEMPERATURE])[:, None]
    is_beam = beam_temperature > 0
    logits = jnp.where(is_beam, masked / jnp.where(is_beam, beam_temperature, 1.0), logits)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top_logits, top_ids = lax.top_k(logits, num_logprobs)
    return Sampled(
        token_ids,
        logprobs=(chosen - normaliser)[:, 0],
        ranks=jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32) + 1,
        top_ids=top_ids.astype(jnp.int32),
        top_logprobs=top_logits - normaliser,
    )


def _float(bits: Int[Array, " rows"]) -> Float[Array, " rows"]:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _uniforms(fields: Int[Array, "rows num_fields"], positions: Int[Array, " rows"]) -> Float[Array, " rows"]:
    """One number in [0, 1) a row: fold_in(fold_in(key(seed), sample index), position)."""

    def one(low: Array, high: Array, sample_index: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(jnp.stack([high, low]), impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
        return jax.random.uniform(key, dtype=jnp.float32)

    unsigned = lax.bitcast_convert_type(fields, jnp.uint32)
    return jax.vmap(one)(
        unsigned[:, Field.SEED_LOW], unsigned[:, Field.SEED_HIGH], fields[:, Field.SAMPLE_INDEX], positions
    )


def _invert_cdf(weights: Float[Array, "rows vocab"], uniform: Float[Array, " rows"]) -> Int[Array, " rows"]:
    """The first id at which the running sum of weights exceeds uniform * their total: by blocks, then inside one."""
    rows, vocab = weights.shape
    blocks = -(-vocab // CDF_BLOCK)
    weights = jnp.pad(weights, ((0, 0), (0, blocks * CDF_BLOCK - vocab))).reshape(rows, blocks, CDF_BLOCK)
    ends = jnp.cumsum(weights.sum(axis=2), axis=1)
    target = uniform * ends[:, -1]
    block = jnp.minimum(jnp.sum(ends <= target[:, None], axis=1), blocks - 1)
    # Rounding may name a block without weight at the very end: go back to the last one that has some.
    filled = (ends > 0) & (jnp.diff(ends, axis=1, prepend=0.0) > 0)
    last_filled = blocks - 1 - jnp.argmax(filled[:, ::-1], axis=1)
    block = jnp.minimum(block, last_filled)
    before = jnp.where(block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    inside = jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0]
    running = jnp.cumsum(inside, axis=1)
    place = jnp.sum(running <= (target - before)[:, None], axis=1)
    last = CDF_BLOCK - 1 - jnp.argmax(inside[:, ::-1] > 0, axis=1)
    first = jnp.argmax(inside > 0, axis=1)
    return (block * CDF_BLOCK + jnp.clip(place, first, last)).astype(jnp.int32)


def _keep_top_k(x: Float[Array, "rows vocab"], top_k: Int[Array, " rows"]) -> Float[Array, "rows vocab"]:
    """-inf below the row's k-th largest value; equals of that value stay. top_k 0 = keep all. x <= 0."""
    wanted = jnp.where(top_k > 0, top_k, x.shape[1])
    return _keep_nearest(x, lambda kept: jnp.sum(kept, axis=1, dtype=jnp.int32) >= wanted)


def _keep_top_p(x: Float[Array, "rows vocab"], top_p: Float[Array, " rows"]) -> Float[Array, "rows vocab"]:
    """-inf outside the smallest set of most likely ids whose share reaches top_p (Holtzman et al. 2019). x <= 0."""
    weights = jnp.exp(x)
    wanted = top_p * weights.sum(axis=1)
    # at 1 nothing may fall out by rounding of the sums
    return jnp.where(
        (top_p >= 1.0)[:, None],
        x,
        _keep_nearest(x, lambda kept: jnp.sum(jnp.where(kept, weights, 0.0), axis=1) >= wanted),
    )


def _keep_nearest(
    x: Float[Array, "rows vocab"], enough: Callable[[Bool[Array, "rows vocab"]], Bool[Array, " rows"]]
) -> Float[Array, "rows vocab"]:
    """Keep the fewest largest values of x <= 0 that are `enough`, a row; -inf for the others.

    Bisection on the threshold: the bits of a non-negative float32 rise with its value, so 31 halvings of the integers
    from 0 to infinity find the exact one.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        ok = enough(bits <= middle[:, None])
        return jnp.where(ok, low, middle + 1), jnp.where(ok, middle, high)

    rows = x.shape[0]
    infinity = jnp.full(rows, 0x7F800000, jnp.int32)
    _, threshold = lax.fori_loop(0, 31, halve, (jnp.zeros(rows, jnp.int32), infinity))
    return jnp.where(bits <= threshold[:, None], x, -jnp.inf)
