"""The forward pass of a step: from the packed plan to one hidden state per token. `output_programs` has the rest.

1. Unpack: block-table changes, restarted rows and forks go into the request table.
2. Build ids, positions, KV slots and lengths from the table: the host never sends them.
3. Forward: the decoder over all tokens, writing keys and values into the pages and attending through block tables.
   Each token's hidden state stays in `DeviceState.hidden`, where the output programs read it.

`state` is donated: pages and table are updated in place.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.engine.step_plan import StepPlan
from jpaged.kv_groups import KVGroups
from jpaged.models import decoder
from jpaged.models.sharding import WHOLE, Shards
from jpaged.models.spec import ALONE, AttentionOptions, DecoderSpec, Params, Stage, WeightLayout
from jpaged.runtime.placement import Placement
from jpaged.runtime.state import NUM_FIELDS, DeviceState, Field, Leaf, SamplingState, formats, row_values
from jpaged.runtime.stored_programs import ProgramStore, compile_program
from pallas_kernels import KVPages, paged_attention, write_kv, write_qkv
from pallas_kernels.write_kv import matching_write

# Block-table changes that fit into a packed plan in addition to those that its own tokens can need.
SPARE_UPDATES = 64

# `DeviceState` without `sampling`: pages, table, blocks, hidden, output_rows.
StateArrays = tuple[tuple[tuple[Leaf, Leaf | None], ...], Leaf, Leaf, Leaf, Leaf]


@dataclasses.dataclass(frozen=True)
class ForwardShape:
    """Key of a forward program."""

    is_decode: bool  # every row computes one token, which it reads from the table; then tokens == rows
    tokens: int
    rows: int
    block_size: int
    num_kv_groups: int = 1

    @property
    def max_updates(self) -> int:
        """Block-table entries that fit: blocks that the tokens can fill, one per row for a begun block, and a spare."""
        return self.num_kv_groups * (self.tokens // self.block_size + self.rows) + SPARE_UPDATES

    @functools.cached_property  # reading it takes 8 us otherwise, at every step
    def cuts(self) -> dict[str, slice]:
        """Slice of each part in the packed int32 array."""
        sizes = {"rows": self.rows, "output_rows": 2 * self.rows, "updates": 3 * self.max_updates}
        if not self.is_decode:
            sizes |= {
                "num_decodes": 1,
                "num_tokens": self.rows,
                "init_rows": self.rows,
                "init_values": self.rows * NUM_FIELDS,
                "prompt_tokens": self.tokens,
            }
        ends = np.cumsum(list(sizes.values()))
        return {name: slice(int(end) - size, int(end)) for (name, size), end in zip(sizes.items(), ends, strict=True)}

    @property
    def packed_size(self) -> int:
        """Length of the packed plan, in int32s."""
        return max(cut.stop for cut in self.cuts.values())

    def __str__(self) -> str:
        return f"decode {self.rows} rows" if self.is_decode else f"mixed {self.tokens} tokens"


def block_updates(plan: StepPlan, width: int) -> np.ndarray:
    """int32[U, 3], (row, column, block): entries of `DeviceState.blocks` that the plan changes.

    Includes those of restarted rows. width: columns of one KV group.
    """
    changed = plan.block_updates
    if plan.row_inits:
        inits = (np.insert(init.blocks, 0, init.row, axis=1) for init in plan.row_inits)
        changed = np.concatenate([changed, *inits])
    updates = np.empty((len(changed), 3), np.int32)
    if len(changed):
        rows, kv_groups, indices, blocks = changed.T
        updates[:, 0], updates[:, 1], updates[:, 2] = rows, kv_groups * width + indices, blocks
    return updates


def pack(plan: StepPlan, updates: np.ndarray, shape: ForwardShape) -> np.ndarray:
    """int32[packed_size]: the plan as the forward program reads it. updates: int32[U, 3], U <= shape.max_updates."""
    packed = np.full(shape.packed_size, -1, np.int32)  # -1 is padding
    cuts, rows = shape.cuts, len(plan.rows)
    packed[cuts["rows"]][:rows] = plan.rows
    _pack_output_rows(plan, packed[cuts["output_rows"]].reshape(2, shape.rows))
    packed[cuts["updates"]][: updates.size] = updates.ravel()
    if not shape.is_decode:
        packed[cuts["num_decodes"]] = plan.num_decodes
        counts = packed[cuts["num_tokens"]]
        counts[:] = 0
        counts[:rows] = plan.num_tokens
        for i, init in enumerate(plan.row_inits):
            packed[cuts["init_rows"]][i] = init.row
            packed[cuts["init_values"]][i * NUM_FIELDS : (i + 1) * NUM_FIELDS] = row_values(init)
        prompt = packed[cuts["prompt_tokens"]]
        prompt[:] = 0
        prompt[plan.num_decodes : plan.num_decodes + len(plan.prompt_tokens)] = plan.prompt_tokens
    return packed


def _pack_output_rows(plan: StepPlan, packed: np.ndarray) -> None:
    """Write `DeviceState.output_rows`. packed: int32[2, rows], filled with padding."""
    count = len(plan.rows)
    if plan.decodes_only:  # each row has one token
        packed[0, :count] = plan.rows
        packed[1, :count] = np.arange(count)
        return
    last_token = np.cumsum(plan.num_tokens, dtype=np.int32) - 1
    first_fork = count - len(plan.forked_from)
    last_token[first_fork:] = last_token[plan.forked_from]
    count = plan.num_samples
    packed[0, :count] = plan.rows[plan.samples]
    packed[1, :count] = last_token[plan.samples]


@flax.struct.dataclass
class KVGroupRows:
    """KV of the step's rows in one KV group, as `PagedAttend` reads it. Padding tokens have slot -1."""

    block_tables: Leaf     # int32[rows, width]
    slots: Leaf            # int32[tokens]
    context_lens: Leaf     # int32[rows]
    query_start_loc: Leaf  # int32[rows + 1]


