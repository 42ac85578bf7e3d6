"""Logits to tokens. Pure functions over a batch of rows; what a row gets does not depend on the others.

In the order of vLLM: ids that may not be sampled, logit_bias, custom processors, penalties; then, for rows that are not
greedy, temperature, min_p, top_k, top_p, and typical_p last. Which ids stay is exact, and found without a sort of the
vocabulary: the most likely 64 (the largest of the blocks that have the largest maxima) settle nearly every row; where
they do not, bisection on the bits of the logits finds the threshold itself. Ids as likely as the last that stays stay.

A random row takes one uniform number, from a key made of the request's seed, the sample's index and the token's
position, and inverts the cumulative distribution: of its candidates, most likely first, where these settle it, else of
the vocabulary in two levels. (Gumbel noise over the vocabulary took 422 ms for 64 x 151,936 on CPU, this 23.)
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jpaged.engine.step_plan import SamplerVariant
from jpaged.errors import RequestError
from jpaged.params.logits_processors import LogitsProcessor
from jpaged.params.sampling import GREEDY_BELOW
from jpaged.runtime.state import Field, Flag, SamplingState

# Vocabulary entries in one block of the two-level searches, at most; less where that divides the vocabulary.
BLOCK = 512
SMALLEST_BLOCK = 32
# The most likely ids of a row that are looked at first.
CANDIDATES = 64
NOT_A_TOKEN = -1
# Rows that are searched at a time where these do not settle them.
PART = 8


@flax.struct.dataclass
class Sampled:
    """What a step samples. The last four only from SamplerVariant.FULL, else None."""

    # Any: JAX rebuilds pytrees with whatever leaves it has in hand, shapes and None among them
    token_ids: Any            # int32[rows]
    logprobs: Any = None      # float32[rows]
    ranks: Any = None         # int32[rows]
    top_ids: Any = None       # int32[rows, num_logprobs]
    top_logprobs: Any = None  # float32[rows, num_logprobs]


@dataclasses.dataclass(frozen=True)
class SamplerOptions:
    """What all samplers of an engine have in common."""

    num_logprobs: int  # most likely ids that are given with a token
    logprobs_mode: str = "raw_logprobs"
    processors: tuple[LogitsProcessor, ...] = ()
    # Whether work that no row needs is left out: where the device decides alone what it runs. On NVIDIA the host would
    # have to read the decision, in the middle of the step.
    can_skip: bool = True

    @property
    def normalises(self) -> bool:
        """Whether what is told are logarithms of probabilities."""
        return self.logprobs_mode.endswith("logprobs")


def check_processors(processors: tuple[LogitsProcessor, ...], vocab_size: int) -> None:
    """Trace them. Raises RequestError for one that JAX cannot, or that gives something else than a row's logits."""
    row, number = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((vocab_size,), ()))
    for each in processors:
        try:
            made = jax.eval_shape(each, row, *[number] * len(each.parameters))
        except Exception as error:  # whatever a user's function fails with
            reason = str(error).partition("\n")[0]
            accepted = f"must be a pure function of JAX arrays: tracing it fails with {type(error).__name__}: {reason}"
            raise RequestError(f"logits_processors.{each.name}", each.function, accepted) from error
        shape, dtype = getattr(made, "shape", None), getattr(made, "dtype", None)
        if shape != row.shape or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            accepted = f"gives {dtype}{shape}, and must give the row's new logits: float32({vocab_size},)"
            raise RequestError(f"logits_processors.{each.name}", each.function, accepted)


