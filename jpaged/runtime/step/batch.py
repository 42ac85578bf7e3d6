"""Inputs of a step: the host packs the plan into one array, and the device unpacks it into a `Batch`.

Called by: `StageRunner.forward`, which packs; the forward program, which unpacks.
Owns: the layout of the packed plan, the only array that a step of plain decodes uploads.
Never: downloads a device array.

For decodes the host sends row numbers and new blocks. Token ids, positions and lengths come from the request table, and
KV slots from the block tables, which are on the device too.
"""

import dataclasses
import functools
from collections.abc import Callable

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jpaged.engine.step_plan import FROM_DEVICE, NO_ADAPTER, StepPlan, num_guesses
from jpaged.models.recurrent import StateRows
from jpaged.runtime.placement import Placement
from jpaged.runtime.state import NUM_FIELDS, DeviceState, Field, Leaf, adapter_slots, row_values

# Room in a packed plan for block-table changes beyond the blocks that its own tokens can fill.
SPARE_UPDATES = 64


@dataclasses.dataclass(frozen=True)
class ForwardShape:
    """Key of a forward program, and the layout of its packed plan."""

    is_decode: bool  # each row computes one token, its last one in the request table; tokens == rows
    tokens: int
    rows: int
    block_size: int
    num_kv_groups: int = 1
    token_parts: int = 1  # devices that share the tokens, with context parallelism (`context`)
    drafts: int = 0  # most drafts per row of a verify program; 0: not a verify program
    proposes: bool = False  # a verify program that takes one more argument: the drafts of a drafter on the device
    captures: bool = False  # returns the step's tokens and hidden states, for a draft head
    row_len: int = 0  # slots of each text, of an encoder: tokens == rows * row_len; 0: a decoder

    @property
    def max_updates(self) -> int:
        """Maximum `block_updates`. Per KV group: blocks that the tokens fill, and one started block per row."""
        return self.num_kv_groups * (self.tokens // self.block_size + self.rows) + SPARE_UPDATES

    @property
    def max_query_len(self) -> int:
        """Upper bound of the tokens of a row, on one device."""
        if self.is_decode:
            return 1
        return 1 + self.drafts if self.drafts else self.row_len or self.tokens // self.token_parts

    @functools.cached_property  # computing it would take 8 us at every step
    def cuts(self) -> dict[str, slice]:
        """Slice of each part in the packed int32 array, by name."""
        if self.row_len:
            sizes = {"output_rows": 2 * self.rows, "num_tokens": self.rows, "type_1_from": self.rows}
            sizes["prompt_tokens"] = self.tokens
        elif self.drafts:
            guesses = self.rows * num_guesses(self.drafts)
            sizes = {"rows": self.rows, "updates": 3 * self.max_updates, "num_tokens": self.rows}
            sizes |= {"guesses": guesses, "first_guess": self.rows}
        else:
            sizes = {"rows": self.rows, "output_rows": 2 * self.rows, "updates": 3 * self.max_updates}
        if not self.is_decode and not self.drafts and not self.row_len:
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
        """Number of int32s in the packed plan."""
        return max(cut.stop for cut in self.cuts.values())

    def __str__(self) -> str:
        if self.is_decode:
            return f"decode {self.rows} rows" + self.captures * ", followed"
        if self.row_len:
            return f"encode {self.rows} texts of {self.row_len} tokens"
        return f"{'verify' if self.drafts else 'mixed'} {self.tokens} tokens"


def block_updates(plan: StepPlan, width: int) -> np.ndarray:
    """Entries of `DeviceState.blocks` to set: int32[U, 3] with (row, column, block). width: columns per KV group.

    Includes the block tables of rows in `plan.row_inits`.
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
    """Pack a plan into int32[packed_size] for the forward program. updates: int32[U, 3], U <= shape.max_updates."""
    packed = np.full(shape.packed_size, -1, np.int32)  # -1 is padding
    cuts, rows = shape.cuts, len(plan.rows)
    if shape.row_len:
        _pack_texts(plan, packed, shape)
        return packed
    packed[cuts["rows"]][:rows] = plan.rows
    packed[cuts["updates"]][: updates.size] = updates.ravel()
    if plan.drafts is not None:
        counts = packed[cuts["num_tokens"]]
        counts[:] = 0
        counts[:rows] = plan.num_tokens
        packed[cuts["guesses"]].reshape(shape.rows, -1)[:rows] = plan.drafts.guesses
        packed[cuts["first_guess"]][:rows] = plan.drafts.first
        return packed
    _pack_output_rows(plan, packed[cuts["output_rows"]].reshape(2, shape.rows))
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


def _pack_texts(plan: StepPlan, packed: np.ndarray, shape: ForwardShape) -> None:
    """`pack` for an encoder. Each row's pooled vector follows the hidden states of all slots."""
    cuts, rows = shape.cuts, len(plan.rows)
    outputs = packed[cuts["output_rows"]].reshape(2, shape.rows)
    outputs[0, :rows], outputs[1, :rows] = plan.rows, shape.tokens + np.arange(rows)
    counts = packed[cuts["num_tokens"]]
    counts[:] = 0
    counts[:rows] = plan.num_tokens
    packed[cuts["type_1_from"]][:rows] = plan.type_1_from
    ids = packed[cuts["prompt_tokens"]].reshape(shape.rows, shape.row_len)
    ids[:] = 0
    ids[np.arange(shape.row_len) < counts[:, None]] = plan.prompt_tokens


def slots_of_tokens(plan: StepPlan, index: np.ndarray, shape: ForwardShape) -> np.ndarray:
    """int32[N]: indices of the step's tokens in `DeviceState.hidden`. index: int32[N], among the step's tokens."""
    if not shape.row_len:
        return index
    first = np.cumsum(plan.num_tokens) - plan.num_tokens
    row = np.searchsorted(first, index, side="right") - 1
    return (row * shape.row_len + index - first[row]).astype(np.int32)


def _pack_output_rows(plan: StepPlan, packed: np.ndarray) -> None:
    """Write the next `DeviceState.output_rows` into `packed`: int32[2, rows], full of padding (-1)."""
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
    """Inputs of `PagedAttend` for one KV group: where the step's KV is. Padding tokens have slot -1."""

    block_tables: Leaf     # int32[rows, width]
    slots: Leaf            # int32[tokens]
    context_lens: Leaf     # int32[rows]
    query_start_loc: Leaf  # int32[rows + 1]


def rows_by_part(
    kv_groups: tuple[KVGroupRows, ...], parts: tuple[int, ...], block_size: int
) -> tuple[KVGroupRows | tuple[KVGroupRows, ...], ...]:
    """The KV groups; one whose pages are shared by n layers as n entries, which see the pool as n times the pages.

    parts: `KVGroups.parts`.
    """

    def of_part(rows: KVGroupRows, count: int, part: int) -> KVGroupRows:
        block, offset = rows.slots // block_size, rows.slots % block_size
        slots = jnp.where(rows.slots < 0, -1, (block * count + part) * block_size + offset)
        return rows.replace(block_tables=rows.block_tables * count + part, slots=slots)

    if not parts:
        return kv_groups
    return tuple(
        rows if count == 1 else tuple(of_part(rows, count, part) for part in range(count))
        for rows, count in zip(kv_groups, parts, strict=True)
    )


@flax.struct.dataclass
class Batch:
    """Inputs of the decoder, built on the device. Padding rows have 0 tokens."""

    rows: Leaf     # int32[rows]  row of the table; padding rows point past its end
    lengths: Leaf  # int32[rows]  sequence length after the step = position of the sampled token
    kv_groups: tuple[KVGroupRows, ...]
    real: Leaf       # bool[tokens]  False: padding
    token_ids: Leaf  # int32[tokens]
    positions: Leaf  # int32[tokens]
    rope_lens: Leaf  # int32[tokens]  max(the row's rope_len, position + 1)
    # int32[3, tokens]  of a verify step: the token's row of the table, past its end for padding; its index in the row,
    # where 0 is the row's last token and i is draft i; the draft, -1 at index 0 and where no draft is known
    checked: Leaf | None = None
    adapter_slots: Leaf | None = None  # int32[tokens]  slot of each token's adapter; None: the engine has none
    state_rows: StateRows | None = None  # for recurrent layers; None: the model has none


def build_batch(
    state: DeviceState, packed: Int[Array, " packed"], shape: ForwardShape,
    proposed: Int[Array, "rows drafts"] | None = None, *, adapters: bool = False,
) -> tuple[DeviceState, Batch]:  # fmt: skip
    """Unpack the plan, apply its changes to the table and the block tables, and build the decoder's inputs.

    proposed: drafts of a drafter on the device, for rows of a verify step whose `first` is FROM_DEVICE.
    adapters: the engine has LoRA adapters.
    """
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
        if not shape.drafts:
            values = part["init_values"].reshape(-1, NUM_FIELDS)
            table = table.at[drop_padding(part["init_rows"])].set(values, mode="drop")
        num_tokens = part["num_tokens"]

    fields = jnp.take(table, rows, axis=0, mode="clip")
    block_tables = jnp.take(blocks, rows, axis=0, mode="clip")
    length = fields[:, Field.LENGTH]
    query_start_loc = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(num_tokens, dtype=jnp.int32)])
    token, checked = jnp.arange(shape.tokens), None
    if shape.is_decode:
        token_row, real, positions = token, num_tokens > 0, length
        token_ids = fields[:, Field.LAST_TOKEN]
    else:
        token_row = jnp.minimum(jnp.sum(token[:, None] >= query_start_loc[None, 1:], axis=1), shape.rows - 1)
        real = token < query_start_loc[-1]
        positions = length[token_row] + token - query_start_loc[token_row]
        if shape.drafts:
            offset = token - query_start_loc[token_row]
            drafts = _drafts(part, fields, shape.drafts, proposed)
            draft = jnp.where(offset > 0, drafts[token_row, jnp.clip(offset - 1, 0, shape.drafts - 1)], -1)
            token_ids = jnp.where(offset > 0, jnp.maximum(draft, 0), fields[token_row, Field.LAST_TOKEN])
            checked = jnp.stack([jnp.where(real, rows[token_row], capacity), offset, draft])
        else:
            from_table = token_row < part["num_decodes"][0]
            token_ids = jnp.where(from_table, fields[token_row, Field.LAST_TOKEN], part["prompt_tokens"])
    positions = jnp.where(real, positions, 0)
    context_lens = jnp.where(num_tokens > 0, length + num_tokens, 0)
    kv_groups = []
    for tables in jnp.split(block_tables, shape.num_kv_groups, axis=1):
        block = tables[token_row, jnp.minimum(positions // shape.block_size, tables.shape[1] - 1)]
        slots = jnp.where(real, block * shape.block_size + positions % shape.block_size, -1)
        kv_groups.append(KVGroupRows(tables, slots, context_lens, query_start_loc))
    state_rows = StateRows(rows, length, query_start_loc, shape.max_query_len, writes=not shape.drafts)
    batch = Batch(
        rows=rows,
        lengths=length + num_tokens,
        kv_groups=tuple(kv_groups),
        real=real,
        token_ids=jnp.where(real, token_ids, 0),
        positions=positions,
        rope_lens=jnp.maximum(fields[token_row, Field.ROPE_LEN], positions + 1),
        checked=checked,
        adapter_slots=jnp.where(real, adapter_slots(fields)[token_row], NO_ADAPTER) if adapters else None,
        state_rows=state_rows if state.recurrent else None,
    )
    return state.replace(table=table, blocks=blocks), batch


def _drafts(
    part: dict[str, Array], fields: Int[Array, "rows num_fields"], count: int,
    proposed: Int[Array, "rows drafts"] | None,
) -> Int[Array, "rows drafts"]:  # fmt: skip
    """The first `count` drafts after each row's last token; -1 where no draft is known. See `DraftPlan`."""
    guesses, first = part["guesses"].reshape(len(fields), -1), part["first_guess"]
    length, last = fields[:, Field.LENGTH], fields[:, Field.LAST_TOKEN]
    start = length - first  # index of the guess for the last token's position; -1: the guesses start after it
    guessed_last = jnp.take_along_axis(guesses, start[:, None], axis=1, mode="clip")[:, 0]
    fits = (start == -1) | ((start >= 0) & (start < guesses.shape[1]) & (guessed_last == last))
    index = start[:, None] + 1 + jnp.arange(count)
    drafts = jnp.take_along_axis(guesses, index, axis=1, mode="clip")
    drafts = jnp.where(fits[:, None] & (index < guesses.shape[1]), drafts, -1)
    return drafts if proposed is None else jnp.where((first == FROM_DEVICE)[:, None], proposed, drafts)


def upload_long_rows(
    state: DeviceState, plan: StepPlan, width: int, most: int, upload: Callable[..., DeviceState], placement: Placement
) -> tuple[DeviceState, np.ndarray]:
    """Upload block tables that do not fit into the packed plan, one row at a time, longest first.

    width: columns per KV group. most: updates that fit. upload: program of `compile_upload_row`; donates `state`.
    Returns the state, and the `block_updates` still to pack: int32[U, 3].
    """
    updates = block_updates(plan, width)
    for init in sorted(plan.row_inits, key=lambda i: -len(i.blocks)):
        if len(updates) <= most:
            break
        row = np.zeros(1 + state.blocks.shape[1], np.int32)
        row[0] = init.row
        row[1 + init.blocks[:, 0] * width + init.blocks[:, 1]] = init.blocks[:, 2]
        state = upload(state, placement.put(row))
        updates = updates[updates[:, 0] != init.row]
    return state, updates
