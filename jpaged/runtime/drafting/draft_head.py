"""Programs of a draft head (EAGLE-3, MTP): `absorb_step` follows the target, `propose_head` drafts tokens.

Called by: the runner. `absorb_step` after the sample program of every step, `propose_head` before a verify step.
Owns: the order of work in both programs, and the layout of their packed inputs.
Never: runs a layer of the target. Its hidden states are arguments.

Index p of a head holds token p + 1 and hidden state p, and predicts token p + 2. After a step with LENGTH = n, the
target has hidden states 0 to n - 1 and tokens 0 to n. Token n is LAST_TOKEN. So the head absorbs the indices up to
n - 1, and the last one predicts draft 1, of position n + 1. `DraftState.hidden` keeps the head's output there. So the
first draft needs no pass over the layer. Pass i computes index n - 1 + i, from draft i and the output before it.

A row whose steps were not all absorbed starts again at the next block boundary: its block table is rolled, so that
attention sees no earlier keys. Drafts of such a row begin when an index past the boundary is absorbed.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.errors import ModelLoadError
from jpaged.models.draft_head import (
    HeadSpec,
    embed_for_head,
    head_input,
    head_layer,
    head_logits,
    next_state,
    target_state,
    to_target_ids,
)
from jpaged.models.sharding import WHOLE, Shards
from jpaged.models.spec import DecoderSpec, Params, WeightLayout
from jpaged.runtime.drafting.choose import choose_drafts
from jpaged.runtime.drafting.draft_state import DraftArrays, DraftState, TableColumns, as_pages, page_arrays_of
from jpaged.runtime.drafting.ragged import (
    block_tables,
    exclusive_sum,
    rows_of_tokens,
    slots,
    updated_block_tables,
)
from jpaged.runtime.placement import Placement
from jpaged.runtime.state import Field
from jpaged.runtime.step.batch import KVGroupRows
from jpaged.runtime.step.draft_shapes import HeadAbsorbShape, HeadProposeShape
from jpaged.runtime.step.forward import PagedAttend, flat_weights
from jpaged.runtime.store.stored_programs import ProgramStore, compile_program
from pallas_kernels import KVPages, gather_rows
from pallas_kernels.set_rows import set_rows


class StepTokens(NamedTuple):
    """The tokens of a step, as the target's forward program computed them. Device arrays."""

    token_ids: Array        # int32[tokens]  of a verify step with the drafts
    positions: Array        # int32[tokens]
    rows: Array             # int32[rows]  rows of the request table; padding rows point past its end
    query_start_loc: Array  # int32[rows + 1]

    @classmethod
    def of(cls, joined: Array, tokens: int) -> Self:
        """The parts of the forward program's array, int32[2 * tokens + 2 * rows + 1]."""
        rows = num_rows_of(joined, tokens)
        return cls(*jnp.split(joined, (tokens, 2 * tokens, 2 * tokens + rows)))


def num_rows_of(joined: Array, tokens: int) -> int:
    """Rows of a step with `tokens` tokens, whose arrays are joined."""
    return (joined.shape[0] - 1) // 2 - tokens


def pack_head_absorb(
    next_tokens: np.ndarray, starts: np.ndarray, first_block: np.ndarray, shape: HeadAbsorbShape
) -> np.ndarray:
    """Input of `absorb_step`: int32[packed_size]. The arguments have one entry per row of the step plan.

    next_tokens: int32[R]  token after a prompt chunk that is not the last; -1: the row sampled LAST_TOKEN
    starts:      bool[R]   the row was started since the last absorbed step, so `progress` is another request's
    first_block: int32[R]  of rows that start: first block with KV of the head, if blocks of a cached prefix have it.
                           -1: the next block boundary
    """
    packed = np.full(shape.packed_size, -1, np.int32)
    packed[shape.cuts["starts"]] = 0
    for name, values in (("next_tokens", next_tokens), ("starts", starts), ("first_block", first_block)):
        packed[shape.cuts[name]][: len(values)] = values
    return packed