def sample(
    logits: Float[Array, "rows vocab"],
    fields: Int[Array, "rows num_fields"],
    positions: Int[Array, " rows"],
    allowed: Bool[Array, " vocab"] | None,
    extras: SamplingState | None = None,
    *,
    variant: SamplerVariant,
    options: SamplerOptions,
) -> Sampled:
    """Choose a token a row.

    logits:    float32, as the model gives them.
    fields:    the rows of the request table (`state.Field`).
    positions: int32; the place in its sequence of the token that is chosen.
    allowed:   ids that may be chosen; None = all.
    extras:    what rows have beside their fields, only read by SamplerVariant.FULL: arrays of these rows.

    Log-probabilities are those of `options.logprobs_mode`; of a beam, of what it chooses from, at its temperature.
    """
    work = logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)
    if variant is SamplerVariant.FULL and extras is not None:
        work = _process(work, fields, extras, options.processors, options.can_skip)
    greedy = _argmax(work)
    if variant is SamplerVariant.GREEDY:
        return Sampled(greedy)
    peak = jnp.take_along_axis(work, greedy[:, None], axis=1)[:, 0]
    # A custom processor's doing: NaN, infinite, or nothing is left. The host ends the request.
    has_processors = variant is SamplerVariant.FULL and bool(options.processors)
    is_wrong = ~jnp.isfinite(peak) if has_processors else jnp.zeros(len(greedy), bool)

    temperature = _float(fields[:, Field.TEMPERATURE])
    is_random = temperature > GREEDY_BELOW
    scaled = work / jnp.where(is_random, temperature, 1.0)[:, None]
    rows = len(greedy)

    def less_its_peak() -> Float[Array, "rows vocab"]:
        return scaled - jnp.take_along_axis(scaled, greedy[:, None], axis=1)

    def draw() -> tuple[Int[Array, " rows"], _Kept]:
        return _draw(
            x, greedy, fields, _uniforms(fields, positions), is_random, typical=variant is SamplerVariant.FULL,
            can_skip=options.can_skip,
        )  # fmt: skip

    # Computed once, and kept: where XLA computes it again for another use it may round otherwise (a fused
    # multiply-add), and what is compared with a threshold must be what the threshold was found among. On CPU a barrier
    # is gone before that happens; a branch is not.
    if options.can_skip:
        any_random = jnp.any(is_random)
        x = lax.cond(any_random, less_its_peak, lambda: jnp.zeros_like(work))
        everything = _Kept(jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.full(rows, jnp.inf))
        token_ids, kept = lax.cond(any_random, draw, lambda: (greedy, everything))
    else:
        x = lax.optimization_barrier(less_its_peak())
        token_ids, kept = draw()
    token_ids = jnp.where(is_wrong, NOT_A_TOKEN, token_ids)
    if variant is SamplerVariant.RANDOM:
        return Sampled(token_ids)

    def say() -> Sampled:
        told = logits
        if options.logprobs_mode.startswith("processed"):
            told = jnp.where(kept.holds(x) | ~is_random[:, None], scaled, -jnp.inf)
        # A beam is scored by what may be chosen, at its temperature.
        beam_temperature = _float(fields[:, Field.BEAM_TEMPERATURE])[:, None]
        is_beam = beam_temperature > 0
        told = jnp.where(is_beam, work / jnp.where(is_beam, beam_temperature, 1.0), told)
        return _describe(told, token_ids, is_beam | options.normalises, options.num_logprobs)

    def say_nothing() -> Sampled:
        return jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), jax.eval_shape(say)).replace(
            token_ids=token_ids
        )

    return _if_any((fields[:, Field.FLAGS] & Flag.LOGPROBS) > 0, say, say_nothing, options.can_skip)


def describe(
    logits: Float[Array, "rows vocab"], token_ids: Int[Array, " rows"], *, options: SamplerOptions
) -> Sampled:
    """What there is to say of given tokens: of a prompt's, whose logits nothing is done to."""
    normalised = jnp.full((len(token_ids), 1), options.normalises)
    return _describe(logits, token_ids, normalised, options.num_logprobs)


def _describe(
    told: Float[Array, "rows vocab"],
    token_ids: Int[Array, " rows"],
    normalised: Bool[Array, "rows 1"],
    num_logprobs: int,
) -> Sampled:
    chosen = jnp.take_along_axis(told, token_ids[:, None], axis=1)
    normaliser = jnp.where(normalised, jax.nn.logsumexp(told, axis=-1, keepdims=True), 0.0)
    top_logits, top_ids = likeliest(told, num_logprobs)
    return Sampled(
        token_ids,
        logprobs=(chosen - normaliser)[:, 0],
        ranks=jnp.sum(told >= chosen, axis=-1, dtype=jnp.int32),  # as vLLM's: of equals the last place
        top_ids=top_ids,
        top_logprobs=top_logits - normaliser,
    )


