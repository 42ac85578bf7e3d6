"""The forward pass of a step: from the packed plan to one hidden state per token. Then `output_programs` runs.

Called by: `compile/blueprint.py`, to compile it for each shape; `StageRunner.forward`, to run it.
Owns: the order of work in a forward program.
Never: samples, or branches on the values of an array.

1. Unpack the plan: set started rows in the request table, and change block tables.
2. Build ids, positions, KV slots and lengths from the request table and the block tables (`batch`).
3. Run the decoder over all tokens: it writes keys and values into the pages, and attends through block tables.
   Recurrent layers read and write the state of their rows. In a verify step they only read it, and the inputs of its
   tokens stay in `DeviceState.state_inputs` for `advance_states`. Each token's hidden state stays in
   `DeviceState.hidden` for the output programs.

`state` is donated, so pages and table are updated in place.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.kv_groups import KVGroups
from jpaged.models import decoder
from jpaged.models.compressed import CompressedProjection
from jpaged.models.experts import pairs_of_devices
from jpaged.models.indexer import ChosenPages, columns_of_keys
from jpaged.models.sharding import CONTEXT, WHOLE, Shards
from jpaged.models.spec import ALONE, AttentionOptions, DecoderSpec, Params, Stage, WeightLayout
from jpaged.runtime.placement import Placement
from jpaged.runtime.state import DeviceState, Field, Leaf, SamplingState, formats
from jpaged.runtime.step import context
from jpaged.runtime.step.attention_chunks import rows_by_chunk
from jpaged.runtime.step.batch import ForwardShape, KVGroupRows, build_batch, rows_by_part
from jpaged.runtime.step.compressed_attention import attend_compressed
from jpaged.runtime.step.encode import forward_texts
from jpaged.runtime.step.sparse_attention import rows_by_token
from jpaged.runtime.store.stored_programs import ProgramStore, compile_program
from pallas_kernels import KVPages, finish_qkv, paged_attention, write_kv, write_qkv
from pallas_kernels.write_kv import matching_write

# `DeviceState` without `sampling`: pages, table, blocks, hidden, output_rows, recurrent, state_inputs.
StateArrays = tuple[
    tuple[tuple[Leaf, Leaf | None], ...], Leaf, Leaf, Leaf, Leaf, tuple[tuple[Leaf, ...], ...], tuple[Leaf, ...]
]

# Second result of `forward`.
ForwardResult = Int[Array, "..."] | Float[Array, "tokens hidden"] | tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class PagedAttend:
    """The decoder's `attend` for serving: writes keys and values into the pages, and attends through block tables."""

    max_query_len: int
    implementation: str
    shards: Shards = WHOLE
    token_parts: int = 1  # devices that share the tokens; `slots` has the tokens of all devices
    key_dim: int | None = None  # sparse attention: numbers of a token's vector before the indexer's key
    block_size: int = 0  # tokens of a block; read by `attend_compressed` only

    def __call__(
        self, projection: decoder.Projection | CompressedProjection, pages: Any, metadata: Any,
        options: AttentionOptions, sinks: Float[Array, " heads"] | None,
    ) -> tuple[Float[Array, "tokens heads head_dim"], Any]:  # fmt: skip
        """pages, metadata: KVPages or ChosenPages, and KVGroupRows. DeepSeek V4: with states, and StateRows."""
        if isinstance(projection, CompressedProjection):
            return attend_compressed(
                projection, pages, metadata, block_size=self.block_size, implementation=self.implementation
            )
        shared = pages if isinstance(pages, ChosenPages) else None
        pages = pages.pages if isinstance(pages, ChosenPages) else pages
        if options.kv_heads is not None:
            return self._of_unlike_layer(projection, pages, metadata, options)
        write, product = matching_write(self.implementation), projection.product
        arrays = {
            "bias": projection.bias, "cos": projection.cos, "sin": projection.sin, "q_norm": projection.q_norm,
            "k_norm": projection.k_norm, "norm_eps": projection.norm_eps, "implementation": write,
        }  # fmt: skip
        if self.token_parts == 1 and not isinstance(product, tuple):
            q, pages = write_qkv(pages, product, metadata.slots, **arrays)
        else:
            q, k, v = projection.finish() if isinstance(product, tuple) else finish_qkv(pages, product, **arrays)
            if self.token_parts > 1:
                k, v = context.all_keys_and_values(k, v)
            pages = write_kv(pages, k, v, metadata.slots, implementation=write)
        slopes = None
        if options.alibi_slopes is not None:
            every, heads = jnp.array(options.alibi_slopes, jnp.float32), q.shape[1]
            slopes = lax.dynamic_slice_in_dim(every, self.shards.first(heads), heads)
        rows = (metadata.block_tables, metadata.context_lens, metadata.query_start_loc)
        max_query_len = self.max_query_len
        if options.chunk is not None:
            rows = rows_by_chunk(*rows, options.chunk, max_query_len=max_query_len, block_size=pages.block_size)
            max_query_len = min(max_query_len, options.chunk)
        read = pages
        if projection.index is not None or shared is not None:
            read, max_query_len = pages.by_token(), 1
        if projection.index is not None:
            on_cpu = self.implementation in ("cpu", "xla_loop")
            rows = rows_by_token(projection.index, pages, *rows, on_cpu=on_cpu)
        elif shared is not None:
            rows = shared.chosen
        out = paged_attention(
            q, read, *rows, scale=options.scale, max_query_len=max_query_len, sliding_window=options.window,
            logit_softcap=options.softcap, sinks=sinks, alibi_slopes=slopes, key_dim=self.key_dim,
            implementation=self.implementation,
        )  # fmt: skip
        return out, pages if shared is None else ChosenPages(pages, rows)

    def _of_unlike_layer(
        self, projection: decoder.Projection, pages: KVPages, metadata: KVGroupRows, options: AttentionOptions
    ) -> tuple[Float[Array, "tokens heads head_dim"], KVPages]:
        """`__call__` for a model whose layers have unlike KV. The layer may read the pages of an earlier layer."""
        assert options.kv_heads is not None
        heads = options.kv_heads // self.shards.count  # of this device
        if projection.has_keys:
            q, k, v = projection.finish()
            own = pages_of_layer(pages, heads, q.shape[2])
            own = write_kv(own, k, v, metadata.slots, implementation=matching_write(self.implementation))
        else:
            q = projection.finish_queries()
            own = pages_of_layer(pages, heads, q.shape[2])
        out = paged_attention(
            q, own, metadata.block_tables, metadata.context_lens, metadata.query_start_loc, scale=options.scale,
            max_query_len=self.max_query_len, sliding_window=options.window, implementation=self.implementation,
        )  # fmt: skip
        return out, own if own.whole is None else dataclasses.replace(pages, data=own.whole)