def pack_head_propose(
    rows: np.ndarray, num_drafts: np.ndarray, updates: np.ndarray, shape: HeadProposeShape, columns: TableColumns
) -> np.ndarray:
    """Input of `propose_head`: int32[packed_size].

    rows, num_drafts: int32[R], of the step plan. updates: int32[U, 3], from `step.batch.block_updates`. Raises
    ValueError if more updates come than the program takes.
    """
    first, end = columns.first, columns.first + columns.width
    updates = updates[(updates[:, 1] >= first) & (updates[:, 1] < end)]
    if len(updates) > shape.max_updates:
        raise ValueError(f"{len(updates)} changes of block tables: must be at most {shape.max_updates}")
    packed = np.full(shape.packed_size, -1, np.int32)
    packed[shape.cuts["rows"]][: len(rows)] = rows
    packed[shape.cuts["num_drafts"]] = 0
    packed[shape.cuts["num_drafts"]][: len(rows)] = num_drafts
    packed[shape.cuts["updates"]][: updates.size] = updates.ravel()
    return packed


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """Static options that all programs of a head share. Make it with `of`."""

    spec: HeadSpec
    target_spec: DecoderSpec
    columns: TableColumns
    implementation: str  # attention implementation
    layout: WeightLayout = WeightLayout()         # of the head's own leaves
    target_layout: WeightLayout = WeightLayout()  # of the target's
    gated_dot: str | None = None  # implementation of `pallas_kernels.gated_dot`; None: the best one
    shards: Shards = WHOLE        # of the target's leaves. The head's are whole on every device

    def check(self) -> None:
        """Raise ModelLoadError if the head shares an output matrix that is split over devices."""
        if self.shards.count > 1 and not self.spec.own_head:
            raise ModelLoadError(
                f"speculative_config: a head without an lm_head of its own needs the model's, which is split over "
                f"{self.shards.count} devices: use tensor_parallel_size=1, or a head with its own lm_head"
            )


def target_leaves(spec: HeadSpec, target_spec: DecoderSpec, params: Params) -> Params:
    """The leaves of the target's tree that a head reads. Fewer arguments make a call faster."""
    names = set() if spec.own_embed else {"embed"}
    if not (spec.aux_layers and spec.own_norm):
        names |= {"final_norm", "final_norm_bias"}
    if not spec.own_head:
        names.add("embed" if target_spec.tie_embeddings else "lm_head")
    return {name: leaf for name, leaf in params.items() if name in names}


def absorb_step(
    params: Params, target: Params, state: DraftArrays, table: Int[Array, "table_rows num_fields"],
    blocks: Int[Array, "table_rows columns"], step_tokens: Int[Array, " joined"],
    hidden: Float[Array, "tokens target_hidden"], packed: Int[Array, " packed"], *,
    shape: HeadAbsorbShape, options: HeadOptions, page_v_dim: int | None,
) -> DraftArrays:  # fmt: skip
    """Absorb the tokens that a step has added to its rows. Donate `state`.

    target: from `target_leaves`. table, blocks: of the target's state after the sample program, only read.
    step_tokens, hidden: from the forward program; `HeadSpec.capture` names the hidden states. Rejected drafts are left
    out, because their positions are not below LENGTH.
    """
    step, count_of_states = StepTokens.of(step_tokens, shape.tokens), max(1, len(options.spec.capture))
    part = {name: packed[cut] for name, cut in shape.cuts.items()}
    fields = jnp.take(table, step.rows, axis=0, mode="clip")
    length, given = fields[:, Field.LENGTH], step.query_start_loc[1:] - step.query_start_loc[:-1]
    start = jnp.take(step.positions, step.query_start_loc[:-1], mode="clip")
    start = jnp.where(given > 0, start, length)
    progress = _progress(jnp.take(state[3], step.rows, axis=0, mode="clip"), start, part, shape.block_size)
    first = jnp.maximum(start, progress[:, 1] * shape.block_size)  # first index of each row to absorb
    is_row = step.rows < len(table)
    count = jnp.where(is_row, jnp.clip(length - first, 0, given), 0)
    starts = exclusive_sum(count)
    row, index = rows_of_tokens(starts, shape.tokens)
    real = jnp.arange(shape.tokens) < starts[-1]
    source = jnp.where(real, (step.query_start_loc[:-1] + first - start)[row] + index, 0)  # index in the step
    after = jnp.where(part["next_tokens"] >= 0, part["next_tokens"], fields[:, Field.LAST_TOKEN])
    following = jnp.take(step.token_ids, source + 1, mode="clip")
    token_ids = jnp.where(real, jnp.where(index == count[row] - 1, after[row], following), 0)
    states = target_state(
        options.spec, params, options.target_spec, target,
        tuple(jnp.split(gather_rows(hidden, source, starts[-1]), count_of_states, axis=1)),
        layout=options.layout, num_tokens=starts[-1],
    )  # fmt: skip
    work = _HeadWork(params, target, block_tables(blocks, step.rows, options.columns), progress[:, 1], shape, options)
    out, pages = work.layer(
        as_pages(state[0], page_v_dim), token_ids, states, jnp.where(real, first[row] + index, 0), row, real, starts,
        jnp.where(count > 0, length, 0), fields[row, Field.ROPE_LEN], shape.max_query_len,
    )  # fmt: skip
    last = gather_rows(out, starts[1:] - 1, len(count)).astype(state[2].dtype)
    absorbed = jnp.where(count > 0, step.rows, len(table))
    followed = jnp.where(is_row & ((given > 0) | (part["starts"] > 0)), step.rows, len(table))
    # XLA for CPU would convert all rows of a bfloat16 state to float32 and back
    outputs = set_rows(state[2], absorbed, last, plain=lambda table: table.at[absorbed].set(last, mode="drop"))
    return (
        page_arrays_of(pages), state[1], outputs,
        state[3].at[followed].set(progress.at[:, 0].set(length), mode="drop"),
    )  # fmt: skip


