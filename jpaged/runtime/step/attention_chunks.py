"""Chunked attention (Llama 4): a query sees the keys of its own chunk only. It is full attention over other rows.

Each row of a step is cut where its queries pass into another chunk. A part has the blocks of its chunk, as if its
sequence began there. So no attention kernel knows chunks.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int


def rows_by_chunk(
    block_tables: Int[Array, "rows width"],
    context_lens: Int[Array, " rows"],
    query_start_loc: Int[Array, " rows_plus_1"],
    chunk: int,
    *,
    max_query_len: int,
    block_size: int,
) -> tuple[Int[Array, "parts chunk_width"], Int[Array, " parts"], Int[Array, " parts_plus_1"]]:
    """Arguments of `paged_attention` with a row for each part. Queries keep their order.

    chunk:         in tokens, a multiple of `block_size`.
    max_query_len: static upper bound of the tokens per row. It gives the number of parts per row.
    """
    if chunk % block_size:
        raise ValueError(f"chunk must be a multiple of block_size={block_size}, got {chunk}")
    count = 1 if max_query_len == 1 else (max_query_len - 1) // chunk + 2
    first_query = context_lens - jnp.diff(query_start_loc)
    begin = (first_query // chunk)[:, None] * chunk + jnp.arange(count) * chunk  # [rows, parts] first key of each part
    end = jnp.minimum(context_lens[:, None], begin + chunk)
    queries = jnp.maximum(end - jnp.maximum(first_query[:, None], begin), 0)
    keys = jnp.where(queries > 0, end - begin, 0)
    width = min(block_tables.shape[1], chunk // block_size)
    places = (begin // block_size)[..., None] + jnp.arange(width)
    # Entries after the end of the table belong to no key: the value is not used
    tables = jnp.take_along_axis(block_tables[:, None], places, axis=2, mode="clip")
    starts = jnp.concatenate([query_start_loc[:1], query_start_loc[0] + jnp.cumsum(queries.reshape(-1))])
    return tables.reshape(-1, width), keys.reshape(-1), starts.astype(query_start_loc.dtype)
