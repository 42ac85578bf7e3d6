"""Programs of a draft model: `absorb` computes KV of known tokens, `propose` drafts tokens.

Called by: `ModelDrafter`, before a verify step.
Owns: the order of work in both programs, and the layout of their packed inputs.
Never: downloads anything. The verify forward program takes the drafts as an argument.

`propose` runs k passes. Pass 0 is a ragged batch. Of each row it has the known tokens without KV, then the row's last
draft if all were accepted, then LAST_TOKEN. It gives draft 1. Pass i has one token per row, draft i, and gives draft
i + 1. The last draft has no KV: `DraftState.tail` remembers it. With n = LENGTH and two drafts:

    position             n - 2   n - 1    n            n + 1     n + 2
    token                known   tail     LAST_TOKEN   draft 1   draft 2
    KV is written in     pass 0  pass 0   pass 0       pass 1    the next proposal, if accepted
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.models import decoder
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
from jpaged.runtime.step.draft_shapes import AbsorbShape, ProposeShape
from jpaged.runtime.step.forward import PagedAttend, flat_weights
from jpaged.runtime.store.stored_programs import ProgramStore, compile_program
from pallas_kernels import KVPages, gather_rows


def pack_absorb(
    rows: np.ndarray, first: np.ndarray, num_tokens: np.ndarray, tokens: np.ndarray, shape: AbsorbShape
) -> np.ndarray:
    """Input of `absorb`: int32[packed_size].

    rows, first, num_tokens: int32[A], A <= shape.rows: rows of the request table, position of their first token, and
    number of their tokens. tokens: int32[sum(num_tokens)], at most shape.tokens.
    """
    packed = np.zeros(shape.packed_size, np.int32)
    packed[shape.cuts["rows"]] = -1
    for name, values in (("rows", rows), ("first", first), ("num_tokens", num_tokens), ("tokens", tokens)):
        packed[shape.cuts[name]][: len(values)] = values
    return packed


def pack_propose(
    rows: np.ndarray, num_drafts: np.ndarray, num_known: np.ndarray, continues: np.ndarray, known: np.ndarray,
    updates: np.ndarray, shape: ProposeShape, columns: TableColumns,
) -> np.ndarray:  # fmt: skip
    """Input of `propose`: int32[packed_size]. The first four arguments have one entry per row of the step plan.

    rows:       int32[R]  row of the request table, R <= shape.rows
    num_drafts: int32[R]  at most shape.drafts; 0: the row takes no part
    num_known:  int32[R]  known tokens without KV, which end before the tail or before LAST_TOKEN
    continues:  bool[R]   the step before was the verify step of the row's last proposal
    known:      int32[sum(num_known)]
    updates:    int32[U, 3]  the plan's changes of block tables, from `step.batch.block_updates`

    Raises ValueError if more tokens or updates come than the program takes. `ModelDrafts` never plans as many.
    """
    first, end = columns.first, columns.first + columns.width
    updates = updates[(updates[:, 1] >= first) & (updates[:, 1] < end)]
    count = int(np.sum(num_known[num_drafts > 0]) + np.count_nonzero(num_drafts) + np.count_nonzero(continues))
    if len(rows) > shape.rows or count > shape.tokens or len(updates) > shape.max_updates:
        raise ValueError(
            f"{len(rows)} rows, {count} tokens and {len(updates)} changes of block tables: must be at most "
            f"{shape.rows}, {shape.tokens} and {shape.max_updates}"
        )
    packed, cuts, size = np.zeros(shape.packed_size, np.int32), shape.cuts, len(rows)
    packed[cuts["rows"]] = -1
    packed[cuts["rows"]][:size] = rows
    packed[cuts["num_drafts"]][:size] = num_drafts
    packed[cuts["num_known"]][:size] = num_known
    packed[cuts["continues"]][:size] = continues
    changes = packed[cuts["updates"]].reshape(-1, 3)
    changes[:, 0] = -1
    changes[: len(updates)] = updates
    packed[cuts["known"]][: len(known)] = known
    return packed


@dataclasses.dataclass(frozen=True)
class DraftModelOptions:
    """Static options that all programs of a draft model share."""

    spec: DecoderSpec
    layout: WeightLayout
    columns: TableColumns
    implementation: str   # attention implementation
    target_vocab: int     # drafts are below it
    gated_dot: str | None = None  # implementation of `pallas_kernels.gated_dot`; None: the best one


def absorb(
    params: Params, state: DraftArrays, table: Int[Array, "table_rows num_fields"],
    blocks: Int[Array, "table_rows columns"], packed: Int[Array, " packed"], *,
    shape: AbsorbShape, options: DraftModelOptions, page_v_dim: int | None,
) -> DraftArrays:  # fmt: skip
    """Write KV of known tokens. Donate `state`. table, blocks: of the target's `DeviceState`, only read."""
    part = {name: packed[cut] for name, cut in shape.cuts.items()}
    rows = jnp.where(part["rows"] < 0, len(table), part["rows"])
    tables = block_tables(blocks, rows, options.columns)
    starts = exclusive_sum(part["num_tokens"])
    row, index = rows_of_tokens(starts, shape.tokens)
    real = jnp.arange(shape.tokens) < starts[-1]
    positions = jnp.where(real, part["first"][row] + index, 0)
    lens = jnp.where(part["num_tokens"] > 0, part["first"] + part["num_tokens"], 0)
    metadata = KVGroupRows(tables, slots(tables, row, positions, real, shape.block_size), lens, starts)
    rope_lens = jnp.take(table[:, Field.ROPE_LEN], rows, mode="clip")[row]
    pages = as_pages(state[0], page_v_dim)
    _, pages = _decode(params, pages, metadata, part["tokens"], positions, rope_lens, shape.tokens, options)
    return (page_arrays_of(pages), *state[1:])