def _progress(
    before: Int[Array, "rows 2"], start: Int[Array, " rows"], part: dict[str, Array], block_size: int
) -> Int[Array, "rows 2"]:
    """(start, first block) of each row: the first block as before if the row goes on where the last step ended."""
    continues = (part["starts"] == 0) & (before[:, 0] == start)
    boundary = (start + block_size - 1) // block_size
    given = jnp.where((part["starts"] > 0) & (part["first_block"] >= 0), part["first_block"], boundary)
    return jnp.stack([start, jnp.where(continues, before[:, 1], given)], axis=1)


def propose_head(
    params: Params, target: Params, state: DraftArrays, table: Int[Array, "table_rows num_fields"],
    blocks: Int[Array, "table_rows columns"], packed: Int[Array, " packed"], *,
    shape: HeadProposeShape, options: HeadOptions, page_v_dim: int | None,
) -> tuple[DraftArrays, Int[Array, "rows drafts"]]:  # fmt: skip
    """Draft tokens after the last absorbed step. Donate `state`. Other arguments as in `absorb_step`.

    Returns (state, drafts). Entry i of a row is its draft of position LENGTH + 1 + i. It is -1 from `num_drafts` on,
    and in rows that the head does not follow up to LENGTH.
    """
    part = {name: packed[cut] for name, cut in shape.cuts.items()}
    rows = jnp.where(part["rows"] < 0, len(table), part["rows"])
    fields = jnp.take(table, rows, axis=0, mode="clip")
    progress, length = jnp.take(state[3], rows, axis=0, mode="clip"), fields[:, Field.LENGTH]
    is_ready = (progress[:, 0] == length) & (length > progress[:, 1] * shape.block_size)
    num_drafts = jnp.where(is_ready, part["num_drafts"], 0)
    tables = updated_block_tables(blocks, rows, options.columns, part["updates"])
    work = _HeadWork(params, target, tables, progress[:, 1], shape, options)
    num_rows = jnp.max(jnp.where(num_drafts > 0, jnp.arange(1, shape.rows + 1), 0))
    row = jnp.arange(shape.rows)
    starts = jnp.minimum(jnp.arange(shape.rows + 1), num_rows)

    def one_pass(i: Array, carry: tuple) -> tuple:
        page_arrays, out, drafts = carry
        writes, positions = i < num_drafts, length - 1 + i
        # a row without a draft has one key, any key: its results are not used, and must be finite
        lens = jnp.where(row < num_rows, jnp.where(writes, positions + 1, progress[:, 1] * shape.block_size + 1), 0)
        before = next_state(options.spec, params, target, out, num_tokens=num_rows)
        draft = lax.dynamic_slice(drafts, (0, i - 1), (shape.rows, 1))[:, 0]
        out, pages = work.layer(
            as_pages(page_arrays, page_v_dim), draft, before, positions, row, writes, starts, lens,
            fields[:, Field.ROPE_LEN], 1,
        )  # fmt: skip
        draft = work.drafts(out, num_rows)
        return page_arrays_of(pages), out, lax.dynamic_update_slice(drafts, draft[:, None], (0, i))

    out = gather_rows(state[2], rows, num_rows)
    drafts = jnp.zeros((shape.rows, shape.drafts), jnp.int32)
    drafts = drafts.at[:, 0].set(work.drafts(out, num_rows))
    page_arrays, _, drafts = lax.fori_loop(1, jnp.max(num_drafts), one_pass, (state[0], out, drafts))
    drafts = jnp.where(jnp.arange(shape.drafts) < num_drafts[:, None], drafts, -1)
    return (page_arrays, *state[1:]), drafts


