"""The specification of paged_attention in plain jnp. It gathers every key of every token: slow, but easy to read."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.paged_attention.call import AttentionCall


def paged_attention(call: AttentionCall) -> Float[Array, "tokens q_heads v_dim"]:
    """See `pallas_kernels.paged_attention`. All arithmetic is in float32. Results of padding tokens are zero."""
    rows = call.context_lens.shape[0]
    token = jnp.arange(call.q.shape[0])
    row = jnp.sum(token[:, None] >= call.query_start_loc[None, 1:], axis=1)  # rows that end at or before this token
    real = row < rows
    row = jnp.minimum(row, rows - 1)
    # position of a token in its sequence: the row's last token is at context_len - 1
    position = call.context_lens[row] - call.query_start_loc[row + 1] + token

    keys, values = (a[row] for a in call.pages.gather(call.block_tables, jnp.float32))  # [tokens, kv_heads, keys, dim]
    keys, values = (jnp.repeat(a, call.q_per_kv, axis=1) for a in (keys, values))
    key_position = jnp.arange(keys.shape[2])
    distance = position[:, None] - key_position  # [tokens, keys]
    seen = (distance >= 0) & real[:, None]
    if call.sliding_window is not None:
        seen &= distance < call.sliding_window

    scores = jnp.einsum("thd,thkd->thk", call.q.astype(jnp.float32), keys, precision="highest") * call.scale
    if call.logit_softcap is not None:
        scores = call.logit_softcap * jnp.tanh(scores / call.logit_softcap)
    if call.alibi_slopes is not None:
        scores -= call.alibi_slopes.astype(jnp.float32)[None, :, None] * distance.astype(jnp.float32)[:, None, :]
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    top = scores.max(axis=2, keepdims=True)
    if call.sinks is not None:
        top = jnp.maximum(top, call.sinks[None, :, None])
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=2, keepdims=True)
    if call.sinks is not None:
        total += jnp.exp(call.sinks[None, :, None] - top)
    weights /= jnp.where(total == 0, 1.0, total)
    # a value that no query sees may be NaN, and 0 * NaN is NaN
    values = jnp.where(seen[:, None, :, None], values, 0.0)
    return jnp.einsum("thk,thkd->thd", weights, values, precision="highest").astype(call.q.dtype)


def check_indices(
    block_tables: Array,
    context_lens: Array,
    query_start_loc: Array,
    *,
    tokens: int,
    num_blocks: int,
    block_size: int,
    max_query_len: int,
) -> None:
    """Raise ValueError if an index argument is out of range. JAX would clamp or drop the index silently."""
    tables, lens, starts = (np.asarray(a) for a in (block_tables, context_lens, query_start_loc))
    counts = np.diff(starts)
    if starts[0] != 0 or (counts < 0).any() or starts[-1] > tokens:
        raise ValueError(f"query_start_loc={starts}: must rise from 0 to at most {tokens} tokens")
    if (counts > max_query_len).any():
        raise ValueError(f"query_start_loc={starts}: a row has more than max_query_len={max_query_len} tokens")
    if (lens < counts).any() or (lens > tables.shape[1] * block_size).any():
        room = tables.shape[1] * block_size
        raise ValueError(
            f"context_lens={lens}: must be between the row's tokens {counts} and {room}, the most that the table holds"
        )
    for row, length in enumerate(lens):
        used = tables[row, : -(-int(length) // block_size)]
        if ((used < 0) | (used >= num_blocks)).any():
            raise ValueError(f"block_tables[{row}]={used}: blocks are 0 to {num_blocks - 1}")