def propose(
    params: Params, state: DraftArrays, table: Int[Array, "table_rows num_fields"],
    blocks: Int[Array, "table_rows columns"], packed: Int[Array, " packed"], *,
    shape: ProposeShape, options: DraftModelOptions, page_v_dim: int | None,
) -> tuple[DraftArrays, Int[Array, "rows drafts"]]:  # fmt: skip
    """Draft tokens. Donate `state`. table, blocks: of the target's `DeviceState`, only read.

    Returns (state, drafts). Entry i of a row is its draft of position LENGTH + 1 + i, and -1 from `num_drafts` on.
    """
    part = {name: packed[cut] for name, cut in shape.cuts.items()}
    rows = jnp.where(part["rows"] < 0, len(table), part["rows"])
    fields = jnp.take(table, rows, axis=0, mode="clip")
    tables = updated_block_tables(blocks, rows, options.columns, part["updates"])
    work = _Proposal(params, fields, tables, part["num_drafts"], shape, options)
    pages, draft = work.first_pass(as_pages(state[0], page_v_dim), part, jnp.take(state[1], rows, axis=0, mode="clip"))
    drafts = jnp.full((shape.rows, shape.drafts), -1, jnp.int32).at[:, 0].set(draft)

    def one_pass(i: Array, carry: tuple) -> tuple:
        page_arrays, draft, drafts = carry
        pages, draft = work.next_pass(as_pages(page_arrays, page_v_dim), draft, i)
        return page_arrays_of(pages), draft, lax.dynamic_update_slice(drafts, draft[:, None], (0, i))

    carry = (page_arrays_of(pages), draft, drafts)
    page_arrays, _, drafts = lax.fori_loop(1, jnp.max(part["num_drafts"]), one_pass, carry)
    count = part["num_drafts"][:, None]
    drafts = jnp.where(jnp.arange(shape.drafts) < count, drafts, -1)
    last = jnp.take_along_axis(drafts, jnp.maximum(count - 1, 0), axis=1)[:, 0]
    tail = jnp.stack([fields[:, Field.LENGTH] + part["num_drafts"], last], axis=1)
    proposed = jnp.where(part["num_drafts"] > 0, rows, len(table))
    return (page_arrays, state[1].at[proposed].set(tail, mode="drop"), *state[2:]), drafts


