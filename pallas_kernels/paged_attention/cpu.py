"""paged_attention for CPUs: calls the kernel of `cpu_kernel.py` through XLA's foreign function interface."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.native import library
from pallas_kernels.native.kinds import KINDS
from pallas_kernels.platforms import refuse_cpu

# indices of the int32 options; SCALE and CAP have the bits of a float32
WINDOW, FLAGS, SCALE, CAP, QUERY_KIND, PAGE_KIND, V_DIM = range(7)
SINKS, ALIBI = 1, 2  # bits of FLAGS
KERNEL = "pallas_kernels.paged_attention.cpu_kernel"


def refuse(device: Any, q: Any, pages: KVPages, block_tables: Any, max_query_len: int) -> str | None:
    """Reason why the kernel cannot run; None if it can."""
    if refuse_cpu(device) is not None:
        return refuse_cpu(device)
    return kernel().reason


def kernel() -> library.Native:
    """The kernel in this process. Compiled or loaded at the first call."""
    return library.native(KERNEL)


def is_new() -> bool:
    """True if this process compiled the kernel, and must compare it with the reference before use."""
    return kernel().is_new


def discard() -> None:
    """Remove the compiled kernel from disk, because its results are wrong."""
    library.discard(KERNEL)


def paged_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    pages: KVPages,
    block_tables: Int[Array, "rows width"],
    context_lens: Int[Array, " rows"],
    query_start_loc: Int[Array, " rows_plus_1"],
    *,
    scale: float,
    max_query_len: int,
    sliding_window: int | None,
    logit_softcap: float | None,
    sinks: Float[Array, " q_heads"] | None,
    alibi_slopes: Float[Array, " q_heads"] | None,
) -> Float[Array, "tokens q_heads v_dim"]:
    """See `pallas_kernels.paged_attention`. Results of padding tokens are zero."""
    del max_query_len
    options = np.zeros(7, np.int32)
    options[WINDOW] = sliding_window or 0
    options[FLAGS] = SINKS * (sinks is not None) + ALIBI * (alibi_slopes is not None)
    options[SCALE : CAP + 1] = np.array([scale, logit_softcap or 0.0], np.float32).view(np.int32)
    options[QUERY_KIND], options[PAGE_KIND] = KINDS[q.dtype], KINDS[pages.dtype]
    options[V_DIM] = pages.v_dim or 0
    nothing = np.zeros(1, np.float32)
    shape = jax.ShapeDtypeStruct((*q.shape[:2], pages.v_dim or pages.head_dim), q.dtype)
    name = kernel().name
    assert name is not None, "refuse() comes first"
    call = jax.ffi.ffi_call(name, shape)
    return call(
        options, q, query_start_loc, context_lens, block_tables,
        nothing if sinks is None else sinks.astype(jnp.float32),
        nothing if alibi_slopes is None else alibi_slopes.astype(jnp.float32),
        pages.data, nothing if pages.scales is None else pages.scales,
    )  # fmt: skip
