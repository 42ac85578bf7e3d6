"""Logits to tokens. Pure functions over a batch of rows; a row's result does not depend on other rows.

The order is vLLM's: masks, logit_bias, custom logits processors, penalties; then, for random rows, temperature,
top_n_sigma, min_p, top_k, top_p, typical_p.

A random row draws one uniform number, keyed by the request's seed, the sample's index and the token's position.
`draws` finds the ids that may be drawn, and the one that the number draws.
"""

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from jpaged.engine.step_plan import NOT_FINITE, NOTHING_ALLOWED, SamplerVariant, Scores, mask_words
from jpaged.errors import RequestError
from jpaged.params.logits_processors import LogitsProcessor
from jpaged.params.sampling import GREEDY_BELOW
from jpaged.runtime.sampling.draws import Kept, Limits, Logits, as_float, draw_rows, filtered, find_kept, parameter
from jpaged.runtime.sampling.vocab_search import (
    BLOCK,
    CANDIDATE_BLOCK,
    argmax,
    block_maxima_and_nan,
    likeliest,
    row_sums,
)
from jpaged.runtime.state import Field, Flag, Leaf, SamplingState


@flax.struct.dataclass
class Sampled:
    """Tokens, and what only SamplerVariant.FULL and `score` return: their log-probabilities, and kept ids."""

    token_ids: Leaf                   # int32[rows]
    logprobs: Leaf | None = None      # float32[rows]
    ranks: Leaf | None = None         # int32[rows]
    top_ids: Leaf | None = None       # int32[rows, num_logprobs]
    top_logprobs: Leaf | None = None  # float32[rows, num_logprobs]
    kept_ids: Leaf | None = None      # uint32[rows, words]  `SamplerOptions.returns_mask`; bits as in `mask_words`

    def packed(self) -> Int[Array, "rows columns"]:
        """All fields as columns of one array, for one download. Floats are stored as their bits."""
        present = [leaf for leaf in jax.tree.leaves(self) if leaf is not None]
        columns = [leaf.reshape(len(self.token_ids), -1) for leaf in present]
        return jnp.concatenate([lax.bitcast_convert_type(column, jnp.int32) for column in columns], axis=1)


def unpack(
    packed: Int[np.ndarray, "rows columns"], mask_words: int = 0
) -> tuple[Int[np.ndarray, " rows"], Scores | None, UInt[np.ndarray, "rows words"] | None]:
    """Token ids, log-probabilities and kept ids of a downloaded `Sampled.packed`.

    mask_words: words of the kept ids in an output of several columns; 0: it has none. Scores and kept ids are None if
    there is one column.
    """
    token_ids, kept = packed[:, 0], None
    if packed.shape[1] == 1:
        return token_ids, None, None
    if mask_words:
        packed, kept = packed[:, :-mask_words], packed[:, -mask_words:].view(np.uint32)
    columns = packed.shape[1]
    half = 3 + (columns - 3) // 2
    logprobs, top_logprobs = packed[:, 1].view(np.float32), packed[:, half:].view(np.float32)
    scores = Scores(logprobs, ranks=packed[:, 2], top_ids=packed[:, 3:half], top_logprobs=top_logprobs)
    return token_ids, scores, kept


@dataclasses.dataclass(frozen=True)
class SamplerOptions:
    """Options that all sampling programs of an engine share."""

    num_logprobs: int  # number of most likely ids returned with each token
    logprobs_mode: str = "raw_logprobs"
    processors: tuple[LogitsProcessor, ...] = ()
    # Rows searched at once over the whole vocabulary. 8 rows keep a core busy; accelerators need more.
    rows_per_search: int = 8
    # Sum over the vocabulary in a fixed order. Else XLA's order on CPU depends on how it fuses the sum. The last bit of
    # log-probabilities then differed between one and eight devices.
    fixed_sums: bool = False
    returns_mask: bool = False  # rows may ask for the ids from which their token was drawn

    @property
    def processed(self) -> bool:
        """True if returned values are of the distribution that was sampled from."""
        return self.logprobs_mode.startswith("processed")

    @property
    def normalises(self) -> bool:
        """True if log-probabilities are returned, False if logits are."""
        return self.logprobs_mode.endswith("logprobs")