@dataclasses.dataclass(frozen=True)
class _Proposal:
    """The passes of one proposal. Each returns the pages and the next draft of every row."""

    params: Params
    fields: Int[Array, "rows num_fields"]  # of the request table
    tables: Int[Array, "rows width"]       # block tables
    num_drafts: Int[Array, " rows"]
    shape: ProposeShape
    options: DraftModelOptions

    def first_pass(
        self, pages: tuple[KVPages, ...], part: dict[str, Array], tail: Int[Array, "rows 2"]
    ) -> tuple[tuple[KVPages, ...], Int[Array, " rows"]]:
        """Known tokens, tail and LAST_TOKEN of each row."""
        shape, length, takes_part = self.shape, self.fields[:, Field.LENGTH], self.num_drafts > 0
        has_tail = (part["continues"] > 0) & (tail[:, 0] == length - 1)
        known = part["num_known"]
        num_tokens = jnp.where(takes_part, known + has_tail + 1, 0)
        starts = exclusive_sum(num_tokens)
        row, index = rows_of_tokens(starts, shape.tokens)
        real = jnp.arange(shape.tokens) < starts[-1]
        from_host = part["known"][jnp.minimum(exclusive_sum(known)[row] + index, shape.tokens - 1)]
        from_table = jnp.where(index == num_tokens[row] - 1, self.fields[row, Field.LAST_TOKEN], tail[row, 1])
        token_ids = jnp.where(index < known[row], from_host, from_table)
        positions = jnp.where(real, (length + 1 - num_tokens)[row] + index, 0)
        slot = slots(self.tables, row, positions, real, shape.block_size)
        lens = jnp.where(takes_part, length + 1, 0)
        hidden, pages = _decode(
            self.params, pages, KVGroupRows(self.tables, slot, lens, starts), token_ids, positions,
            self.fields[row, Field.ROPE_LEN], shape.tokens, self.options,
        )  # fmt: skip
        hidden = gather_rows(hidden, starts[1:] - 1, self._num_rows)
        return pages, self._drafts(hidden)

    def next_pass(
        self, pages: tuple[KVPages, ...], draft: Int[Array, " rows"], i: Int[Array, ""]
    ) -> tuple[tuple[KVPages, ...], Int[Array, " rows"]]:
        """One token per row, draft i, at position LENGTH + i. Rows with at most i drafts write nothing."""
        positions, row = self.fields[:, Field.LENGTH] + i, jnp.arange(self.shape.rows)
        writes = i < self.num_drafts
        slot = slots(self.tables, row, positions, writes, self.shape.block_size)
        count = self._num_rows
        # a row without a draft has one key, any key: its results are not used, and must be finite
        lens = jnp.where(row < count, jnp.where(writes, positions + 1, 1), 0)
        starts = jnp.minimum(jnp.arange(self.shape.rows + 1), count)
        hidden, pages = _decode(
            self.params, pages, KVGroupRows(self.tables, slot, lens, starts), draft, positions,
            self.fields[:, Field.ROPE_LEN], 1, self.options,
        )  # fmt: skip
        return pages, self._drafts(hidden)

    @property
    def _num_rows(self) -> Int[Array, ""]:
        """Number of leading rows that include all rows with drafts."""
        return jnp.max(jnp.where(self.num_drafts > 0, jnp.arange(1, self.shape.rows + 1), 0))

    def _drafts(self, hidden: Float[Array, "rows hidden"]) -> Int[Array, " rows"]:
        options = self.options
        logits = decoder.lm_head(
            options.spec, self.params, hidden, layout=options.layout, num_rows=self._num_rows
        )
        return choose_drafts(logits, min(options.target_vocab, options.spec.vocab_size), self._num_rows)


def _decode(
    params: Params, pages: tuple[KVPages, ...], metadata: KVGroupRows, token_ids: Int[Array, " tokens"],
    positions: Int[Array, " tokens"], rope_lens: Int[Array, " tokens"], max_query_len: int, options: DraftModelOptions,
) -> tuple[Float[Array, "tokens hidden"], tuple[KVPages, ...]]:  # fmt: skip
    """Run the draft model's layers over its pages. Every layer uses the same block tables."""
    spec, count = options.spec, metadata.query_start_loc[-1]
    real = jnp.arange(len(token_ids)) < count
    token_ids = jnp.where(real, token_ids, 0)
    hidden = decoder.embed_tokens(
        spec, params, token_ids, positions, layout=options.layout, num_tokens=count, in_loop=True
    )
    hidden, pages, *_ = decoder.decode(
        spec, params, token_ids, positions, pages, metadata,
        PagedAttend(max_query_len, options.implementation), layout=options.layout,
        rope_lens=jnp.maximum(rope_lens, positions + 1), real=real if spec.experts is not None else None,
        num_tokens=count, gated_dot=options.gated_dot, hidden=hidden,
    )  # fmt: skip
    return hidden, pages


def propose_of_arrays(weights: tuple[Array, ...], *arrays: Any, weight_tree: Any, **options: Any) -> Any:
    """`propose` with the weights as a plain tuple, as it is compiled."""
    return propose(jax.tree.unflatten(weight_tree, weights), *arrays, **options)


def absorb_of_arrays(weights: tuple[Array, ...], *arrays: Any, weight_tree: Any, **options: Any) -> Any:
    """`absorb` with the weights as a plain tuple, as it is compiled."""
    return absorb(jax.tree.unflatten(weight_tree, weights), *arrays, **options)


def compile_draft_model(
    params: Params,
    state: DraftState,
    table: Any,
    blocks: Any,
    shape: AbsorbShape | ProposeShape,
    *,
    options: DraftModelOptions,
    placement: Placement,
    store: ProgramStore | None = None,
) -> jax.stages.Compiled:
    """Compile `absorb` or `propose` from arrays or ShapeDtypeStructs.

    params, state: of the drafter, whole on every device. table, blocks: of the target's state.
    The program takes (`flat_weights(params)`, `state.arrays`, table, blocks, packed).
    """
    proposes = isinstance(shape, ProposeShape)
    call = functools.partial(
        propose_of_arrays if proposes else absorb_of_arrays, weight_tree=jax.tree.structure(params), shape=shape,
        options=options, page_v_dim=state.page_v_dim,
    )  # fmt: skip
    arguments = (flat_weights(params), state.arrays, table, blocks, placement.shape((shape.packed_size,), np.int32))
    of_state = jax.tree.map(lambda x: x.format if x.format.layout else None, state.arrays)
    run = placement.on_each_device(call, arguments, None)
    return compile_program(
        run, arguments, donate=(1,), out_shardings=(of_state, None) if proposes else of_state, store=store,
        compiler_options=placement.compiler_options,
    )  # fmt: skip
