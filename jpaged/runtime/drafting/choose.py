"""Logits of a drafter to drafts: the token that the target's sampler would choose from these logits, or nearly.

Called by: the programs that propose.
Owns: the choice of a draft.
Never: applies penalties, masks, logit_bias, custom logits processors, typical_p or top_n_sigma. They change the tokens
of the target but not the drafts, so fewer drafts are accepted in rows that have them.

A greedy row's draft is the most likely id. A random row's draft is drawn with the temperature, limits and random number
that the target's sampler uses at this position. The more alike the two distributions are, the more often both draw the
same token. Any draft is correct, so on CPU the draw of a row with top_k, top_p or min_p is approximate. It takes the
most likely ids one by one, which costs less than sorting 64 of them. For one row of 4,096 logits, in a program of 8
rows, a pass took about 80 us more than a greedy pass (`benchmarks/draft_passes.py`, two busy cores). With the target's
sampler it took about 440 us more.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.engine.step_plan import SamplerVariant
from jpaged.params.sampling import COLUMNS, GREEDY_BELOW
from jpaged.runtime.sampling.sampler import SamplerOptions, sample_tokens, uniform_numbers
from jpaged.runtime.sampling.vocab_search import BLOCK, CANDIDATE_BLOCK, argmax
from jpaged.runtime.state import Field

# Most likely ids that a limited row's draft is drawn from on CPU. Rows that need more get the most likely id.
MOST_IDS = 8


def choose_drafts(
    logits: Float[Array, "rows vocab"],
    fields: Int[Array, "rows num_fields"],
    positions: Int[Array, " rows"],
    uniforms: Float[Array, " rows"] | None,
    *,
    vocab: int,
    variant: SamplerVariant,
    options: SamplerOptions,
) -> Int[Array, " rows"]:
    """One draft for each row: int32 ids in [0, vocab).

    fields: rows of the request table. positions: of the drafts. uniforms: from `draft_uniforms`, of these positions.
    vocab: ids of the target; the drafter may have more. variant: GREEDY if every row is greedy, else RANDOM.
    """
    logits = logits[:, :vocab]
    if variant is SamplerVariant.GREEDY or uniforms is None:
        return _likeliest(logits)[1]

    def exact(logits: Array, fields: Array, positions: Array, _: Array) -> Array:
        drafts = sample_tokens(logits, fields, positions, None, variant=SamplerVariant.RANDOM, options=options)
        return jnp.maximum(drafts.token_ids, 0)  # NOT_FINITE would equal the target's NOT_FINITE

    return lax.platform_dependent(logits, fields, positions, uniforms, cpu=_quick_draw, default=exact)


def draft_uniforms(
    fields: Int[Array, "rows num_fields"], first: Int[Array, " rows"], count: int, variant: SamplerVariant
) -> Float[Array, "rows count"] | None:
    """Random numbers of `count` positions of each row, from position `first` on. None: no row is random.

    All passes of a proposal share one call, because a call takes 28 us for 8 rows on CPU, and 64 numbers 34 us.
    """
    if variant is SamplerVariant.GREEDY:
        return None
    positions = (first[:, None] + jnp.arange(count)).reshape(-1)
    return uniform_numbers(jnp.repeat(fields, count, axis=0), positions).reshape(-1, count)


def _likeliest(logits: Float[Array, "rows vocab"]) -> tuple[Float[Array, " rows"], Int[Array, " rows"]]:
    """The largest logit of each row, and its id."""
    # for 8 x 4,096 on CPU, blocks of 64 take 12 us and blocks of 512 take 23 us
    return argmax(logits, CANDIDATE_BLOCK if logits.shape[1] <= 2**14 else BLOCK)


def _quick_draw(
    logits: Float[Array, "rows vocab"], fields: Int[Array, "rows num_fields"], _: Int[Array, " rows"],
    uniforms: Float[Array, " rows"],
) -> Int[Array, " rows"]:  # fmt: skip
    """A draft for each row, drawn in the target's order: by id, or most likely first in rows with limits."""
    peak, greedy = _likeliest(logits)
    temperature, top_p, min_p = (_float(fields[:, column]) for column in _NUMBERS)
    top_k, is_random = fields[:, COLUMNS["top_k"]], temperature > GREEDY_BELOW
    is_limited = (top_k > 0) | (top_p < 1) | (min_p > 0)
    inverse = jnp.where(is_random, jnp.maximum(1 / temperature, jnp.finfo(jnp.float32).tiny), 1.0)
    x = (logits - peak[:, None]) * inverse[:, None]
    x = jnp.where(x >= jnp.log(min_p)[:, None], x, -jnp.inf)
    weights = jnp.exp(x)

    def draw() -> Array:
        by_id = lax.cond(
            jnp.any(is_random & ~is_limited), lambda: _first_above(weights, uniforms), lambda: greedy
        )
        total = jnp.sum(weights, axis=1) * top_p
        by_weight = _draw_likeliest(x, total, uniforms, top_k, top_p, is_random & is_limited, greedy)
        return jnp.where(is_random, jnp.where(is_limited, by_weight, by_id), greedy)

    return lax.cond(jnp.any(is_random), draw, lambda: greedy)


