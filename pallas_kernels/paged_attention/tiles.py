"""Which tokens go through attention together: tiles of a fixed number of tokens, all of one row."""

import jax.numpy as jnp
from jaxtyping import Array, Int


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
