"""The programs that run after the forward pass: `sample`, `score` and `pool`.

Called by: `LastStageRunner` after the forward pass, or later if the plan waits for masks.
Owns: the way from hidden states to tokens, log-probabilities or vectors.
Never: runs a layer. Logits of a whole row leave the device only if a request asks for all of them.

They apply the lm_head to selected hidden states of `DeviceState.hidden`:
- `sample` draws one token for each row and writes it into the request table, where the next decode reads it;
- `sample_checked` draws one token after each token of a verify step, and keeps those that follow accepted drafts;
- `score` returns log-probabilities of known tokens, for prompt log-probabilities;
- `pool` returns one vector for each row: the normed hidden state of its last token, or a classifier's scores.

They are separate programs because a forward program takes seconds to compile: one per shape is enough, not one per pair
of shapes. A step that only computes chunks of prompts runs none, unless
a request asks for scores or vectors of prompt tokens. While the forward pass runs, the host computes masks
of grammars that depend on the token before.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from jpaged.engine.step_plan import SamplerVariant
from jpaged.models import decoder
from jpaged.models.sharding import WHOLE, Shards
from jpaged.models.spec import DecoderSpec, Params, WeightLayout
from jpaged.runtime.placement import Placement
from jpaged.runtime.sampling import vocab_shards
from jpaged.runtime.sampling.sampler import Sampled, SamplerOptions, describe_tokens, sample_tokens, score_tokens
from jpaged.runtime.state import DeviceState, Field, SamplingState, adapter_slots
from jpaged.runtime.store.stored_programs import ProgramStore, compile_program

# Leaves of the parameter tree that the lm_head may read.
LM_HEAD_PARAMS = ("final_norm", "final_norm_bias", "project_out", "score", "lm_head", "lm_head_bias", "embed")


@dataclasses.dataclass(frozen=True)
class SampleShape:
    """Key of a `sample` program."""

    rows: int
    variant: SamplerVariant
    checks: bool = False  # for a verify step: `rows` are its tokens

    def __str__(self) -> str:
        return f"sample {self.variant.name.lower()} {self.rows} {'drafts' if self.checks else 'rows'}"


@dataclasses.dataclass(frozen=True)
class ScoreShape:
    """Key of a `score` program."""

    tokens: int
    processed: bool = False  # it can score by the distribution that a row samples from

    def __str__(self) -> str:
        return f"score {self.tokens} tokens" + ", processed" * self.processed


@dataclasses.dataclass(frozen=True)
class PoolShape:
    """Key of a `pool` program."""

    rows: int

    def __str__(self) -> str:
        return f"pool {self.rows} rows"


OutputShape = SampleShape | ScoreShape | PoolShape
Table = Int[Array, "table_rows num_fields"]


def lm_head_params(spec: DecoderSpec, params: Params) -> Params:
    """The leaves of a parameter tree that the lm_head reads. Fewer arguments make a call faster."""
    tied = spec.tie_embeddings and not spec.pools
    read = {name: params[name] for name in LM_HEAD_PARAMS if name in params and (name != "embed" or tied)}
    pool = params.get("adapters", {}).get("lm_head")
    return read if pool is None else read | {"adapters": {"lm_head": pool}}


def uses_extras(shape: OutputShape) -> bool:
    """True if a program reads the extras of sampling. Others get None: fewer arguments make a call faster."""
    if isinstance(shape, ScoreShape):
        return shape.processed
    return isinstance(shape, SampleShape) and shape.variant is SamplerVariant.FULL


def score_lines(shape: ScoreShape, *, adapters: bool) -> int:
    """Lines of the last argument of `score`: ids, indices in `hidden`, and what the program needs of these two.

    With adapters their slots. In a processed program the rows of the request table, -1: the model's own distribution.
    """
    return 2 + adapters + shape.processed


# The functions have the same arguments and return (table, sampling, result), so the runner calls all alike.
# params: from `lm_head_params`. mask: token ids that the tokenizer has; None = all. sampling: see `uses_extras`.
# `table` and `sampling` are donated. The last argument is int32[2, N]; its second line indexes `hidden`. `sample` and
# `pool` use `num_rows` columns of `DeviceState.output_rows`. Only `score`, and vectors of tokens, need an upload.
# `sample_checked` takes `Batch.checked` in place of the last argument, and masks of tokens.


def sample(
    params: Params,
    mask: Bool[Array, " vocab"] | None,
    table: Table,
    sampling: SamplingState | None,
    hidden: Float[Array, "tokens hidden"],
    output_rows: Int[Array, "2 program_rows"],
    *,
    num_rows: int,
    spec: DecoderSpec,
    layout: WeightLayout,
    variant: SamplerVariant,
    options: SamplerOptions,
    shards: Shards = WHOLE,
) -> tuple[Table, SamplingState | None, Int[Array, "rows columns"]]:
    """Sample one token for each row. Returns `Sampled.packed`. Tokens of padding rows are not written to the table."""
    rows, last_token = output_rows[:, :num_rows]
    logits = _lm_head(spec, params, hidden, last_token, _slots(params, table, rows), layout, shards)
    rows = jnp.where(rows < 0, table.shape[0], rows)  # a negative index would count from the end
    fields = jnp.take(table, rows, axis=0, mode="clip")
    extras = None
    if sampling is not None:
        extras = jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), sampling)

    sampled = _choose(logits, mask, (fields, None, extras), variant, options, spec, shards)
    if sampling is not None:
        sampling = sampling.replace(counts=sampling.counts.at[rows, sampled.token_ids].add(2, mode="drop"))
    return table.at[rows, Field.LAST_TOKEN].set(sampled.token_ids, mode="drop"), sampling, sampled.packed()


def sample_checked(
    params: Params,
    mask: Bool[Array, " vocab"] | None,
    table: Table,
    sampling: SamplingState | None,
    hidden: Float[Array, "capacity hidden"],
    checked: Int[Array, "3 tokens"],
    masks: UInt[Array, "tokens words"] | None = None,
    *,
    max_drafts: int,
    spec: DecoderSpec,
    layout: WeightLayout,
    variant: SamplerVariant,
    options: SamplerOptions,
    shards: Shards = WHOLE,
) -> tuple[Table, SamplingState | None, Int[Array, "tokens columns"]]:
    """Sample after each token of a verify step, and keep the samples that follow accepted drafts.

    The sample at a position has the position's own random number, and is what a plain step would sample there. A draft
    is accepted if it equals the sample before it. So the kept tokens are those of plain decoding.

    checked: see `Batch`.
    masks:   uint32[tokens, words + 1], only with extras. Where the last word is not 0, the others replace the row's
             mask.
    Returns `Sampled.packed` of all tokens, with one more column: 1 if the sample is kept.
    """
    (rows, offsets, drafts), capacity = checked, table.shape[0]
    real, token = rows < capacity, jnp.arange(len(rows))
    slots = _slots(params, table, rows)
    logits = _lm_head(spec, params, hidden, jnp.where(real, token, -1), slots, layout, shards)
    fields = jnp.take(table, rows, axis=0, mode="clip")
    extras = None
    if sampling is not None:
        extras = jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), sampling)
        extras = _after_drafts(extras, offsets, drafts, max_drafts, spec.vocab_size)
        if masks is not None:
            extras = extras.replace(masks=jnp.where(masks[:, -1:] > 0, masks[:, :-1], extras.masks))
    length = fields[:, Field.LENGTH] + offsets + 1
    sampled = _choose(logits, mask, (fields, length, extras), variant, options, spec, shards)

    first = offsets == 0
    before = jnp.pad(sampled.token_ids[:-1], (1, 0), constant_values=-1)  # the sample that a draft must equal
    rejected = jnp.cumsum(~first & ((drafts < 0) | (drafts != before)))
    rejected_before = jnp.take(rejected, token - offsets, mode="clip")
    kept = real & (rejected == rejected_before)  # no draft of the row up to this one is rejected
    last = kept & ~jnp.pad((kept & ~first)[1:], (0, 1))
    last_rows = jnp.where(last, rows, capacity)
    table = table.at[last_rows, Field.LAST_TOKEN].set(sampled.token_ids, mode="drop")
    table = table.at[last_rows, Field.LENGTH].set(length, mode="drop")
    if sampling is not None:
        kept_rows = jnp.where(kept, rows, capacity)
        sampling = sampling.replace(counts=sampling.counts.at[kept_rows, sampled.token_ids].add(2, mode="drop"))
    return table, sampling, jnp.concatenate([sampled.packed(), kept[:, None].astype(jnp.int32)], axis=1)


def _after_drafts(
    extras: SamplingState, offsets: Int[Array, " tokens"], drafts: Int[Array, " tokens"], max_drafts: int, vocab: int
) -> SamplingState:
    """Extras of each token of a verify step. Its counts include the drafts of its row up to this token."""
    token, offset = jnp.arange(len(offsets))[:, None], offsets[:, None]
    draft = jnp.arange(1, max_drafts + 1)  # number of a draft in its row
    ids = jnp.take(drafts, token - offset + draft, mode="clip")
    counts = (draft <= offset) & (ids >= 0)
    ids = jnp.where(counts, ids, vocab)
    return extras.replace(counts=extras.counts.at[token, ids].add(2, mode="drop"))


def _choose(
    logits: Float[Array, "rows output"], mask: Bool[Array, " vocab"] | None,
    of_rows: tuple[Array, Array | None, SamplingState | None], variant: SamplerVariant, options: SamplerOptions,
    spec: DecoderSpec, shards: Shards,
) -> Sampled:  # fmt: skip
    """`sample_tokens` on one device or several.

    of_rows: its `fields`, `positions` and `extras`. positions: None: the lengths in `fields`.
    """

    def choose(logits: Array, of_rows: tuple[Array, Array | None, SamplingState | None]) -> Sampled:
        fields, positions, extras = of_rows
        positions = fields[:, Field.LENGTH] if positions is None else positions
        return sample_tokens(logits, fields, positions, mask, extras, variant=variant, options=options)

    if shards.count == 1:
        return choose(logits, of_rows)
    if variant is SamplerVariant.GREEDY:
        return vocab_shards.greedy(logits, mask, vocab=spec.vocab_size, shards=shards)
    return vocab_shards.by_rows(logits, of_rows, choose, vocab=spec.vocab_size, shards=shards)


def score(
    params: Params,
    mask: Bool[Array, " vocab"] | None,
    table: Table,
    sampling: SamplingState | None,
    hidden: Float[Array, "tokens hidden"],
    scored: Int[Array, "lines scored"],
    masks: UInt[Array, "scored words"] | None = None,
    *,
    spec: DecoderSpec,
    layout: WeightLayout,
    options: SamplerOptions,
    shards: Shards = WHOLE,
) -> tuple[Table, SamplingState | None, Int[Array, "scored columns"]]:
    """Log-probabilities of known tokens. scored: see `score_lines`. Returns `Sampled.packed`.

    A processed program counts the tokens of rows in their `SamplingState.counts`, as if the rows had sampled them.
    It alone has masks, as `sample_checked`.
    """
    slots = scored[2] if "adapters" in params else None
    logits = _lm_head(spec, params, hidden, scored[1], slots, layout, shards)
    of_tokens: Any = scored[0]
    if sampling is not None:
        ids, rows = scored[0], scored[-1]
        extras = jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), sampling)
        before = jnp.tril(rows[:, None] == rows, -1)  # of token i: j is an earlier token of its row
        seen = jnp.where(before, ids, spec.vocab_size)
        extras = extras.replace(counts=extras.counts.at[jnp.arange(len(ids))[:, None], seen].add(2, mode="drop"))
        if masks is not None:
            extras = extras.replace(masks=jnp.where(masks[:, -1:] > 0, masks[:, :-1], extras.masks))
        of_tokens = ids, jnp.take(table, rows, axis=0, mode="clip"), rows >= 0, extras
        counted = jnp.where(rows < 0, table.shape[0], rows)  # a negative index would count from the end
        sampling = sampling.replace(counts=sampling.counts.at[counted, ids].add(2, mode="drop"))

    def describe(logits: Array, of_tokens: Any) -> Sampled:
        if sampling is None:
            return describe_tokens(logits, of_tokens, options=options)
        ids, fields, processed, extras = of_tokens
        return score_tokens(logits, ids, fields, processed, mask, extras, options=options)

    if shards.count == 1:
        return table, sampling, describe(logits, of_tokens).packed()
    described = vocab_shards.by_rows(logits, of_tokens, describe, vocab=spec.vocab_size, shards=shards)
    return table, sampling, described.packed()


def pool(
    params: Params,
    mask: Bool[Array, " vocab"] | None,
    table: Table,
    sampling: SamplingState | None,
    hidden: Float[Array, "tokens hidden"],
    output_rows: Int[Array, "2 program_rows"],
    *,
    num_rows: int,
    spec: DecoderSpec,
    layout: WeightLayout,
    shards: Shards = WHOLE,
) -> tuple[Table, SamplingState | None, Float[Array, "rows output"]]:
    """One vector for each row, including padding."""
    return table, sampling, _lm_head(spec, params, hidden, output_rows[1, :num_rows], None, layout, shards)


def _slots(params: Params, table: Table, rows: Int[Array, " rows"]) -> Int[Array, " rows"] | None:
    """Slot of the adapter of each row of the table; None: the lm_head has no adapters."""
    return adapter_slots(jnp.take(table, rows, axis=0, mode="clip")) if "adapters" in params else None


def _lm_head(
    spec: DecoderSpec, params: Params, hidden: Float[Array, "tokens hidden"], index: Int[Array, " rows"],
    slots: Int[Array, " rows"] | None, layout: WeightLayout, shards: Shards,
) -> Float[Array, "rows output"]:  # fmt: skip
    """The lm_head of the hidden states `index`. slots: of each row's adapter; None: there are no adapters."""
    rows, num_rows = jnp.take(hidden, index, axis=0, mode="clip"), jnp.sum(index >= 0, dtype=jnp.int32)
    out = decoder.lm_head(spec, params, rows, layout=layout, num_rows=num_rows, shards=shards, adapter_slots=slots)
    return out if shards.count > 1 else out[:, : spec.output_size]  # the vocabulary may be padded


