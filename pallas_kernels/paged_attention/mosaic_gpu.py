"""paged_attention for Hopper in Pallas, lowered through Mosaic GPU.

1. `mosaic_gpu_prefill.py`: rows of several tokens.
2. `mosaic_gpu_decode.py`: rows of one token. Experimental: its speed was not measured, so Triton's decode is preferred.

`paged_attention` runs both, and needs no Triton. `with_triton_decode` runs 1 and Triton's decode.

Without an NVIDIA GPU they run only inside `jax.experimental.pallas.mosaic_gpu.force_gpu_interpret_mode()` (JAX 0.11 or
newer). Triton kernels choose interpret mode themselves; these do not. Their interpreter consists of ordered callbacks,
and a program with one in a branch pays for the ordering in every step.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_attention import mosaic_gpu_decode, mosaic_gpu_prefill, triton
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.tiling import Tiling
from pallas_kernels.platforms import compiled_on


def paged_attention(
    call: AttentionCall, *, tiling: Tiling | None = None
) -> Float[Array, "tokens q_heads head_dim"]:
    """See `pallas_kernels.paged_attention`. tiling: None: chosen by device and shape."""
    q, starts = call.q, call.query_start_loc
    out = jnp.zeros_like(q) if call.max_query_len == 1 else mosaic_gpu_prefill.prefill(call)
    decoded = mosaic_gpu_decode.decode(call, tiling=tiling)
    begins = starts[:-1]
    after = q.shape[0] + jnp.arange(begins.shape[0])  # indices after the end are dropped
    target = jnp.where(starts[1:] - begins == 1, begins, after)
    return out.at[target].set(decoded.astype(q.dtype), mode="drop", unique_indices=True)


def with_triton_decode(
    call: AttentionCall, *, tiling: Tiling | None = None
) -> Float[Array, "tokens q_heads head_dim"]:
    """As `paged_attention`, but Triton computes the rows of one token."""
    prefilled = mosaic_gpu_prefill.prefill(call) if call.max_query_len > 1 else None
    return compiled_on("cuda", triton.paged_attention)(call, tiling=tiling, prefilled=prefilled)


def refuse(device: Any, q: Any, pages: KVPages, block_tables: Any, max_query_len: int) -> str | None:
    """Reason why `paged_attention` cannot take a call on a jax Device; None if it can."""
    del block_tables
    reason = mosaic_gpu_decode.refuse(device, q, pages)
    return reason if reason or max_query_len == 1 else mosaic_gpu_prefill.refuse(device, q, pages)


def refuse_with_triton(device: Any, q: Any, pages: KVPages, block_tables: Any, max_query_len: int) -> str | None:
    """Reason why `with_triton_decode` cannot take a call on a jax Device; None if it can."""
    return triton.refuse(device, q, pages, block_tables, max_query_len) or mosaic_gpu_prefill.refuse(device, q, pages)
