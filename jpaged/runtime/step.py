"""The forward half of a step: from the packed plan to the hidden state of every token. `heads` has the other half.

1. Unpack: block-table changes, restarted rows and forks go into the request table.
2. Build ids, positions, KV slots and lengths from the table: the host never sends them.
3. Forward: the decoder over all tokens, writing keys and values into the pages and attending through block tables.
   What the layers give of each token stays in the state, where a head finds it.

`state` is donated: pages and table are updated in place.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpaged.engine.step_plan import StepPlan
from jpaged.kv_groups import KVGroups
from jpaged.models import decoder
from jpaged.models.spec import AttentionOptions, DecoderSpec, WeightLayout
from jpaged.runtime.state import NUM_FIELDS, DeviceState, Field, formats, row_values
from pallas_kernels import KVPages, paged_attention, write_kv, write_qkv
from pallas_kernels.write_kv import matching_write

# Block-table changes that a packed plan has room for beyond those its own tokens can need.
SPARE_UPDATES = 64


@dataclasses.dataclass(frozen=True)
class ForwardShape:
    """Shapes of one compiled forward program: a key of the program table."""

    is_decode: bool  # every row is one token, taken from the table; then tokens == rows
    tokens: int      # token places
    rows: int        # row places
    block_size: int
    num_groups: int = 1  # block tables a row

    @property
    def max_updates(self) -> int:
        """Block-table entries that fit: what the tokens can fill, one a row for a begun block, and some to spare."""
        return self.num_groups * (self.tokens // self.block_size + self.rows) + SPARE_UPDATES

    @property
    def cuts(self) -> dict[str, slice]:
        """Where each part lies in the packed int32 array."""
        sizes = {"rows": self.rows, "updates": 3 * self.max_updates}
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
        """int32s in the packed plan."""
        return max(cut.stop for cut in self.cuts.values())

    def __str__(self) -> str:
        return f"decode {self.rows} rows" if self.is_decode else f"mixed {self.tokens} tokens"


def block_updates(plan: StepPlan, width: int) -> np.ndarray:
    """int32[U, 3], (row, column, block): all entries of `DeviceState.blocks` that the plan changes.

    Those of restarted rows included. width: columns of one group.
    """
    changed = plan.block_updates
    if plan.row_inits:
        inits = (np.insert(init.blocks, 0, init.row, axis=1) for init in plan.row_inits)
        changed = np.concatenate([changed, *inits])
    return np.stack([changed[:, 0], changed[:, 1] * width + changed[:, 2], changed[:, 3]], axis=1, dtype=np.int32)


def pack(plan: StepPlan, updates: np.ndarray, shape: ForwardShape) -> np.ndarray:
    """int32[packed_size]: the plan as the step reads it. updates: int32[U, 3], at most shape.max_updates."""
    packed = np.full(shape.packed_size, -1, np.int32)  # -1: padding
    cuts, rows = shape.cuts, len(plan.rows)
    packed[cuts["rows"]][:rows] = plan.rows
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


@flax.struct.dataclass
class GroupRows:
    """Where a group's layers find the rows' keys and values: what `PagedAttend` needs. Padding tokens have slot -1."""

    block_tables: Any     # int32[rows, width]
    slots: Any            # int32[tokens]
    context_lens: Any     # int32[rows]
    query_start_loc: Any  # int32[rows + 1]


@flax.struct.dataclass
class Batch:
    """What the step computes, built on the device. Padding rows have no tokens."""

    rows: Any       # int32[rows]  row of the table; padding points past its end
    lengths: Any    # int32[rows]  tokens after the step: the position of what is sampled
    groups: Any     # a GroupRows for each group of layers
    real: Any       # bool[tokens]  False: padding
    token_ids: Any  # int32[tokens]
    positions: Any  # int32[tokens]
    rope_lens: Any  # int32[tokens]  max(the row's rope_len, position + 1)


def build_batch(state: DeviceState, packed: Int[Array, " packed"], shape: ForwardShape) -> tuple[DeviceState, Batch]:
    """Unpack the plan, apply its changes to the table, and build everything the forward pass needs."""
    part = {name: packed[cut] for name, cut in shape.cuts.items()}
    capacity = state.table.shape[0]

    def drop_padding(rows: Array) -> Array:
        """Padding (-1) must point past the end: a negative index would count from it."""
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
    groups = []
    for group_tables in jnp.split(block_tables, shape.num_groups, axis=1):
        block = group_tables[token_row, jnp.minimum(positions // shape.block_size, group_tables.shape[1] - 1)]
        slots = jnp.where(real, block * shape.block_size + positions % shape.block_size, -1)
        groups.append(GroupRows(group_tables, slots, context_lens, query_start_loc))
    batch = Batch(
        rows=rows,
        lengths=length + num_tokens,
        groups=tuple(groups),
        real=real,
        token_ids=jnp.where(real, token_ids, 0),
        positions=positions,
        rope_lens=jnp.maximum(fields[token_row, Field.ROPE_LEN], positions + 1),
    )
    return state.replace(table=table, blocks=blocks), batch


@dataclasses.dataclass(frozen=True)
class PagedAttend:
    """The decoder's `attend` when serving: write keys and values into the pages, attend through block tables."""

    max_query_len: int
    implementation: str

    def __call__(
        self, projection: decoder.Projection, pages: KVPages, metadata: GroupRows, options: AttentionOptions,
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
        slopes = None if options.alibi_slopes is None else jnp.array(options.alibi_slopes, jnp.float32)
        out = paged_attention(
            q, pages, metadata.block_tables, metadata.context_lens, metadata.query_start_loc,
            scale=options.scale, max_query_len=self.max_query_len, sliding_window=options.window,
            logit_softcap=options.softcap, sinks=sinks, alibi_slopes=slopes, implementation=self.implementation,
        )  # fmt: skip
        return out, pages


def forward(
    params: Any,
    state: DeviceState,
    packed: Int[Array, " packed"],
    *,
    spec: DecoderSpec,
    groups: KVGroups,
    layout: WeightLayout,
    shape: ForwardShape,
    implementation: str,
) -> tuple[DeviceState, Int[Array, ""]]:
    """The model over one plan. Donate `state`.

    Gives the state with the new KV, rows' lengths and hidden states (before the final norm), and the number of tokens:
    something to wait for where nothing is sampled.
    """
    state, batch = build_batch(state, packed, shape)
    hidden, pages = decoder.decode(
        spec, params, batch.token_ids, batch.positions, state.pages, batch.groups,
        PagedAttend(1 if shape.is_decode else shape.tokens, implementation),
        layout=layout, rope_lens=batch.rope_lens, places=groups.places,
        real=batch.real if spec.experts is not None else None,
    )  # fmt: skip
    state = state.replace(
        pages=pages,
        table=state.table.at[batch.rows, Field.LENGTH].set(batch.lengths, mode="drop"),
        hidden=jax.lax.dynamic_update_slice(state.hidden, hidden, (0, 0)),
    )
    return state, jnp.sum(batch.real, dtype=jnp.int32)


def upload_row(state: DeviceState, packed: Int[Array, " row_and_table"]) -> DeviceState:
    """Set one row's block tables: packed is the row, then the blocks of every column. Donate `state`.

    For changes that the step's packed plan has no room for: a prefix hit or a resume of a long request.
    """
    return state.replace(blocks=state.blocks.at[packed[0]].set(packed[1:], mode="drop"))


def compile_forward(
    params: Any,
    state: Any,
    *,
    spec: DecoderSpec,
    groups: KVGroups,
    layout: WeightLayout,
    shape: ForwardShape,
    implementation: str,
    sharding: Any = None,
) -> Any:
    """Compile one program from ShapeDtypeStructs (or arrays): `compiled(params, state, packed)`."""
    call = functools.partial(
        forward, spec=spec, groups=groups, layout=layout, shape=shape, implementation=implementation
    )
    packed = jax.ShapeDtypeStruct((shape.packed_size,), np.dtype(np.int32), sharding=sharding)
    # keep_unused: every program of the table takes the same arguments
    jitted = jax.jit(call, donate_argnums=1, keep_unused=True, out_shardings=(formats(state), None))
    return jitted.lower(params, state, packed).compile()