def pages_of_layer(pages: KVPages, num_kv_heads: int, head_dim: int) -> KVPages:
    """The pages as those of a layer with these heads: `KVPages.in_shape`, also for fp8 pages with equal scales."""
    if (pages.num_kv_heads, pages.head_dim) == (num_kv_heads, head_dim):
        return pages
    view = dataclasses.replace(pages, scales=None).in_shape(num_kv_heads, head_dim)
    if pages.scales is None:
        return view
    return dataclasses.replace(view, scales=jnp.broadcast_to(pages.scales[:, :1], (2, num_kv_heads)))


def forward(
    params: Params,
    state: DeviceState,
    packed: Int[Array, " packed"],
    hidden: Float[Array, "tokens hidden"] | None = None,
    proposed: Int[Array, "rows drafts"] | None = None,
    *,
    spec: DecoderSpec,
    kv_groups: KVGroups,
    layout: WeightLayout,
    shape: ForwardShape,
    implementation: str,
    gated_dot: str | None = None,
    fused: str | None = None,
    shards: Shards = WHOLE,
    stage: Stage = ALONE,
    capture: tuple[int, ...] | None = None,
    routes: bool = False,
) -> tuple[DeviceState, ForwardResult]:
    """Run the decoder over one plan, or the layers of one pipeline stage. Donate `state`.

    hidden: from the stage before; None in the first stage. proposed: see `build_batch`.

    Returns (state, result). The state has the new KV, lengths and hidden states, before the final norm. The result of a
    stage before the last is its hidden states. Else it is int32 num_tokens: the host waits for it in steps that sample
    nothing. If devices have different experts it is int32[2], (num_tokens, pairs): (token, expert) pairs on each
    layer's busiest device, summed over layers.

    A verify program returns (that, `Batch.checked`) as its result. It leaves LENGTH to the sampling program.

    capture: of `decoder.decode`, for a draft head; () captures the last hidden states. Then two more results follow:
    the step's tokens as one array (`StepTokens`), and the captured hidden states side by side. One array each, because
    seven arrays instead of two slow a step of the demo model by 2% (1 row) to 4% (32 rows) on CPU.

    routes: the last result is int16[tokens, layers with experts, per_token], the experts of each token.
    """
    state, batch = build_batch(state, packed, shape, proposed, adapters="adapters" in params)
    output_rows = None if shape.drafts else packed[shape.cuts["output_rows"]].reshape(2, shape.rows)
    num_tokens = jnp.sum(batch.real, dtype=jnp.int32)
    count = shape.token_parts
    if count > 1:
        batch = context.own_part(batch, count)
        hidden = None if hidden is None else context.own_tokens(hidden, count)
    groups = rows_by_part(batch.kv_groups, kv_groups.parts, shape.block_size)
    kept, rows = (*state.pages, *state.recurrent), (*groups, batch.state_rows)
    x, kept, choices, *captured = decoder.decode(
        spec, params, batch.token_ids, batch.positions, kept, rows,
        PagedAttend(shape.max_query_len, implementation, shards, count, columns_of_keys(spec), shape.block_size),
        layout=layout, rope_lens=batch.rope_lens, places=kv_groups.places,
        real=batch.real if spec.experts is not None else None, num_tokens=jnp.sum(batch.real, dtype=jnp.int32),
        gated_dot=gated_dot, fused=fused, shards=shards, hidden=hidden, first_layer=stage.first_layer,
        capture=capture or (), adapter_slots=batch.adapter_slots,
    )  # fmt: skip
    table = state.table
    if not shape.drafts:
        table = table.at[batch.rows, Field.LENGTH].set(batch.lengths, mode="drop")
    pages, recurrent = kept[: kv_groups.num_arrays], kept[kv_groups.num_arrays :]
    inputs = state.state_inputs
    if shape.drafts and batch.state_rows is not None:
        recurrent, inputs = _inputs_of_tokens(inputs, recurrent, batch.state_rows.positions)
    state = state.with_pages(pages).replace(table=table, recurrent=recurrent, state_inputs=inputs)
    if count > 1:
        x = context.all_tokens(x)
    if not stage.is_last:
        return state, x
    hidden = lax.dynamic_update_slice(state.hidden, x, (0, 0))
    if output_rows is None:
        state = state.replace(hidden=hidden)
    else:
        padding = ((0, 0), (0, state.output_rows.shape[1] - shape.rows))
        state = state.replace(hidden=hidden, output_rows=jnp.pad(output_rows, padding, constant_values=-1))
    counted = num_tokens
    if spec.experts is not None and choices and shards.splits_experts:
        pairs = pairs_of_devices(choices, spec.experts.num, shards)
        if count > 1:  # sum over devices that have the same experts but other tokens
            pairs = lax.psum(pairs, CONTEXT)
        counted = jnp.stack([num_tokens, pairs.max(1).sum()])
    more: tuple[Any, ...] = () if batch.checked is None else (batch.checked,)
    if capture is not None:
        parts = (batch.token_ids, batch.positions, batch.rows, batch.kv_groups[0].query_start_loc)
        more += (jnp.concatenate(parts), _side_by_side(captured or [x]))
    if routes:
        routed = jnp.stack(choices, axis=1).astype(jnp.int16)
        more += (context.all_tokens(routed) if count > 1 else routed,)
    return state, ((counted, *more) if more else counted)