@flax.struct.dataclass
class Batch:
    """Inputs of the decoder, built on the device. Padding rows have no tokens."""

    rows: Leaf     # int32[rows]  row of the table; padding rows point past its end
    lengths: Leaf  # int32[rows]  tokens after the step; also the position of the sampled token
    kv_groups: tuple[KVGroupRows, ...]
    real: Leaf       # bool[tokens]  False: padding
    token_ids: Leaf  # int32[tokens]
    positions: Leaf  # int32[tokens]
    rope_lens: Leaf  # int32[tokens]  max(the row's rope_len, position + 1)


def build_batch(state: DeviceState, packed: Int[Array, " packed"], shape: ForwardShape) -> tuple[DeviceState, Batch]:
    """Unpack the plan, apply its changes to the table, and build the inputs of the decoder."""
    part = {name: packed[cut] for name, cut in shape.cuts.items()}
    capacity = state.table.shape[0]

    def drop_padding(rows: Array) -> Array:
        """Let padding (-1) point past the end of the table: a negative index would count from the end."""
        return jnp.where(rows < 0, capacity, rows)

    updates = part["updates"].reshape(-1, 3)
    blocks = state.blocks.at[drop_padding(updates[:, 0]), updates[:, 1]].set(updates[:, 2], mode="drop")
    table = state.table
    rows = drop_padding(part["rows"])
    if shape.is_decode:
        num_tokens = (rows < capacity).astype(jnp.int32)
    else:
        values = part["init_values"].reshape(-1, NUM_FIELDS)
        table = table.at[drop_padding(part["init_rows"])].set(values, mode="drop")
        num_tokens = part["num_tokens"]

    fields = jnp.take(table, rows, axis=0, mode="clip")
    block_tables = jnp.take(blocks, rows, axis=0, mode="clip")
    length = fields[:, Field.LENGTH]
    query_start_loc = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(num_tokens, dtype=jnp.int32)])
    token = jnp.arange(shape.tokens)
    if shape.is_decode:
        token_row, real, positions = token, num_tokens > 0, length
        token_ids = fields[:, Field.LAST_TOKEN]
    else:
        token_row = jnp.minimum(jnp.sum(token[:, None] >= query_start_loc[None, 1:], axis=1), shape.rows - 1)
        real = token < query_start_loc[-1]
        positions = length[token_row] + token - query_start_loc[token_row]
        from_table = token_row < part["num_decodes"][0]
        token_ids = jnp.where(from_table, fields[token_row, Field.LAST_TOKEN], part["prompt_tokens"])
    positions = jnp.where(real, positions, 0)
    context_lens = jnp.where(num_tokens > 0, length + num_tokens, 0)
    kv_groups = []
    for tables in jnp.split(block_tables, shape.num_kv_groups, axis=1):
        block = tables[token_row, jnp.minimum(positions // shape.block_size, tables.shape[1] - 1)]
        slots = jnp.where(real, block * shape.block_size + positions % shape.block_size, -1)
        kv_groups.append(KVGroupRows(tables, slots, context_lens, query_start_loc))
    batch = Batch(
        rows=rows,
        lengths=length + num_tokens,
        kv_groups=tuple(kv_groups),
        real=real,
        token_ids=jnp.where(real, token_ids, 0),
        positions=positions,
        rope_lens=jnp.maximum(fields[token_row, Field.ROPE_LEN], positions + 1),
    )
    return state.replace(table=table, blocks=blocks), batch


@dataclasses.dataclass(frozen=True)
class PagedAttend:
    """The decoder's `attend` for serving: writes keys and values into the pages, attends through block tables."""

    max_query_len: int
    implementation: str
    shards: Shards = WHOLE

    def __call__(
        self, projection: decoder.Projection, pages: KVPages, metadata: KVGroupRows, options: AttentionOptions,
        sinks: Float[Array, " heads"] | None,
    ) -> tuple[Float[Array, "tokens heads head_dim"], KVPages]:  # fmt: skip
        write = matching_write(self.implementation)
        if isinstance(projection.product, tuple):
            q, k, v = projection.finish()
            pages = write_kv(pages, k, v, metadata.slots, implementation=write)
        else:
            q, pages = write_qkv(
                pages, projection.product, metadata.slots, bias=projection.bias, cos=projection.cos,
                sin=projection.sin, q_norm=projection.q_norm, k_norm=projection.k_norm, norm_eps=projection.norm_eps,
                implementation=write,
            )  # fmt: skip
        slopes = None
        if options.alibi_slopes is not None:
            every, heads = jnp.array(options.alibi_slopes, jnp.float32), q.shape[1]
            slopes = lax.dynamic_slice_in_dim(every, self.shards.first(heads), heads)
        out = paged_attention(
            q, pages, metadata.block_tables, metadata.context_lens, metadata.query_start_loc,
            scale=options.scale, max_query_len=self.max_query_len, sliding_window=options.window,
            logit_softcap=options.softcap, sinks=sinks, alibi_slopes=slopes, implementation=self.implementation,
        )  # fmt: skip
        return out, pages


def forward(
    params: Params,
    state: DeviceState,
    packed: Int[Array, " packed"],
    hidden: Float[Array, "tokens hidden"] | None = None,
    *,
    spec: DecoderSpec,
    kv_groups: KVGroups,
    layout: WeightLayout,
    shape: ForwardShape,
    implementation: str,
    gated_dot: str | None = None,
    shards: Shards = WHOLE,
    stage: Stage = ALONE,
) -> tuple[DeviceState, Int[Array, ""] | Float[Array, "tokens hidden"]]:
    """Run the decoder over one plan, or the layers of one pipeline stage. Donate `state`.

    hidden: from the stage before; None in the first stage.
    Returns the state with the new KV, lengths and hidden states (before the final norm), and the number of tokens. The
    host waits for that number in steps that sample nothing. A stage that is not the last returns its hidden states, in
    place of that number.
    """
    state, batch = build_batch(state, packed, shape)
    output_rows = packed[shape.cuts["output_rows"]].reshape(2, shape.rows)
    num_tokens = jnp.sum(batch.real, dtype=jnp.int32)
    x, pages = decoder.decode(
        spec, params, batch.token_ids, batch.positions, state.pages, batch.kv_groups,
        PagedAttend(1 if shape.is_decode else shape.tokens, implementation, shards),
        layout=layout, rope_lens=batch.rope_lens, places=kv_groups.places,
        real=batch.real if spec.experts is not None else None, num_tokens=num_tokens,
        gated_dot=gated_dot, shards=shards, hidden=hidden, first_layer=stage.first_layer,
    )  # fmt: skip
    state = state.with_pages(pages).replace(
        table=state.table.at[batch.rows, Field.LENGTH].set(batch.lengths, mode="drop")
    )
    if not stage.is_last:
        return state, x
    missing = state.output_rows.shape[1] - shape.rows
    state = state.replace(
        hidden=jax.lax.dynamic_update_slice(state.hidden, x, (0, 0)),
        output_rows=jnp.pad(output_rows, ((0, 0), (0, missing)), constant_values=-1),
    )
    return state, num_tokens


def upload_row(state: DeviceState, packed: Int[Array, " row_and_table"]) -> DeviceState:
    """Set one row's block tables. packed: the row, then the block of every column. Donate `state`.

    For changes that do not fit into the packed plan: a prefix hit or a resume of a long request.
    """
    return state.replace(blocks=state.blocks.at[packed[0]].set(packed[1:], mode="drop"))


def forward_of_arrays(
    weights: tuple[Array, ...], arrays: StateArrays, packed: Int[Array, " packed"],
    hidden: Float[Array, "tokens hidden"] | None = None, *, weight_tree: Any, page_v_dim: int | None, **options: Any,
) -> tuple[StateArrays, Array]:  # fmt: skip
    """`forward` as it is compiled: weights and state are plain tuples. See `run_forward`."""
    params, no_extras = jax.tree.unflatten(weight_tree, weights), cast(SamplingState, None)
    state = DeviceState(*arrays, sampling=no_extras, page_v_dim=page_v_dim)
    state, result = forward(params, state, packed, hidden, **options)
    return state_arrays(state), result


def state_arrays(state: DeviceState) -> StateArrays:
    """The arrays that a forward program takes and returns. Without the extras of sampling: they are not used."""
    return state.page_arrays, state.table, state.blocks, state.hidden, state.output_rows


def flat_weights(params: Params) -> tuple[jax.Array, ...]:
    """The weights as a forward program takes them."""
    return tuple(jax.tree.leaves(params))


def run_forward(
    run: Callable[..., Any], weights: tuple[jax.Array, ...], state: DeviceState, packed: np.ndarray | jax.Array,
    *hidden: jax.Array,
) -> tuple[DeviceState, jax.Array]:  # fmt: skip
    """Run a program of `compile_forward` on a state, which is donated. weights: of `flat_weights`.

    hidden: nothing in the first pipeline stage, one array in others. Returns as `forward`.

    A call flattens its arguments and builds the tree of its results, every time. Plain tuples make a call with 169
    arrays 38 us faster than dicts of weights and a `DeviceState`: 141 in place of 179 us.
    """
    arrays, result = run(weights, state_arrays(state), packed, *hidden)
    return DeviceState(*arrays, sampling=state.sampling, page_v_dim=state.page_v_dim), result


def compile_forward(
    params: Params,
    state: DeviceState,
    shape: ForwardShape,
    *,
    spec: DecoderSpec,
    kv_groups: KVGroups,
    layout: WeightLayout,
    implementation: str,
    placement: Placement,
    gated_dot: str | None = None,
    store: ProgramStore | None = None,
    stage: Stage = ALONE,
) -> jax.stages.Compiled:
    """Compile a forward program from arrays or ShapeDtypeStructs, for `run_forward`.

    implementation: of attention. gated_dot: implementation of `pallas_kernels.gated_dot`; None: the best one.
    """
    call = functools.partial(
        forward_of_arrays, weight_tree=jax.tree.structure(params), page_v_dim=state.page_v_dim, spec=spec,
        kv_groups=kv_groups, layout=layout, shape=shape, implementation=implementation, gated_dot=gated_dot,
        shards=placement.shards, stage=stage,
    )  # fmt: skip
    packed = placement.shape((shape.packed_size,), np.int32)
    arguments: tuple[Any, ...] = (flat_weights(params), state_arrays(state), packed)
    if not stage.is_first:
        arguments += (placement.shape((shape.tokens, spec.hidden_size), state.hidden.dtype),)
    call = placement.on_each_device(call, arguments, (state_arrays(state), None))
    return compile_program(
        call, arguments, donate=(1,),
        out_shardings=(state_arrays(formats(state)), None), store=store, compiler_options=placement.compiler_options,
    )  # fmt: skip