def check_processors(processors: tuple[LogitsProcessor, ...], vocab_size: int) -> None:
    """Raise RequestError for a custom logits processor that JAX cannot trace, or that returns no row of logits."""
    row, number = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((vocab_size,), ()))
    for each in processors:
        try:
            made = jax.eval_shape(each, row, *[number] * len(each.parameters))
        except Exception as error:  # a user's function may raise anything
            reason = str(error).partition("\n")[0]
            accepted = f"must be a pure function of JAX arrays: tracing it fails with {type(error).__name__}: {reason}"
            raise RequestError(f"logits_processors.{each.name}", each.function, accepted) from error
        shape, dtype = getattr(made, "shape", None), getattr(made, "dtype", None)
        if shape != row.shape or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            accepted = f"returns {dtype}{shape}, must return the row's new logits: float32({vocab_size},)"
            raise RequestError(f"logits_processors.{each.name}", each.function, accepted)


def sample_tokens(
    logits: Float[Array, "rows vocab"],
    fields: Int[Array, "rows num_fields"],
    positions: Int[Array, " rows"],
    allowed: Bool[Array, " vocab"] | None,
    extras: SamplingState | None = None,
    *,
    variant: SamplerVariant,
    options: SamplerOptions,
) -> Sampled:
    """Choose one token for each row.

    logits:    float32, of the model.
    fields:    int32, the rows of the request table (`state.Field`).
    positions: int32, of the chosen token in its sequence.
    allowed:   ids that may be sampled; None = all.
    extras:    of these rows; only SamplerVariant.FULL reads them.

    A row with NaN logits or an infinite largest logit gets NOT_FINITE instead of a token. A row that allows no id gets
    NOTHING_ALLOWED. The host then ends the request. Log-probabilities follow `options.logprobs_mode`. A beam's are over
    the ids that it may choose, at its temperature.
    """
    work = logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)
    if variant is SamplerVariant.FULL and extras is not None:
        work = _process(work, fields, extras, options.processors)
    block = BLOCK if variant is SamplerVariant.GREEDY else CANDIDATE_BLOCK
    maxima, is_nan = block_maxima_and_nan(work, logits, block)
    peak, greedy = argmax(work, block, maxima)
    if variant is SamplerVariant.GREEDY:
        return Sampled(token_or_error(peak, greedy, is_nan))

    is_random, inverse = _temperatures(fields)
    rows = len(greedy)
    row_logits = Logits(work, peak, inverse, maxima, options.fixed_sums, min(options.rows_per_search, rows))

    def draw() -> tuple[Int[Array, " rows"], Kept]:
        uniforms, typical = _uniforms(fields, positions), variant is SamplerVariant.FULL
        return draw_rows(row_logits, greedy, uniforms, Limits.of(row_logits, fields, is_random, typical=typical))

    everything = Kept.everything(rows)
    token_ids, kept = lax.cond(jnp.any(is_random), draw, lambda: (greedy, everything))
    token_ids = token_or_error(peak, token_ids, is_nan)
    if variant is SamplerVariant.RANDOM:
        return Sampled(token_ids)

    def with_logprobs() -> Sampled:
        reported = logits
        if options.processed:
            reported = filtered(row_logits, kept, is_random)
        beam_temperature = as_float(fields[:, Field.BEAM_TEMPERATURE])[:, None]
        is_beam = beam_temperature > 0
        reported = jnp.where(is_beam, work / jnp.where(is_beam, beam_temperature, 1.0), reported)
        top = likeliest(reported, options.num_logprobs)
        if extras is not None:
            top = _top_or_asked(reported, top, fields, extras)
        return _describe(reported, token_ids, is_beam | options.normalises, top, options)

    def without_logprobs() -> Sampled:
        shapes = jax.eval_shape(with_logprobs)
        return jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes).replace(token_ids=token_ids)

    wants_logprobs = (fields[:, Field.FLAGS] & Flag.LOGPROBS) > 0
    sampled = lax.cond(jnp.any(wants_logprobs), with_logprobs, without_logprobs)
    if not options.returns_mask:
        return sampled

    def kept_ids() -> Array:
        return _packed_bits(kept.holds(row_logits.less_peak()) & (work > -jnp.inf))

    wants_mask = (fields[:, Field.FLAGS] & Flag.SAMPLING_MASK) > 0
    nothing = jnp.zeros((rows, mask_words(logits.shape[1])), jnp.uint32)
    return sampled.replace(kept_ids=lax.cond(jnp.any(wants_mask), kept_ids, lambda: nothing))