# -- before the temperature ---------------------------------------------------------------------------------------


def _process(
    logits: Float[Array, "rows vocab"],
    fields: Int[Array, "rows num_fields"],
    extras: SamplingState,
    processors: tuple[LogitsProcessor, ...],
    can_skip: bool,
) -> Float[Array, "rows vocab"]:
    """Masks, logit_bias, custom processors and penalties, of the rows that have them."""
    rows, vocab = logits.shape

    def where_flagged(flag: Flag, change: Callable[[Array], Array], work: Array) -> Array:
        asked = (fields[:, Field.FLAGS] & flag) > 0
        return _if_any(asked, lambda: jnp.where(asked[:, None], change(work), work), lambda: work, can_skip)

    def mask(work: Array) -> Array:
        bits = (extras.masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        return jnp.where(bits.reshape(rows, -1)[:, :vocab] == 0, -jnp.inf, work)

    def add_bias(work: Array) -> Array:
        return work.at[jnp.arange(rows)[:, None], extras.bias_ids].add(extras.bias, mode="drop")

    # CTRL's repetition penalty (Keskar et al. 2019) over prompt and output, OpenAI's other two over the output
    def penalise(work: Array) -> Array:
        times = (extras.counts >> 1).astype(jnp.float32)
        repetition = _float(fields[:, Field.REPETITION])[:, None]
        work = jnp.where(extras.counts > 0, jnp.where(work > 0, work / repetition, work * repetition), work)
        work -= _float(fields[:, Field.FREQUENCY])[:, None] * times
        return work - _float(fields[:, Field.PRESENCE])[:, None] * (times > 0)

    work = where_flagged(Flag.BIAS, add_bias, where_flagged(Flag.MASK, mask, logits))
    column = 0
    for number, process in enumerate(processors):
        count = len(process.parameters)
        asked = (fields[:, Field.PROCESSORS] >> number & 1)[:, None] > 0
        processed = jax.vmap(process)(work, *extras.custom[:, column : column + count].T)
        processed = jnp.where(work == -jnp.inf, -jnp.inf, processed)  # what may not be sampled stays so, times 0 too
        work, column = jnp.where(asked, processed, work), column + count
    return where_flagged(Flag.COUNTS, penalise, work)


# -- what stays, and the draw -------------------------------------------------------------------------------------


@flax.struct.dataclass
class _Kept:
    """Which ids of a row may be drawn: those with x >= threshold that are no further than `reach` from `centre`."""

    threshold: Any  # float32[rows]
    centre: Any     # float32[rows]
    reach: Any      # float32[rows]; infinite where typical_p keeps all

    def holds(self, x: Float[Array, "rows n"]) -> Bool[Array, "rows n"]:
        """x: logits less their row's largest."""
        near = jnp.abs(x - self.centre[:, None]) <= self.reach[:, None]
        return (x >= self.threshold[:, None]) & near


def _draw(
    x: Float[Array, "rows vocab"],
    greedy: Int[Array, " rows"],
    fields: Int[Array, "rows num_fields"],
    uniforms: Float[Array, " rows"],
    is_random: Bool[Array, " rows"],
    *,
    typical: bool,
    can_skip: bool,
) -> tuple[Int[Array, " rows"], _Kept]:
    """A token a row, and what it was drawn from. x: logits less their row's largest."""
    rows, vocab = x.shape
    # p >= min_p * p_max, in logarithms; log(0) = -inf keeps everything
    floor = jnp.log(_float(fields[:, Field.MIN_P]))
    top_k, top_p = fields[:, Field.TOP_K], _float(fields[:, Field.TOP_P])
    typical_p = _float(fields[:, Field.TYPICAL_P]) if typical else jnp.ones(rows)
    cut = top_p < 1
    limited = is_random & ((top_k > 0) | cut | (floor > -jnp.inf) | (typical_p < 1))
    count = min(CANDIDATES, vocab)
    values, ids = _if_any(
        limited, lambda: likeliest(x, count),
        lambda: (jnp.zeros((rows, count)), jnp.zeros((rows, count), jnp.int32)), can_skip,
    )  # fmt: skip
    last = values[:, -1]
    whole = count == vocab

    # top_k: the k-th value of those that min_p leaves; nothing where there are not so many
    place = jnp.clip(top_k - 1, 0, values.shape[1] - 1)
    kth = jnp.take_along_axis(values, place[:, None], axis=1)[:, 0]
    threshold = jnp.where((top_k > 0) & (top_k <= values.shape[1]), jnp.maximum(kth, floor), floor)
    settled = limited & ((threshold > last) | whole)
    # top_p: of the mass that is left, which only the candidates have where they are settled so far
    kept = values >= threshold[:, None]
    weights = jnp.where(kept, jnp.exp(values), 0.0)
    needs_mass = is_random & cut & ~settled & (top_k == 0)
    mass = jnp.where(settled, weights.sum(axis=1), jnp.inf)
    mass = _where_needed(
        needs_mass, lambda: jnp.sum(jnp.where(x >= floor[:, None], jnp.exp(x), 0.0), axis=1), mass, can_skip
    )
    reached = jnp.cumsum(weights, axis=1) >= (top_p * mass)[:, None]
    edge = jnp.take_along_axis(values, jnp.argmax(reached, axis=1)[:, None], axis=1)[:, 0]
    cut_off = jnp.where(cut & reached[:, -1], jnp.maximum(edge, threshold), threshold)
    settled = jnp.where(cut & ~settled, limited & reached[:, -1] & (cut_off > last), settled)
    threshold = jnp.where(settled, cut_off, threshold)

    counted = is_random & ~settled & (top_k > 0)
    kth = _search_rows(counted, _search_kth, (x, top_k), threshold, can_skip)
    threshold = jnp.where(counted, jnp.maximum(kth, floor), threshold)
    threshold = _search_rows(is_random & ~settled & cut, _search_mass, (x, threshold, top_p), threshold, can_skip)
    found = _Kept(threshold, jnp.zeros(rows), jnp.full(rows, jnp.inf))
    if typical:
        among = _centre(values, values >= threshold[:, None], typical_p)
        found = found.replace(centre=among[0], reach=among[1])
        centre, reach = _search_rows(
            is_random & ~settled & (typical_p < 1), _search_centre, (x, threshold, typical_p), among, can_skip
        )
        unneeded = typical_p >= 1
        found = found.replace(centre=jnp.where(unneeded, 0.0, centre), reach=jnp.where(unneeded, jnp.inf, reach))
    weights = jnp.where(found.holds(values), jnp.exp(values), 0.0)
    running = jnp.cumsum(weights, axis=1)
    at = jnp.sum(running <= (uniforms * running[:, -1])[:, None], axis=1)
    some = weights > 0
    at = jnp.clip(at, jnp.argmax(some, axis=1), values.shape[1] - 1 - jnp.argmax(some[:, ::-1], axis=1))
    drawn = jnp.take_along_axis(ids, at[:, None], axis=1)[:, 0]
    drawn = _search_rows(is_random & ~settled, _draw_of_all, (x, found, uniforms), drawn, can_skip)
    return jnp.where(is_random, drawn, greedy), found


def _where_needed(needed: Bool[Array, " rows"], compute: Callable[[], Any], otherwise: Any, can_skip: bool) -> Any:
    """What `compute` gives, for the rows that need it. Not computed at all where no row does and the device decides."""

    def computed() -> Any:
        return jax.tree.map(lambda new, old: jnp.where(needed, new, old), compute(), otherwise)

    return _if_any(needed, computed, lambda: otherwise, can_skip)


def _if_any(
    needed: Bool[Array, " rows"], compute: Callable[[], Any], otherwise: Callable[[], Any], can_skip: bool
) -> Any:
    return lax.cond(jnp.any(needed), compute, otherwise) if can_skip else compute()


def _search_rows(
    needed: Bool[Array, " rows"], search: Callable[..., Any], arrays: Any, otherwise: Any, can_skip: bool
) -> Any:
    """What `search` gives of rows of arrays, for the rows that need it; where the device decides, of a few at a time.

    So a row with a flat distribution costs what it takes, and not that for the whole batch.
    """
    if not can_skip:
        return jax.tree.map(lambda new, old: jnp.where(needed, new, old), search(*arrays), otherwise)
    rows, part = len(needed), min(PART, len(needed))
    count = jnp.sum(needed)
    order = jnp.concatenate([jnp.argsort(~needed), jnp.zeros(part, jnp.int32)])  # those that need it first

    def some(state: tuple[Array, Any]) -> tuple[Array, Any]:
        start, found = state
        chosen = lax.dynamic_slice(order, (start,), (part,))
        places = jnp.where(start + jnp.arange(part) < count, chosen, rows)  # a row that needs nothing is dropped
        new = search(*jax.tree.map(lambda array: jnp.take(array, chosen, axis=0), arrays))
        return start + part, jax.tree.map(lambda old, new: old.at[places].set(new, mode="drop"), found, new)

    return lax.while_loop(lambda state: state[0] < count, some, (jnp.int32(0), otherwise))[1]


def _draw_of_all(
    x: Float[Array, "rows vocab"], found: _Kept, uniforms: Float[Array, " rows"]
) -> Int[Array, " rows"]:
    return _invert_cdf(jnp.where(found.holds(x), jnp.exp(x), 0.0), uniforms)


def _search_centre(
    x: Float[Array, "rows vocab"], threshold: Float[Array, " rows"], typical_p: Float[Array, " rows"]
) -> tuple[Float[Array, " rows"], Float[Array, " rows"]]:
    return _centre(x, x >= threshold[:, None], typical_p, search=True)


def _search_kth(x: Float[Array, "rows vocab"], top_k: Int[Array, " rows"]) -> Float[Array, " rows"]:
    """The k-th largest value of x <= 0, by bisection over all of it."""
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, x.shape[1]), x.shape[1])
    return -_smallest_bound(-x, lambda kept: jnp.sum(kept, axis=1, dtype=jnp.int32) >= wanted)


