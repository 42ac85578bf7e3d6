"""Tiles for attention: each has a fixed number of tokens, all of one row."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def prompt_tiles(
    query_start_loc: Int[Array, " rows_plus_1"], tokens: int, tile: int
) -> tuple[Int[Array, " tiles"], Int[Array, " tiles"]]:
    """Row and first token of each tile, counted within the row. Unused tiles have row -1.

    There are enough tiles for any distribution of `tokens` tokens over the rows: each row has at most one partial tile.
    """
    counts = query_start_loc[1:] - query_start_loc[:-1]
    rows = counts.shape[0]
    tiles = -(-counts // tile)
    ends = jnp.cumsum(tiles)
    index = jnp.arange(-(-tokens // tile) + min(rows, tokens), dtype=jnp.int32)
    row = jnp.sum(index[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    known = jnp.minimum(row, rows - 1)
    first = (index - (ends - tiles)[known]) * tile
    return jnp.where(row < rows, row, -1), jnp.where(row < rows, first, 0).astype(jnp.int32)


def queries_of_tiles(
    q: Float[Array, "tokens q_heads head_dim"], token: Int[Array, "tiles tile"], kv_heads: int, padded: int
) -> Float[Array, "tiles kv_heads padded head_dim"]:
    """Queries of each tile, per KV head token by token, then padding. token: index into q; out of range: padding."""
    (tiles, tile), (_, q_heads, head_dim) = token.shape, q.shape
    lines = tile * q_heads // kv_heads
    queries = jnp.take(q, token, axis=0, mode="clip").reshape(tiles, tile, kv_heads, -1, head_dim)
    queries = queries.transpose(0, 2, 1, 3, 4).reshape(tiles, kv_heads, lines, head_dim)
    return jnp.pad(queries, ((0, 0), (0, 0), (0, padded - lines), (0, 0)))


def values_of_tiles(
    x: Float[Array, " q_heads"], kv_heads: int, tile: int, padded: int
) -> Float[Array, "kv_heads padded"]:
    """One float32 value per query head, in the order of the rows of `queries_of_tiles`. Padding is zero."""
    lines = jnp.tile(x.astype(jnp.float32).reshape(kv_heads, 1, -1), (1, tile, 1)).reshape(kv_heads, -1)
    return jnp.pad(lines, ((0, 0), (0, padded - lines.shape[1])))


def heads_of_tokens(
    result: Float[Array, "tiles kv_heads padded head_dim"], index: Int[Array, " tokens"], tile: int, q_per_kv: int
) -> Float[Array, "tokens q_heads head_dim"]:
    """The inverse of `queries_of_tiles`: results in token order. index: of each token among the tokens of all tiles."""
    tiles, kv_heads, _, head_dim = result.shape
    result = result[:, :, : tile * q_per_kv].reshape(tiles, kv_heads, tile, q_per_kv, head_dim)
    result = result.transpose(0, 2, 1, 3, 4).reshape(tiles * tile, kv_heads * q_per_kv, head_dim)
    return jnp.take(result, index, axis=0, mode="clip")


def row_of_token(query_start_loc: Int[Array, " rows_plus_1"], tokens: int) -> Int[Array, " tokens"]:
    """The row of each token. Padding tokens get the last row."""
    token = jnp.arange(tokens)
    ended = jnp.sum(token[:, None] >= query_start_loc[None, 1:], axis=1)
    return jnp.minimum(ended, query_start_loc.shape[0] - 2)


def index_in_tiles(query_start_loc: Int[Array, " rows_plus_1"], tokens: int, tile: int) -> Int[Array, " tokens"]:
    """Index of each token among the tokens of all tiles that `prompt_tiles` makes."""
    row = row_of_token(query_start_loc, tokens)
    tiles = -(-(query_start_loc[1:] - query_start_loc[:-1]) // tile)
    first_tile = (jnp.cumsum(tiles) - tiles)[row]
    offset = jnp.arange(tokens) - query_start_loc[row]
    return (first_tile + offset // tile) * tile + offset % tile


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least n."""
    return -(-n // multiple) * multiple