def _packed_bits(kept: Bool[Array, "rows vocab"]) -> UInt[Array, "rows words"]:
    """One bit for each id, as `mask_words` says."""
    rows, vocab = kept.shape
    padded = jnp.pad(kept, ((0, 0), (0, -vocab % 32))).reshape(rows, -1, 32)
    return jnp.sum(padded.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def token_or_error(
    peak: Float[Array, " rows"], token_ids: Int[Array, " rows"], is_nan: Bool[Array, " rows"]
) -> Int[Array, " rows"]:
    """The tokens, but NOT_FINITE or NOTHING_ALLOWED for rows without a valid one. peak: largest allowed logit."""
    is_nan |= jnp.isnan(peak)
    error = jnp.where(~is_nan & (peak == -jnp.inf), NOTHING_ALLOWED, NOT_FINITE)
    return jnp.where(is_nan | ~jnp.isfinite(peak), error, token_ids)


def describe_tokens(
    logits: Float[Array, "rows vocab"], token_ids: Int[Array, " rows"], *, options: SamplerOptions
) -> Sampled:
    """Log-probabilities of given tokens from the model's unprocessed logits, for prompt log-probabilities."""
    normalised = jnp.full((len(token_ids), 1), options.normalises)
    return _describe(logits, token_ids, normalised, likeliest(logits, options.num_logprobs), options)


def score_tokens(
    logits: Float[Array, "rows vocab"],
    token_ids: Int[Array, " rows"],
    fields: Int[Array, "rows num_fields"],
    processed: Bool[Array, " rows"],
    allowed: Bool[Array, " vocab"] | None,
    extras: SamplingState,
    *,
    options: SamplerOptions,
) -> Sampled:
    """As `describe_tokens`; in `processed` rows, of the distribution from which `sample_tokens` draws.

    fields, allowed, extras: as for `sample_tokens`. A token that cannot be drawn has the log-probability -inf.
    """

    def of_processed() -> Array:
        work = logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)
        work = _process(work, fields, extras, options.processors)
        maxima, _ = block_maxima_and_nan(work, logits, CANDIDATE_BLOCK)
        peak, _ = argmax(work, CANDIDATE_BLOCK, maxima)
        is_random, inverse = _temperatures(fields)
        rows = len(token_ids)
        row_logits = Logits(work, peak, inverse, maxima, options.fixed_sums, min(options.rows_per_search, rows))
        is_random &= processed

        def found() -> Kept:
            return find_kept(row_logits, Limits.of(row_logits, fields, is_random, typical=True)).kept

        kept = lax.cond(jnp.any(is_random), found, lambda: Kept.everything(rows))
        return jnp.where(processed[:, None], filtered(row_logits, kept, is_random), logits)

    reported = lax.cond(jnp.any(processed), of_processed, lambda: logits)
    return describe_tokens(reported, token_ids, options=options)


def _temperatures(fields: Int[Array, "rows num_fields"]) -> tuple[Bool[Array, " rows"], Float[Array, " rows"]]:
    """True for rows that draw at random, and the inverse of each row's temperature; 1 in greedy rows."""
    temperature = as_float(fields[:, Field.TEMPERATURE])
    is_random = temperature > GREEDY_BELOW
    # The inverse of a huge temperature must not become 0: 0 * -inf is NaN.
    return is_random, jnp.where(is_random, jnp.maximum(1 / temperature, jnp.finfo(jnp.float32).tiny), 1.0)


def _describe(
    logits: Float[Array, "rows vocab"],
    token_ids: Int[Array, " rows"],
    normalised: Bool[Array, "rows 1"],
    top: tuple[Float[Array, "rows count"], Int[Array, "rows count"]],
    options: SamplerOptions,
) -> Sampled:
    """Values of the tokens and of the ids in `top`. normalised: True for log-probabilities, False for logits.

    top: (logits, ids) of the most likely ids, or of ids that a request names.
    """
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    normaliser = jnp.where(normalised, _logsumexp(logits, fixed=options.fixed_sums), 0.0)
    top_logits, top_ids = top
    return Sampled(
        token_ids,
        logprobs=(chosen - normaliser)[:, 0],
        ranks=jnp.sum(logits >= chosen, axis=-1, dtype=jnp.int32),  # as in vLLM: equal logits share the last rank
        top_ids=top_ids,
        top_logprobs=top_logits - normaliser,
    )