def _search_mass(
    x: Float[Array, "rows vocab"], threshold: Float[Array, " rows"], top_p: Float[Array, " rows"]
) -> Float[Array, " rows"]:
    """The smallest value that top_p keeps of those x <= 0 that are at the threshold or above."""
    weights = jnp.where(x >= threshold[:, None], jnp.exp(x), 0.0)
    mass = top_p * weights.sum(axis=1)
    edge = -_smallest_bound(-x, lambda kept: jnp.sum(jnp.where(kept, weights, 0.0), axis=1) >= mass)
    # at 1 nothing may fall out by rounding of the sums
    return jnp.where(top_p < 1, jnp.maximum(edge, threshold), threshold)


def _centre(
    x: Float[Array, "rows n"], kept: Bool[Array, "rows n"], typical_p: Float[Array, " rows"], *, search: bool = False
) -> tuple[Float[Array, " rows"], Float[Array, " rows"]]:
    """Locally typical sampling (Meister et al. 2022): around which x, and how far from it, ids stay.

    The fewest ids whose surprise is nearest to the entropy and that together have typical_p. search: by bisection,
    not by a sort.
    """
    weights = jnp.where(kept, jnp.exp(x), 0.0)
    total = weights.sum(axis=1)
    # surprise log(total) - x is the entropy where x is its own mean
    centre = jnp.sum(jnp.where(weights > 0, weights * x, 0.0), axis=1) / total  # -inf weighs nothing
    distance = jnp.where(kept, jnp.abs(x - centre[:, None]), jnp.inf)
    wanted = typical_p * total
    if search:
        reach = _smallest_bound(distance, lambda near: jnp.sum(jnp.where(near, weights, 0.0), axis=1) >= wanted)
        return centre, reach
    order = jnp.argsort(distance, axis=1)
    reached = jnp.cumsum(jnp.take_along_axis(weights, order, axis=1), axis=1) >= wanted[:, None]
    at = jnp.where(reached[:, -1], jnp.argmax(reached, axis=1), jnp.sum(kept, axis=1) - 1)
    return centre, jnp.take_along_axis(distance, jnp.take_along_axis(order, at[:, None], axis=1), axis=1)[:, 0]