def _inputs_of_tokens(
    before: tuple[Array, ...], layers: Sequence[tuple[Any, tuple[Array, ...]]], lengths: Int[Array, " rows"]
) -> tuple[tuple[Any, ...], tuple[Array, ...]]:
    """The states of recurrent layers, and `DeviceState.state_inputs` of a verify step. before: of the last one.

    layers: (state, `recurrent.Inputs`) of each. lengths: of the rows before the step.
    """
    parts = zip(*(inputs for _, inputs in layers), strict=True)
    new = (lengths, *(jnp.stack(part) for part in parts))
    inputs = (
        lax.dynamic_update_slice(whole, part, (0,) * whole.ndim)
        for whole, part in zip(before, new, strict=True)
    )
    return tuple(own for own, _ in layers), tuple(inputs)


def _side_by_side(arrays: Sequence[Float[Array, "tokens width"]]) -> Float[Array, "tokens widths"]:
    """The arrays joined along the last axis. As bits, because XLA for CPU would join bfloat16 as float32."""
    if len(arrays) == 1 or arrays[0].dtype.itemsize != 2:
        return jnp.concatenate(arrays, axis=1)
    bits = [lax.bitcast_convert_type(each, jnp.uint16) for each in arrays]
    return lax.bitcast_convert_type(jnp.concatenate(bits, axis=1), arrays[0].dtype)