def _top_or_asked(
    logits: Float[Array, "rows vocab"],
    top: tuple[Float[Array, "rows count"], Int[Array, "rows count"]],
    fields: Int[Array, "rows num_fields"],
    extras: SamplingState,
) -> tuple[Float[Array, "rows count"], Int[Array, "rows count"]]:
    """`top`, but with the first `bias_ids` and their logits in rows with `Flag.BIAS_SCORES`."""
    asked = ((fields[:, Field.FLAGS] & Flag.BIAS_SCORES) > 0)[:, None]
    width = min(top[1].shape[1], extras.bias_ids.shape[1])

    def replaced() -> tuple[Array, Array]:
        ids = extras.bias_ids[:, :width]
        values = jnp.take_along_axis(logits, ids, axis=1, mode="clip")  # ids past the vocabulary are padding
        logits_of, ids_of = (
            old.at[:, :width].set(jnp.where(asked, new, old[:, :width]))
            for old, new in zip(top, (values, ids), strict=True)
        )
        return logits_of, ids_of

    return lax.cond(jnp.any(asked), replaced, lambda: top)


def _logsumexp(x: Float[Array, "rows vocab"], *, fixed: bool) -> Float[Array, "rows 1"]:
    if not fixed:
        return jax.nn.logsumexp(x, axis=-1, keepdims=True)
    peak = jnp.max(x, axis=-1, keepdims=True)
    return jnp.log(row_sums(jnp.exp(x - peak), fixed=True))[:, None] + peak


# -- before the temperature ---------------------------------------------------------------------------------------


def _process(
    logits: Float[Array, "rows vocab"],
    fields: Int[Array, "rows num_fields"],
    extras: SamplingState,
    processors: tuple[LogitsProcessor, ...],
) -> Float[Array, "rows vocab"]:
    """Apply masks, logit_bias, custom logits processors and penalties to the rows that have them."""
    rows, vocab = logits.shape

    def where_flagged(flag: Flag, change: Callable[[Array], Array], work: Array) -> Array:
        asked = (fields[:, Field.FLAGS] & flag) > 0
        return lax.cond(jnp.any(asked), lambda: jnp.where(asked[:, None], change(work), work), lambda: work)

    def mask(work: Array) -> Array:
        bits = (extras.masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        return jnp.where(bits.reshape(rows, -1)[:, :vocab] == 0, -jnp.inf, work)

    def add_bias(work: Array) -> Array:
        return work.at[jnp.arange(rows)[:, None], extras.bias_ids].add(extras.bias, mode="drop")

    # CTRL's repetition penalty (Keskar et al. 2019) counts prompt and output; OpenAI's two count only the output.
    def penalise(work: Array) -> Array:
        times = (extras.counts >> 1).astype(jnp.float32)
        repetition = parameter(fields, "repetition_penalty")[:, None]
        work = jnp.where(extras.counts > 0, jnp.where(work > 0, work / repetition, work * repetition), work)
        work -= parameter(fields, "frequency_penalty")[:, None] * times
        return work - parameter(fields, "presence_penalty")[:, None] * (times > 0)

    work = where_flagged(Flag.BIAS, add_bias, where_flagged(Flag.MASK, mask, logits))
    column = 0
    for number, process in enumerate(processors):
        count = len(process.parameters)
        asked = (fields[:, Field.PROCESSORS] >> number & 1)[:, None] > 0
        processed = jax.vmap(process)(work, *extras.custom[:, column : column + count].T)
        processed = jnp.where(work == -jnp.inf, -jnp.inf, processed)  # masked ids stay masked, even if multiplied by 0
        work, column = jnp.where(asked, processed, work), column + count
    return where_flagged(Flag.COUNTS, penalise, work)


def _uniforms(fields: Int[Array, "rows num_fields"], positions: Int[Array, " rows"]) -> Float[Array, " rows"]:
    """One number in [0, 1) for each row, of the key fold_in(fold_in(key(seed), sample index), position)."""

    def one(low: Array, high: Array, sample_index: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(jnp.stack([high, low]), impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
        return jax.random.uniform(key, dtype=jnp.float32)

    unsigned = lax.bitcast_convert_type(fields, jnp.uint32)
    return jax.vmap(one)(
        unsigned[:, Field.SEED_LOW], unsigned[:, Field.SEED_HIGH], fields[:, Field.SAMPLE_INDEX], positions
    )
