"""paged_attention in XLA operations: online softmax over fixed blocks of keys. It works on every platform.

1. The tokens are split into tiles of at most `tile` tokens, all of one row.
2. TILE_GROUP tiles together loop over their keys, KEYS_PER_STEP at a time, counted from position 0 of each sequence.
   The loop keeps the maximum, sum and output of the online softmax (Milakov & Gimelshein 2018; Dao et al. 2022).
3. The results of the tiles are put in token order.

A tile has the same number of query rows (tokens times q_per_kv, padded) in every call, and keys are summed in the same
blocks. So on CPU a query's result has the same bits alone or in any batch, in a chunk or as a decode (`tests/kernels`).
With head_dim 32, tiles of 56 rows and more gave other bits.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.tiles import (
    heads_of_tokens,
    index_in_tiles,
    prompt_tiles,
    queries_of_tiles,
    round_up,
    row_of_token,
    values_of_tiles,
)

# 128 keys: 0.91 ms against 1.13 (64) and 1.39 (32) for 32 rows of 200 tokens, 4 KV heads of 64, bf16, 2 CPU cores.
KEYS_PER_STEP = 128
MASKED = -1e30  # finite: -inf - -inf would be NaN
# Query rows of a tile. For decodes, 16 rows cost as much as 8: 2.2 ms a call of the case above; 32 rows cost 2.8 and
# 64 cost 4.6. With 16, a prompt chunk reads half as much as with 8. XLA's CPU matmuls of under 8 rows have other bits.
TILE_ROWS = 16
# Tiles that loop over the keys together, if loops end at the longest row. For a prompt of 512 tokens, as above, 8 took
# 6.8 ms and 16 took 5.0. 32 was no better, and has to wait for the longest of more rows.
TILE_GROUP = 16
# Fewest tiles of a call, and fewest scores in one softmax. XLA's CPU reductions over fewer scores had other bits.
MIN_TILES, MIN_SCORES = 8, 4096


def paged_attention(call: AttentionCall, *, device_loops: bool) -> Float[Array, "tokens q_heads v_dim"]:
    """See `pallas_kernels.paged_attention`.

    device_loops: loops end at the last key that is needed (CPU). Otherwise they run over the whole block table: on GPU,
    XLA copies the condition of a loop of unknown length to the host in every iteration.
    """
    q, pages, tokens, rows = call.q, call.pages, call.q.shape[0], call.context_lens.shape[0]
    kv_heads, q_per_kv = pages.num_kv_heads, call.q_per_kv
    # tokens and rows of a tile; if q_per_kv is larger than TILE_ROWS, a tile has one token
    tile = 1 if call.max_query_len == 1 else max(1, TILE_ROWS // q_per_kv)
    padded = max(TILE_ROWS, round_up(q_per_kv, 8))
    # rows of a tile in the softmax; the matmuls need more padding
    soft_rows = min(padded, max(tile * q_per_kv, -(-MIN_SCORES // (MIN_TILES * kv_heads * KEYS_PER_STEP))))

    # --- tiles: row and first token of each --------------------------------------------------------------------
    counts = call.query_start_loc[1:] - call.query_start_loc[:-1]
    if call.max_query_len == 1:
        num_tiles = used_tiles = round_up(rows, TILE_GROUP if rows > TILE_GROUP else MIN_TILES)
        # longest rows first, so that tiles that loop together need about the same number of keys
        order = jnp.argsort(-call.context_lens) if device_loops else jnp.arange(rows)
        index_of_row = jnp.argsort(order)
        tile_row = jnp.pad(order, (0, num_tiles - rows))
        tile_first = jnp.where(jnp.arange(num_tiles) < rows, 0, tile)  # offset `tile` is past the row's token
    else:
        tile_row, tile_first = prompt_tiles(call.query_start_loc, tokens, tile)
        used_tiles = jnp.sum(tile_row >= 0)
        num_tiles = round_up(tile_row.shape[0], TILE_GROUP)
        tile_first = jnp.where(tile_row < 0, tokens, tile_first)  # offset `tokens` is past the end of every row
        tile_row, tile_first = (
            jnp.pad(a, (0, num_tiles - a.shape[0]), constant_values=b)
            for a, b in ((jnp.maximum(tile_row, 0), 0), (tile_first, tokens))
        )
    offset = tile_first[:, None] + jnp.arange(tile)  # [tiles, tile] index among the row's tokens
    start = call.query_start_loc[tile_row][:, None]
    real = (offset >= 0) & (offset < counts[tile_row][:, None])
    query_position = jnp.where(real, (call.context_lens - counts)[tile_row][:, None] + offset, -1)
    # keys that the tile needs: tile_begin to tile_end - 1; an empty tile needs none
    tile_end = query_position.max(axis=1) + 1
    large = jnp.iinfo(jnp.int32).max
    tile_begin = jnp.where(real, query_position, large).min(axis=1) - (call.sliding_window or large) + 1
    queries = queries_of_tiles(q, start + offset, kv_heads, padded)  # [tiles, kv_heads, padded, head_dim]

    blocks_per_step = max(1, KEYS_PER_STEP // pages.block_size)
    keys_per_step = blocks_per_step * pages.block_size
    steps = -(-call.block_tables.shape[1] // blocks_per_step)
    tables = jnp.pad(call.block_tables, ((0, 0), (0, steps * blocks_per_step - call.block_tables.shape[1])))

    def attend(first: Array | int, size: int) -> Float[Array, "size kv_heads soft_rows v_dim"]:
        """Results of the tiles first to first + size - 1, over all keys that they need."""

        def cut(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, first, size)

        x, row, begin, end = cut(queries), cut(tile_row), cut(tile_begin), cut(tile_end)
        position = jnp.repeat(cut(query_position), q_per_kv, axis=1)
        padding = ((0, 0), (0, soft_rows - tile * q_per_kv))
        position = jnp.pad(position, padding, constant_values=-1)  # [size, soft_rows]
        own_tables = tables[row]

        def over_keys(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            out, top, total = carry
            blocks = lax.dynamic_slice_in_dim(own_tables, step * blocks_per_step, blocks_per_step, axis=1)
            k, v = pages.gather(blocks, x.dtype)
            key_position = step * keys_per_step + jnp.arange(keys_per_step)
            # a value that no query sees may be NaN, and 0 * NaN is NaN
            needed = key_position < end[:, None]
            if call.sliding_window is not None:
                needed &= key_position >= begin[:, None]
            v = jnp.where(needed[:, None, :, None], v, 0)
            scores = _product("thqd,thkd->thqk", x, k)[:, :, :soft_rows] * call.scale
            distance = position[:, :, None] - key_position
            seen = distance >= 0
            if call.sliding_window is not None:
                seen &= distance < call.sliding_window
            if call.logit_softcap is not None:
                scores = call.logit_softcap * jnp.tanh(scores / call.logit_softcap)
            if call.alibi_slopes is not None:
                slopes = values_of_tiles(call.alibi_slopes, kv_heads, tile, soft_rows)
                scores -= slopes[..., None] * distance.astype(jnp.float32)[:, None]
            scores = jnp.where(seen[:, None], scores, MASKED)
            new_top = jnp.maximum(top, scores.max(axis=3))
            weights = jnp.exp(scores - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            factors = jnp.pad(weights.astype(x.dtype), ((0, 0), (0, 0), (0, padded - soft_rows), (0, 0)))
            added = _product("thqk,thkd->thqd", factors, v)[:, :, :soft_rows]
            return out * shrink[..., None] + added, new_top, total * shrink + weights.sum(axis=3)

        zeros = jnp.zeros((size, kv_heads, soft_rows), jnp.float32)
        carry = (jnp.zeros((size, kv_heads, soft_rows, call.v_dim), jnp.float32), zeros + MASKED, zeros)
        if device_loops:
            low = jnp.int32(0)
            if call.sliding_window is not None:
                low = jnp.maximum(begin.min(), 0) // keys_per_step
            out, top, total = lax.fori_loop(low, -(-end.max() // keys_per_step), over_keys, carry)
        else:
            out, top, total = lax.fori_loop(0, steps, over_keys, carry)
        if call.sinks is not None:
            total += jnp.exp(values_of_tiles(call.sinks, kv_heads, tile, soft_rows) - top)
        return (out / jnp.where(total == 0, 1.0, total)[..., None]).astype(q.dtype)

    if not device_loops or num_tiles <= TILE_GROUP:
        result = attend(0, num_tiles)
    else:

        def next_tiles(i: Array, result: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(result, attend(i * TILE_GROUP, TILE_GROUP), i * TILE_GROUP, axis=0)

        empty = jnp.zeros((num_tiles, kv_heads, soft_rows, call.v_dim), q.dtype)
        result = lax.fori_loop(0, -(-used_tiles // TILE_GROUP), next_tiles, empty)

    # --- results in token order --------------------------------------------------------------------------------
    if call.max_query_len == 1:
        index = index_of_row[row_of_token(call.query_start_loc, tokens)]
    else:
        index = index_in_tiles(call.query_start_loc, tokens, tile)
    return heads_of_tokens(result, index, tile, q_per_kv)


def _product(pattern: str, a: Array, b: Array) -> Array:
    """A batched matmul with float32 sums. float32 operands have full float32 precision on every platform."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(pattern, a, b, precision=exact, preferred_element_type=jnp.float32)
