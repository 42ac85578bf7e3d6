"""Rows of different lengths on one axis of tokens: rows, indices and KV slots of the tokens, on the device."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jpaged.runtime.drafting.draft_state import TableColumns


def block_tables(
    blocks: Int[Array, "table_rows columns"], rows: Int[Array, " rows"], columns: TableColumns
) -> Int[Array, "rows width"]:
    """The drafter's block tables of some rows. blocks: of the target's `DeviceState`."""
    return jnp.take(blocks[:, columns.first : columns.first + columns.width], rows, axis=0, mode="clip")


def with_updates(
    blocks: Int[Array, "table_rows columns"], packed: Int[Array, " packed"]
) -> Int[Array, "table_rows columns"]:
    """The block tables with a plan's changes. packed: (row, column, block) of each change; a row below 0 is padding."""
    updates = packed.reshape(-1, 3)
    changed = jnp.where(updates[:, 0] < 0, len(blocks), updates[:, 0])
    return blocks.at[changed, updates[:, 1]].set(updates[:, 2], mode="drop")


def exclusive_sum(counts: Int[Array, " rows"]) -> Int[Array, " rows_plus_1"]:
    """Index of each row's first token, then the number of all tokens."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])


def rows_of_tokens(
    starts: Int[Array, " rows_plus_1"], tokens: int
) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"]]:
    """Row of each token, and the token's index in its row. Padding tokens are in the last row."""
    token = jnp.arange(tokens)
    row = jnp.minimum(jnp.sum(token[:, None] >= starts[None, 1:], axis=1), len(starts) - 2)
    return row, token - starts[row]


def slots(
    tables: Int[Array, "rows width"], row: Int[Array, " tokens"], positions: Int[Array, " tokens"],
    writes: Bool[Array, " tokens"], block_size: int,
) -> Int[Array, " tokens"]:  # fmt: skip
    """KV slot of each token. -1, which drops the write, for tokens that must not write or lie past the block table."""
    index = positions // block_size
    block = tables[row, jnp.minimum(index, tables.shape[1] - 1)]
    return jnp.where(writes & (index < tables.shape[1]), block * block_size + positions % block_size, -1)