def upload_row(state: DeviceState, packed: Int[Array, " row_and_table"]) -> DeviceState:
    """Set one row's block tables. packed: the row, then the block of every column. Donate `state`.

    For long block tables that do not fit into the packed plan: a prefix hit or a resumed request.
    """
    return state.replace(blocks=state.blocks.at[packed[0]].set(packed[1:], mode="drop"))


def forward_of_arrays(
    weights: tuple[Array, ...], arrays: StateArrays, packed: Int[Array, " packed"],
    more: Array | None = None, *, weight_tree: Any, page_v_dim: int | None, shape: ForwardShape, **options: Any,
) -> tuple[StateArrays, ForwardResult]:  # fmt: skip
    """`forward` with weights and state as plain tuples, as it is compiled. See `run_forward`.

    more: `proposed` of a verify program, `hidden` of others.
    """
    params, no_extras = jax.tree.unflatten(weight_tree, weights), cast(SamplingState, None)
    state = DeviceState(*arrays, sampling=no_extras, page_v_dim=page_v_dim)
    hidden, proposed = (None, more) if shape.proposes else (more, None)
    if shape.row_len:
        names = ("spec", "layout", "gated_dot")
        state, result = forward_texts(
            params, state, packed, shape=shape, **{name: options[name] for name in names}
        )
        return state_arrays(state), result
    state, result = forward(params, state, packed, hidden, proposed, shape=shape, **options)
    return state_arrays(state), result


def state_arrays(state: DeviceState) -> StateArrays:
    """The arrays of a state that a forward program takes and returns: all but the unused sampling extras."""
    pages, rest = state.page_arrays, (state.hidden, state.output_rows, state.recurrent, state.state_inputs)
    return pages, state.table, state.blocks, *rest


def flat_weights(params: Params) -> tuple[jax.Array, ...]:
    """The weights as a flat tuple, the argument of forward programs."""
    return tuple(jax.tree.leaves(params))


def run_forward(
    run: Callable[..., Any], weights: tuple[jax.Array, ...], state: DeviceState, packed: np.ndarray | jax.Array,
    *more: jax.Array,
) -> tuple[DeviceState, Any]:  # fmt: skip
    """Run a program of `compile_forward`. Donates `state`. weights: from `flat_weights`. Returns as `forward`.

    more: as in `forward_of_arrays`; nothing if the program needs neither. Every call flattens its arguments and builds
    its results. A call with 169 arrays takes 141 us with plain tuples, 179 us with dicts and a `DeviceState`.
    """
    arrays, result = run(weights, state_arrays(state), packed, *more)
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
    fused: str | None = None,
    store: ProgramStore | None = None,
    stage: Stage = ALONE,
    capture: tuple[int, ...] | None = None,
    routes: bool = False,
) -> jax.stages.Compiled:
    """Compile a forward program from arrays or ShapeDtypeStructs, for `run_forward`.

    implementation: of attention. gated_dot: implementation of `pallas_kernels.gated_dot`; None: the best one.
    fused: implementation of `models.fused_layer`; None: XLA's operations.
    """
    call = functools.partial(
        forward_of_arrays, weight_tree=jax.tree.structure(params), page_v_dim=state.page_v_dim, spec=spec,
        kv_groups=kv_groups, layout=layout, shape=shape, implementation=implementation, gated_dot=gated_dot,
        fused=fused, shards=placement.shards, stage=stage, capture=capture, routes=routes,
    )  # fmt: skip
    packed = placement.shape((shape.packed_size,), np.int32)
    arguments: tuple[Any, ...] = (flat_weights(params), state_arrays(state), packed)
    if shape.proposes:
        arguments += (placement.shape((shape.rows, shape.drafts), np.int32),)
    if not stage.is_first:
        arguments += (placement.shape((shape.tokens, spec.hidden_size), state.hidden.dtype),)
    call = placement.on_each_device(call, arguments, (state_arrays(state), None))
    return compile_program(
        call, arguments, donate=(1,),
        out_shardings=(state_arrays(formats(state)), None), store=store, compiler_options=placement.compiler_options,
    )  # fmt: skip