_NUMBERS = (Field.TEMPERATURE, COLUMNS["top_p"], COLUMNS["min_p"])


def _first_above(weights: Float[Array, "rows vocab"], uniforms: Float[Array, " rows"]) -> Int[Array, " rows"]:
    """The first id whose running sum of weights exceeds uniform * total. Blocks of about the root of the vocabulary."""
    rows, vocab = weights.shape
    size = 1 << ((vocab - 1).bit_length() + 1) // 2
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % size))).reshape(rows, -1, size)
    ends = jnp.cumsum(blocks.sum(axis=2), axis=1)
    target = uniforms * ends[:, -1]
    block = jnp.minimum(jnp.sum(ends <= target[:, None], axis=1), ends.shape[1] - 1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    before = jnp.take_along_axis(ends, block[:, None], axis=1)[:, 0] - inside.sum(axis=1)
    place = jnp.sum(before[:, None] + jnp.cumsum(inside, axis=1) <= target[:, None], axis=1)
    return jnp.minimum(block * size + jnp.minimum(place, size - 1), vocab - 1).astype(jnp.int32)


def _draw_likeliest(
    x: Float[Array, "rows vocab"], total: Float[Array, " rows"], uniforms: Float[Array, " rows"],
    top_k: Int[Array, " rows"], top_p: Float[Array, " rows"], wanted: Array, greedy: Int[Array, " rows"],
) -> Int[Array, " rows"]:  # fmt: skip
    """Take ids of the rows `wanted`, most likely first, until their weight exceeds uniform * total.

    x: logarithms of the weights. Rows with a top_k of at most MOST_IDS take all top_k ids, whose weight replaces the
    total. With a larger top_k, ids past it count as well. The result is the most likely id if MOST_IDS are not enough.
    """
    rows = len(total)
    is_few = (top_k > 0) & (top_k <= MOST_IDS)
    most = jnp.where(is_few, top_k, MOST_IDS)

    def unfinished(running: Array, count: Array) -> Array:
        return wanted & (count < most) & (is_few | (jnp.max(running, axis=1) <= uniforms * total))

    def take(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        count, left, running, ids = state
        largest, chosen = _likeliest(left)
        running = running.at[:, count].set(jnp.max(running, axis=1) + jnp.exp(largest))
        return count + 1, left.at[jnp.arange(rows), chosen].set(-jnp.inf), running, ids.at[:, count].set(chosen)

    start = (jnp.int32(0), x, jnp.zeros((rows, MOST_IDS)), jnp.zeros((rows, MOST_IDS), jnp.int32))
    state = lax.while_loop(lambda state: jnp.any(unfinished(state[2], state[0])), take, start)
    _, _, running, ids = state
    usable = jnp.arange(MOST_IDS) < most[:, None]
    running = jnp.where(usable, running, 0.0)
    total = jnp.where(is_few, jnp.max(running, axis=1) * top_p, total)
    above = (running > (uniforms * total)[:, None]) & usable
    place = jnp.argmax(above, axis=1)
    return jnp.where(above.any(axis=1), jnp.take_along_axis(ids, place[:, None], axis=1)[:, 0], greedy)


def _float(bits: Int[Array, " rows"]) -> Float[Array, " rows"]:
    return lax.bitcast_convert_type(bits, jnp.float32)
