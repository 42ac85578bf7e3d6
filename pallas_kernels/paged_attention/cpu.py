"""paged_attention for CPUs: calls the kernel of `cpu_kernel.py` through XLA's foreign function interface."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.native import library
from pallas_kernels.native.kinds import KINDS
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.platforms import refuse_cpu

# indices of the int32 options; SCALE and CAP have the bits of a float32. PAGE_SHAPE: the first of four sizes
WINDOW, FLAGS, SCALE, CAP, QUERY_KIND, PAGE_KIND, V_DIM, PAGE_SHAPE = range(8)
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


def paged_attention(call: AttentionCall) -> Float[Array, "tokens q_heads v_dim"]:
    """See `pallas_kernels.paged_attention`. Results of padding tokens are zero."""
    q, pages = call.q, call.pages
    options = np.zeros(PAGE_SHAPE + 4, np.int32)
    options[WINDOW] = call.sliding_window or 0
    options[FLAGS] = SINKS * (call.sinks is not None) + ALIBI * (call.alibi_slopes is not None)
    options[SCALE : CAP + 1] = np.array([call.scale, call.logit_softcap or 0.0], np.float32).view(np.int32)
    options[QUERY_KIND], options[PAGE_KIND] = KINDS[q.dtype], KINDS[pages.dtype]
    options[V_DIM] = pages.v_dim or 0
    options[PAGE_SHAPE:] = pages.num_blocks, pages.data.shape[1], pages.num_kv_heads, pages.block_size
    data = pages.data if pages.whole is None else pages.whole
    nothing = np.zeros(1, np.float32)
    shape = jax.ShapeDtypeStruct((*q.shape[:2], call.v_dim), q.dtype)
    name = kernel().name
    assert name is not None, "refuse() comes first"
    return jax.ffi.ffi_call(name, shape)(
        options, q, call.query_start_loc, call.context_lens, call.block_tables,
        nothing if call.sinks is None else call.sinks.astype(jnp.float32),
        nothing if call.alibi_slopes is None else call.alibi_slopes.astype(jnp.float32),
        # Two axes: the sizes of `TokenPages`, and of pages in another shape, differ from those of their array
        data.reshape(-1, data.shape[-1]), nothing if pages.scales is None else pages.scales,
    )  # fmt: skip
