"""Which tokens go through attention together: tiles of a fixed number of tokens, all of one row."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def prompt_tiles(
    query_start_loc: Int[Array, " rows_plus_1"], tokens: int, tile: int
) -> tuple[Int[Array, " tiles"], Int[Array, " tiles"]]:
    """Row and first token (counted inside its row) of each tile; row -1 for tiles that are not needed.

    As many tiles as any split of `tokens` tokens over the rows can need: every row ends in at most one that is not
    full.
    """
    counts = query_start_loc[1:] - query_start_loc[:-1]
    rows = counts.shape[0]
    tiles = -(-counts // tile)
    ends = jnp.cumsum(tiles)
    index = jnp.arange(-(-tokens // tile) + min(rows, tokens), dtype=jnp.int32)
    row = jnp.sum(index[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    own = jnp.minimum(row, rows - 1)
    first = (index - (ends - tiles)[own]) * tile
    return jnp.where(row < rows, row, -1), jnp.where(row < rows, first, 0).astype(jnp.int32)


def queries_of_tiles(
    q: Float[Array, "tokens q_heads head_dim"], place: Int[Array, "tiles tile"], kv_heads: int, padded: int
) -> Float[Array, "tiles kv_heads padded head_dim"]:
    """The queries of each tile: for each KV head the heads of its group, token by token, and padding.

    place: which token; where it is outside of q, any query.
    """
    (tiles, tile), (_, q_heads, head_dim) = place.shape, q.shape
    lines = tile * q_heads // kv_heads
    queries = jnp.take(q, place, axis=0, mode="clip").reshape(tiles, tile, kv_heads, -1, head_dim)
    queries = queries.transpose(0, 2, 1, 3, 4).reshape(tiles, kv_heads, lines, head_dim)
    return jnp.pad(queries, ((0, 0), (0, 0), (0, padded - lines), (0, 0)))


def values_of_tiles(
    x: Float[Array, " q_heads"], kv_heads: int, tile: int, padded: int
) -> Float[Array, "kv_heads padded"]:
    """A float32 value a query head, laid out as the lines of `queries_of_tiles`; padding is zero."""
    lines = jnp.tile(x.astype(jnp.float32).reshape(kv_heads, 1, -1), (1, tile, 1)).reshape(kv_heads, -1)
    return jnp.pad(lines, ((0, 0), (0, padded - lines.shape[1])))


def heads_of_tokens(
    result: Float[Array, "tiles kv_heads padded head_dim"], place: Int[Array, " tokens"], tile: int, q_per_kv: int
) -> Float[Array, "tokens q_heads head_dim"]:
    """What `queries_of_tiles` laid out, in token order. place: of a token among the places of all tiles."""
    tiles, kv_heads, _, head_dim = result.shape
    result = result[:, :, : tile * q_per_kv].reshape(tiles, kv_heads, tile, q_per_kv, head_dim)
    result = result.transpose(0, 2, 1, 3, 4).reshape(tiles * tile, kv_heads * q_per_kv, head_dim)
    return jnp.take(result, place, axis=0, mode="clip")


def row_of_token(query_start_loc: Int[Array, " rows_plus_1"], tokens: int) -> Int[Array, " tokens"]:
    """The row of each token; the last one for padding."""
    token = jnp.arange(tokens)
    ended = jnp.sum(token[:, None] >= query_start_loc[None, 1:], axis=1)
    return jnp.minimum(ended, query_start_loc.shape[0] - 2)


def place_in_tiles(query_start_loc: Int[Array, " rows_plus_1"], tokens: int, tile: int) -> Int[Array, " tokens"]:
    """Where `prompt_tiles` puts each token, among the places of all tiles."""
    row = row_of_token(query_start_loc, tokens)
    tiles = -(-(query_start_loc[1:] - query_start_loc[:-1]) // tile)
    first_tile = (jnp.cumsum(tiles) - tiles)[row]
    place = jnp.arange(tokens) - query_start_loc[row]
    return (first_tile + place // tile) * tile + place % tile


def round_up(n: int, multiple: int) -> int:
    """n, or the next multiple."""
    return -(-n // multiple) * multiple
