"""Sparse attention over pages: each token becomes a row whose blocks are the tokens that it attends to.

Pages can be read as if each token were a block (`KVPages.by_token`). Then the slots of the chosen tokens are a block
table, and no implementation of attention knows sparse attention. With at most `top_k` keys, a token's row has all of
them in order.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jpaged.models.indexer import IndexQueries, best_in_groups
from pallas_kernels import KVPages, gather_rows
from pallas_kernels.paged_attention.tiles import row_of_token

# Tokens that are scored together. On CPU all programs score the same number at a time, so a score's bits depend on its
# row only.
TOKENS_AT_ONCE, TOKENS_ON_CPU = 64, 16
# Keys of a step of the scores. On CPU the loop ends at the longest row, and elsewhere at the end of the block table.
KEYS_PER_STEP, KEYS_ON_CPU = 2048, 128


def rows_by_token(
    index: IndexQueries,
    pages: KVPages,
    block_tables: Int[Array, "rows width"],
    context_lens: Int[Array, " rows"],
    query_start_loc: Int[Array, " rows_plus_1"],
    *,
    on_cpu: bool,
) -> tuple[Int[Array, "tokens chosen"], Int[Array, " tokens"], Int[Array, " tokens_plus_1"]]:
    """Arguments of `paged_attention` over `KVPages.by_token`, with a row for each token.

    index: the tokens' queries. The last `index.dim` numbers of a token's vector in the pages are its key.
    """
    tokens, size = index.q.shape[0], pages.block_size
    at_once = TOKENS_ON_CPU if on_cpu else min(TOKENS_AT_ONCE, tokens)
    chosen = min(index.top_k, block_tables.shape[1] * size)
    row = row_of_token(query_start_loc, tokens)
    count = query_start_loc[-1]
    position = context_lens[row] - query_start_loc[row + 1] + jnp.arange(tokens)
    position = jnp.where(jnp.arange(tokens) < count, position, -1)

    def scores(own: IndexQueries, last: Array, row: Array) -> Array:
        return _scores(own, pages, block_tables[row], last, on_cpu=on_cpu)

    def slots_of(best: Array, row: Array) -> Array:
        blocks = jnp.take_along_axis(block_tables[row], best // size, axis=1, mode="clip")
        return blocks * size + best % size

    slots = best_in_groups(
        index, position, chosen, (row,), scores, at_once=at_once, place=slots_of, count=count if on_cpu else None
    )
    starts = jnp.minimum(jnp.arange(tokens + 1, dtype=jnp.int32), count)
    return slots, jnp.minimum(position + 1, chosen), starts


def _scores(
    index: IndexQueries, pages: KVPages, tables: Int[Array, "tokens width"], last: Int[Array, " tokens"], *,
    on_cpu: bool,
) -> Array:  # fmt: skip
    """float32[tokens, keys] scores of all keys that the tables hold. Undefined after the token's position, `last`."""
    blocks_per_step = min(tables.shape[1], max(1, (KEYS_ON_CPU if on_cpu else KEYS_PER_STEP) // pages.block_size))
    steps, tokens = -(-tables.shape[1] // blocks_per_step), tables.shape[0]
    keys_per_step, first = blocks_per_step * pages.block_size, pages.head_dim - index.dim
    tables = jnp.pad(tables, ((0, 0), (0, steps * blocks_per_step - tables.shape[1])))

    def next_keys(step: Array, scores: Array) -> Array:
        blocks = lax.dynamic_slice_in_dim(tables, step * blocks_per_step, blocks_per_step, axis=1)
        if on_cpu:
            lines = blocks[:, :, None] * pages.block_size + jnp.arange(pages.block_size)
            table = pages.data.reshape(-1, pages.head_dim)
            keys = gather_rows(table, lines.reshape(-1), lines.size)[:, first:]
        else:
            keys = pages.data.at[blocks, 0, 0, :, first:].get(mode="clip")
        keys = keys.reshape(tokens, keys_per_step, index.dim)
        return lax.dynamic_update_slice_in_dim(scores, index.scores(keys), step * keys_per_step, axis=1)

    needed = last.max() // keys_per_step + 1 if on_cpu else steps
    return lax.fori_loop(0, needed, next_keys, jnp.zeros((tokens, steps * keys_per_step), jnp.float32))