@dataclasses.dataclass(frozen=True)
class _HeadWork:
    """A head's layer and its drafts, for some rows."""

    params: Params
    target: Params
    tables: Int[Array, "rows width"]    # block tables
    first_block: Int[Array, " rows"]
    shape: HeadAbsorbShape | HeadProposeShape
    options: HeadOptions

    def layer(
        self, pages: tuple[KVPages, ...], token_ids: Array, states: Array, positions: Array, row: Array, writes: Array,
        starts: Array, lens: Array, rope_lens: Array, max_query_len: int,
    ) -> tuple[Float[Array, "tokens hidden"], tuple[KVPages, ...]]:  # fmt: skip
        """The layer's output for indices `positions`, and the pages.

        token_ids: tokens at positions + 1. states: at positions. lens: number of indices of each row, from index 0.
        """
        options, size, count = self.options, self.shape.block_size, starts[-1]
        spec, width = options.spec, self.tables.shape[1]
        slot = slots(self.tables, row, positions, writes, size)
        rolled = jnp.minimum(jnp.arange(width) + self.first_block[:, None], width - 1)
        tables = jnp.take_along_axis(self.tables, rolled, axis=1)
        seen = jnp.where(lens > 0, lens - self.first_block * size, 0)
        embeddings = embed_for_head(
            spec, self.params, options.target_spec, self.target, token_ids, num_tokens=count,
            shards=WHOLE if spec.own_embed else options.shards,
        )  # fmt: skip
        x = head_input(spec, self.params, embeddings, states, layout=options.layout, num_tokens=count)
        out, page = head_layer(
            spec, self.params, x, positions, pages[0], KVGroupRows(tables, slot, seen, starts),
            PagedAttend(max_query_len, options.implementation), layout=options.layout,
            rope_lens=jnp.maximum(rope_lens, positions + 1),
            real=jnp.arange(len(token_ids)) < count if spec.layer.experts is not None else None,
            num_tokens=count, gated_dot=options.gated_dot,
        )  # fmt: skip
        return out, (page,)

    def drafts(self, out: Float[Array, "rows hidden"], num_rows: Int[Array, ""]) -> Int[Array, " rows"]:
        """The draft of each row, from the layer's output."""
        options, spec = self.options, self.options.spec
        logits = head_logits(
            spec, self.params, out, self.target, num_rows=num_rows,
            layout=options.layout if spec.own_head else options.target_layout,
        )  # fmt: skip
        vocab = min(spec.num_logits, options.target_spec.vocab_size)
        return to_target_ids(self.params, choose_drafts(logits, vocab, num_rows))


def absorb_step_of_arrays(
    weights: tuple[Array, ...], target: tuple[Array, ...], *rest: Any, trees: tuple[Any, Any], **options: Any
) -> DraftArrays:  # fmt: skip
    """`absorb_step` with the weights as plain tuples, as it is compiled."""
    params, leaves = (jax.tree.unflatten(tree, each) for tree, each in zip(trees, (weights, target), strict=True))
    return absorb_step(params, leaves, *rest, **options)


def propose_head_of_arrays(
    weights: tuple[Array, ...], target: tuple[Array, ...], *rest: Any, trees: tuple[Any, Any], **options: Any
) -> tuple[DraftArrays, Array]:
    """`propose_head` with the weights as plain tuples, as it is compiled."""
    params, leaves = (jax.tree.unflatten(tree, each) for tree, each in zip(trees, (weights, target), strict=True))
    return propose_head(params, leaves, *rest, **options)


def compile_draft_head(
    params: Params, target_params: Params, state: DraftState, table: Any, blocks: Any,
    shape: HeadAbsorbShape | HeadProposeShape, *, hidden_dtype: np.dtype, options: HeadOptions, placement: Placement,
    store: ProgramStore | None = None,
) -> jax.stages.Compiled:  # fmt: skip
    """Compile `absorb_step` or `propose_head` from arrays or ShapeDtypeStructs.

    params, state: of the head, whole on every device. target_params: the target's whole tree. hidden_dtype: of the
    target's hidden states. `absorb_step` takes (flat_weights(params), flat_weights(target_leaves(...)), state.arrays,
    table, blocks, step tokens, hidden states, packed). `propose_head` takes the same without step and hidden
    states, and returns (arrays, drafts). Raises ModelLoadError as `HeadOptions.check`.
    """
    options.check()
    leaves = target_leaves(options.spec, options.target_spec, target_params)
    proposes = isinstance(shape, HeadProposeShape)
    call = functools.partial(
        propose_head_of_arrays if proposes else absorb_step_of_arrays, shape=shape, options=options,
        trees=(jax.tree.structure(params), jax.tree.structure(leaves)), page_v_dim=state.page_v_dim,
    )  # fmt: skip
    arguments: tuple[Any, ...] = (flat_weights(params), flat_weights(leaves), state.arrays, table, blocks)
    if not proposes:
        tokens, rows = shape.tokens, shape.rows
        width = options.spec.target_hidden_size * max(1, len(options.spec.capture))
        arguments += (placement.shape((2 * (tokens + rows) + 1,), np.int32),)
        arguments += (placement.shape((tokens, width), hidden_dtype),)
    arguments += (placement.shape((shape.packed_size,), np.int32),)
    of_state = jax.tree.map(lambda x: x.format if x.format.layout else None, state.arrays)
    run = placement.on_each_device(call, arguments, None)
    return compile_program(
        run, arguments, donate=(2,), out_shardings=(of_state, None) if proposes else of_state, store=store,
        compiler_options=placement.compiler_options,
    )  # fmt: skip