def _smallest_bound(
    x: Float[Array, "rows n"], enough: Callable[[Bool[Array, "rows n"]], Bool[Array, " rows"]]
) -> Float[Array, " rows"]:
    """The smallest value of x >= 0 such that the entries up to it are `enough`; infinity where all are not.

    Bisection: the bits of a non-negative float32 rise with its value, so 31 halvings of the integers from 0 to infinity
    find it exactly.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)  # -0.0 is 0.0

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        ok = enough(bits <= middle[:, None])
        return jnp.where(ok, low, middle + 1), jnp.where(ok, middle, high)

    rows = x.shape[0]
    infinity = jnp.full(rows, 0x7F800000, jnp.int32)
    _, bound = lax.fori_loop(0, 31, halve, (jnp.zeros(rows, jnp.int32), infinity))
    return lax.bitcast_convert_type(bound, jnp.float32)


# -- searches in two levels ---------------------------------------------------------------------------------------


def _block(vocab: int, largest: int = BLOCK) -> int:
    """Entries of a block: the largest power of two that divides the vocabulary; padding it would copy the logits."""
    divisor = min(largest, vocab & -vocab)
    return divisor if divisor >= SMALLEST_BLOCK else largest


def _in_blocks(x: Float[Array, "rows vocab"], fill: float, largest: int = BLOCK) -> Float[Array, "rows blocks block"]:
    rows, vocab = x.shape
    block = _block(vocab, largest)
    count = -(-vocab // block)
    if count * block > vocab:
        x = jnp.pad(x, ((0, 0), (0, count * block - vocab)), constant_values=fill)
    return x.reshape(rows, count, block)


def _argmax(x: Float[Array, "rows vocab"]) -> Int[Array, " rows"]:
    """The lowest id among the largest: the winning block, then the place in it. (`jnp.argmax` takes 13 times as long
    for 64 x 151,936 on CPU.)"""
    blocks = _in_blocks(x, -jnp.inf)
    winner = jnp.argmax(blocks.max(axis=2), axis=1)
    inside = jnp.take_along_axis(blocks, winner[:, None, None], axis=1)[:, 0]
    ids = winner * blocks.shape[2] + jnp.argmax(inside, axis=1)
    return jnp.minimum(ids, x.shape[1] - 1).astype(jnp.int32)  # all -inf: padding is no id


def likeliest(
    x: Float[Array, "rows vocab"], count: int
) -> tuple[Float[Array, "rows count"], Int[Array, "rows count"]]:
    """As `lax.top_k`, equals in the order of their ids: it only looks into the blocks with the largest maxima."""
    blocks = _in_blocks(x, -jnp.inf, 64)
    rows, num_blocks, block = blocks.shape
    if num_blocks <= 2 * count or x.shape[1] % block:
        values, ids = lax.top_k(x, count)
        return values, ids.astype(jnp.int32)
    _, chosen = lax.top_k(blocks.max(axis=2), count)
    chosen = jnp.sort(chosen, axis=1)  # or equals would not be in the order of their ids
    inside = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(rows, -1)
    values, places = lax.top_k(inside, count)
    ids = jnp.take_along_axis(chosen, places // block, axis=1) * block + places % block
    return values, ids.astype(jnp.int32)


def _invert_cdf(weights: Float[Array, "rows vocab"], uniform: Float[Array, " rows"]) -> Int[Array, " rows"]:
    """The first id at which the running sum of weights exceeds uniform * their total: by blocks, then inside one."""
    blocked = _in_blocks(weights, 0.0)
    blocks, size = blocked.shape[1:]
    ends = jnp.cumsum(blocked.sum(axis=2), axis=1)
    target = uniform * ends[:, -1]
    block = jnp.minimum(jnp.sum(ends <= target[:, None], axis=1), blocks - 1)
    # Rounding may name a block without weight at the very end: go back to the last one that has some.
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