def compile_output(
    params: Params,
    mask: jax.Array | jax.ShapeDtypeStruct | None,
    state: DeviceState,
    shape: OutputShape,
    *,
    spec: DecoderSpec,
    layout: WeightLayout,
    options: SamplerOptions,
    placement: Placement,
    max_drafts: int = 0,
    store: ProgramStore | None = None,
) -> jax.stages.Compiled:
    """Compile a `sample`, `score` or `pool` program from arrays or ShapeDtypeStructs. params: the whole tree."""
    call: functools.partial[Any]
    rows: Any = state.output_rows
    shards, more = placement.shards, ()
    match shape:
        case SampleShape(size, variant, False):
            call = functools.partial(
                sample, num_rows=size, spec=spec, layout=layout, variant=variant, options=options, shards=shards
            )
        case SampleShape(size, variant, True):
            call = functools.partial(
                sample_checked, max_drafts=max_drafts, spec=spec, layout=layout, variant=variant, options=options,
                shards=shards,
            )  # fmt: skip
            rows = placement.shape((3, size), np.int32)
            if variant is SamplerVariant.FULL:
                more = (placement.shape((size, 1 + state.sampling.masks.shape[1]), np.uint32),)
        case ScoreShape(size):
            call = functools.partial(score, spec=spec, layout=layout, options=options, shards=shards)
            rows = placement.shape((score_lines(shape, adapters="adapters" in params), size), np.int32)
            if shape.processed:
                more = (placement.shape((size, 1 + state.sampling.masks.shape[1]), np.uint32),)
        case PoolShape(size):
            call = functools.partial(pool, num_rows=size, spec=spec, layout=layout, shards=shards)
    sampling = state.sampling if uses_extras(shape) else None
    arguments = (lm_head_params(spec, params), mask, state.table, sampling, state.hidden, rows, *more)
    if options.processors:
        store = None  # a stored program's key covers jpaged's sources, but not the caller's functions
    run = placement.on_each_device(call, arguments, None)
    return compile_program(
        run, arguments, donate=(2, 3), store=store, compiler_options=placement.compiler_options
    )  # fmt: skip
