"""paged_attention for NVIDIA in Pallas, lowered through Triton.

1. `triton_decode.py`: rows of one token. A kernel attends with a fixed number of programs, and a second one merges the
   parts of long rows.
2. `triton_prefill.py`: rows of several tokens. It runs before the decode kernels, which complete its output in place.

A call with `max_query_len=1` runs only 1. Other calls run 2, and then 1 if there are rows of one token. Programs of
rows that belong to another kernel return at once.

Heads of more than 256 numbers (Gemma 4, latent pages) have tiles of their own: `Tiling.by_rule`. Latent pages read as
single tokens (`KVPages.by_token`) are an array with blocks of one token.

The kernels take whole arrays and compute addresses: Triton's lowering has no scalar prefetch and no scratch memory.
Widths that are not powers of two are padded with masks. Masked stores point past the end of the array, because
interpret mode would write clamped duplicates over valid rows.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.kv_pages import FP8, INT8, KVPages, TokenPages
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.tiling import Tiling
from pallas_kernels.paged_attention.triton_decode import decode
from pallas_kernels.paged_attention.triton_keys import Given, Problem
from pallas_kernels.paged_attention.triton_prefill import prefill
from pallas_kernels.platforms import nvidia_capability
from pallas_kernels.write_kv.triton import refuse as refuse_pages

# Widest values, whose sums are in registers. Widest keys: shared memory has room for a tile
MOST_VALUES, MOST_KEYS = 512, 768
# Rows with single tokens as blocks that are not cut into splits, because they fill a GPU. Each has the same few keys.
ENOUGH_ROWS = 64


def paged_attention(
    call: AttentionCall,
    *,
    tiling: Tiling | None = None,
    prefilled: Float[Array, "tokens q_heads head_dim"] | None = None,
    interpret: bool = False,
) -> Float[Array, "tokens q_heads head_dim"]:
    """See `pallas_kernels.paged_attention`.

    tiling: None: chosen by device and shape. prefilled: outputs of rows of several tokens, from another kernel; None:
    these kernels compute all rows. interpret: run the kernels in XLA operations, on any platform.
    """
    tiling = tiling or Tiling.choose(call.q, call.pages, call.key_dim)
    if isinstance(call.pages, TokenPages) and call.context_lens.shape[0] >= ENOUGH_ROWS:
        tiling = dataclasses.replace(tiling, min_split_keys=max(tiling.min_split_keys, call.table_keys))
    problem, given = given_arrays(call, tiling, interpret=interpret)
    if prefilled is None and call.max_query_len > 1:
        prefilled = prefill(problem, given)
    return decode(problem, given, prefilled)


def given_arrays(call: AttentionCall, tiling: Tiling, *, interpret: bool) -> tuple[Problem, Given]:
    """The static parameters and the arrays of the kernels for a call."""
    q, pages = call.q, call.pages
    problem = Problem.of(
        call,
        key_dim=call.key_dim or q.shape[2],
        kv_heads=pages.num_kv_heads,
        table_keys=call.table_keys,
        v_dim=call.v_dim,
        latent=pages.v_dim is not None,
        scales={INT8: "token", FP8: "head"}.get(pages.dtype, "none"),
        tiling=tiling,
        interpret=interpret,
    )
    # single tokens as blocks: a reshape, which XLA does not copy for NVIDIA
    data = pages.data.reshape(-1, 1, 1, 1, q.shape[2]) if isinstance(pages, TokenPages) else pages.data
    # absent arrays have a placeholder, so that each kernel has one signature
    none = jnp.zeros(1, jnp.float32)
    given = Given(
        call.block_tables, call.context_lens, call.query_start_loc,
        none if call.sinks is None else call.sinks.astype(jnp.float32),
        none if call.alibi_slopes is None else call.alibi_slopes.astype(jnp.float32),
        q, data, none if pages.scales is None else pages.scales,
    )  # fmt: skip
    return problem, given


def refuse(device: Any, q: Any, pages: KVPages, block_tables: Any, max_query_len: int) -> str | None:
    """Reason why the kernels cannot take a call on a jax Device; None if they can."""
    del block_tables, max_query_len
    v_dim = pages.v_dim or q.shape[2]
    if v_dim > MOST_VALUES or q.shape[2] > MOST_KEYS:
        return f"head_dim {q.shape[2]} with values of {v_dim}: it takes up to {MOST_KEYS}, values up to {MOST_VALUES}"
    needed, available = _least_shared(q, pages), _shared_bytes(device)
    if needed > available:
        return (
            f"head_dim {q.shape[2]} with {q.shape[1] // pages.num_kv_heads} query heads per KV head: a tile of "
            f"{q.dtype} needs {needed >> 10} KiB of shared memory, a device has {available >> 10} KiB"
        )
    return refuse_pages(device, pages)


def _least_shared(q: Any, pages: KVPages) -> int:
    """Least bytes of shared memory of a decode with wide heads: the queries of a KV head, and a tile of 16 keys."""
    head_dim, v_dim = q.shape[2], pages.v_dim or q.shape[2]
    if head_dim <= 256:
        return 0
    rows = max(16, 1 << (q.shape[1] // pages.num_kv_heads - 1).bit_length())
    parts = 1 if rows <= 32 else 2  # of the values, as in `Tiling.by_rule`
    return (rows * head_dim + 16 * (head_dim + v_dim // parts)) * q.dtype.itemsize


def _shared_bytes(device: Any) -> int:
    """Shared memory of a thread block on a jax Device, as `platforms.has_small_blocks` knows it."""
    match nvidia_capability(device):
        case (8, 6) | (8, 9) | (12, _):
            return 99 << 10
        case (8, _):
            return 163 << 10
    return 227 << 10
