"""paged_attention: attention of ragged rows over paged keys and values. Checks arguments, chooses an implementation."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import expect_floats, expect_integers, expect_number, expect_pages, expect_static
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_attention import cpu, mosaic_tpu, reference, triton, triton_fixed, xla
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.tiling import Tiling
from pallas_kernels.platforms import Implementation, candidates, compiled_on, nvidia_capability, pick


def _mosaic_gpu(name: str) -> Callable[..., Any]:
    """A function of mosaic_gpu.py, imported at the first call: importing it takes 0.25 s, and few calls need it."""

    def call(*args: Any, **options: Any) -> Any:
        return getattr(importlib.import_module("pallas_kernels.paged_attention.mosaic_gpu"), name)(*args, **options)

    return call


# An implementation takes an AttentionCall. Its `refuse` takes (device, q, pages, block_tables, max_query_len).
IMPLEMENTATIONS = {
    "reference": Implementation(reference.paged_attention),
    "xla": Implementation(functools.partial(xla.paged_attention, device_loops=False)),
    "xla_loop": Implementation(functools.partial(xla.paged_attention, device_loops=True)),
    "cpu": Implementation(cpu.paged_attention, cpu.refuse),
    "triton": Implementation(compiled_on("cuda", triton.paged_attention), triton.refuse),
    "triton_small": Implementation(
        compiled_on("cuda", functools.partial(triton.paged_attention, tiling=Tiling.small())), triton.refuse
    ),
    "triton_fixed": Implementation(compiled_on("cuda", triton_fixed.paged_attention), triton_fixed.refuse),
    "mosaic_tpu": Implementation(compiled_on("tpu", mosaic_tpu.paged_attention), mosaic_tpu.refuse),
    "mosaic_gpu": Implementation(_mosaic_gpu("paged_attention"), _mosaic_gpu("refuse")),
    "mosaic_prefill": Implementation(_mosaic_gpu("with_triton_decode"), _mosaic_gpu("refuse_with_triton")),
}


def usable_implementations(
    device: Any, q: Any, pages: KVPages, block_tables: Any, max_query_len: int
) -> tuple[str, ...]:
    """Names of the implementations that accept a call, best first: each is a fallback for the one before.

    Arguments as in `choose_implementation`. On Hopper, calls with several tokens in a row have "mosaic_prefill" first,
    except for shapes of the tuning file that measured Triton's prefill as faster.
    """
    call = (q, pages, block_tables, max_query_len)
    names = candidates(IMPLEMENTATIONS, device, *call)
    if max_query_len == 1 or (nvidia_capability(device) or (0, 0))[0] != 9:
        return names
    measured = Tiling.measured(device.device_kind, q, pages)
    if measured is not None and measured.prefill_kernel != "mosaic_gpu":
        return names
    faster = IMPLEMENTATIONS["mosaic_prefill"]
    return ("mosaic_prefill", *names) if faster.refuse(device, *call) is None else names


def choose_implementation(device: Any, q: Any, pages: KVPages, block_tables: Any, max_query_len: int) -> str:
    """Name of the best implementation for a jax Device and a call: a kernel if one can run, else XLA operations.

    q, pages, block_tables: arrays or ShapeDtypeStructs. max_query_len: as in `paged_attention`.
    """
    return usable_implementations(device, q, pages, block_tables, max_query_len)[0]


def paged_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    pages: KVPages,
    block_tables: Int[Array, "rows width"],
    context_lens: Int[Array, " rows"],
    query_start_loc: Int[Array, " rows_plus_1"],
    *,
    scale: float,
    max_query_len: int,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    alibi_slopes: Float[Array, " q_heads"] | None = None,
    key_dim: int | None = None,
    implementation: str | None = None,
    debug: bool = False,
) -> Float[Array, "tokens q_heads v_dim"]:
    """Softmax attention of every token over the keys of its own row, up to and including its own key.

    Row i has the tokens query_start_loc[i] to query_start_loc[i + 1] - 1. They are the last tokens of their sequence,
    and their keys must be in the pages already (call `write_kv` first). Rows of one token and longer chunks may be
    mixed. Tokens from query_start_loc[-1] on are padding, with undefined results.

    pages:           the layer's KV; q_heads = kv_heads * q_per_kv, and query head h uses KV head h // q_per_kv.
    block_tables:    int32; entry i of a row is the block of its tokens i * block_size to (i + 1) * block_size - 1.
                     Entries after the row's end, and before the window of its first query, are not used.
    context_lens:    int32; length of each row's sequence, with this step's tokens; 0 = empty row.
    scale:           factor of q.k.
    max_query_len:   static upper bound of the tokens per row; 1 = every row has one token.
    sliding_window:  a query sees at most this many keys, its own included.
    logit_softcap:   c: scores become c * tanh(scores / c)       (Gemma 2, arXiv:2408.00118).
    sinks:           one logit per head, added to the softmax's denominator only            (arXiv:2309.17453).
    alibi_slopes:    float32, one per head: slope * (key position - query position) is added (arXiv:2108.12409).
    key_dim:         q is zero from this column on, so a kernel may leave these columns of the keys out. It changes no
                     result. None: q has no such columns, or the caller does not know them.
    implementation:  None: the best one for device and shape. "reference" is plain and gathers every key. "xla" is an
                     online softmax over fixed blocks of keys, with static loops. "xla_loop" is the same for CPU, with
                     loops that end at the longest row. "triton" are kernels for NVIDIA, "triton_small" the same with
                     small tiles, no splits and no pipeline. "triton_fixed" has one order of sums for chunks and
                     decodes: a token's bits depend on its row only. "mosaic_tpu" is a kernel for TPU. On CPU, these
                     four run in interpret mode. "mosaic_prefill", the default on Hopper, is "triton" for rows of one
                     token and a Mosaic GPU kernel for other rows. "mosaic_gpu" has Mosaic GPU kernels for all rows. It
                     is experimental, and never chosen.
    debug:           check the values of the index arguments, also inside jit. Raises ValueError; from a running
                     program JaxRuntimeError with the same text. Costs a host callback. Without it, indices out of range
                     give undefined results.

    Only the XLA implementations and the reference have gradients. `jax.shard_map` needs `check_vma=False`. All
    arguments but the arrays are static.

    Returns q's dtype, with v_dim numbers per head for latent pages. Sums over keys are in float32. Raises ValueError,
    which names the argument, if shapes or dtypes do not fit, or if the implementation refuses the call.
    """
    expect_pages(pages)
    expect_floats("q", q, "[tokens, q_heads, head_dim]")
    expect_integers("block_tables", block_tables, "[rows, width]")
    expect_integers("context_lens", context_lens, "[rows]")
    expect_integers("query_start_loc", query_start_loc, "[rows + 1]")
    max_query_len = expect_static("max_query_len", max_query_len, 1)
    scale = expect_number("scale", scale)
    if sliding_window is not None:
        sliding_window = expect_static("sliding_window", sliding_window, 1)
    if logit_softcap is not None:
        logit_softcap = expect_number("logit_softcap", logit_softcap, above=0.0)
    if key_dim is not None and expect_static("key_dim", key_dim, 1) > pages.head_dim:
        raise ValueError(f"key_dim={key_dim}: must be at most {pages.head_dim}, the width of q and of the pages")
    if q.shape[1] % pages.num_kv_heads or q.shape[2] != pages.head_dim or not q.shape[1]:
        raise ValueError(
            f"q {q.shape}: must be [tokens, q_heads, head_dim] with a multiple of {pages.num_kv_heads} heads of width "
            f"{pages.head_dim}, as the pages have"
        )
    if query_start_loc.shape[0] != context_lens.shape[0] + 1 or block_tables.shape[0] != context_lens.shape[0]:
        raise ValueError(
            f"block_tables {block_tables.shape}, context_lens {context_lens.shape}, query_start_loc "
            f"{query_start_loc.shape}: must be [rows, width], [rows], [rows + 1]"
        )
    for part, given in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if given is not None and np.shape(given) != (q.shape[1],):
            raise ValueError(f"{part} {np.shape(given)}: must be [{q.shape[1]}], one per query head")
    attend = pick(IMPLEMENTATIONS, implementation, q, pages, block_tables, max_query_len)
    table_keys = block_tables.shape[1] * pages.block_size
    if 0 in (q.shape[0], table_keys, context_lens.shape[0]):
        return jnp.zeros((*q.shape[:2], pages.v_dim or q.shape[2]), q.dtype)
    if sliding_window is not None and sliding_window >= table_keys:
        sliding_window = None  # hides nothing
    if debug:
        check = functools.partial(
            reference.check_indices, tokens=q.shape[0], num_blocks=pages.num_blocks, block_size=pages.block_size,
            max_query_len=max_query_len,
        )  # fmt: skip
        # called at once outside jit, and by the running program inside jit
        jax.debug.callback(check, block_tables, context_lens, query_start_loc)
        # until the check raises, reads must stay inside the arrays
        block_tables = jnp.clip(block_tables, 0, pages.num_blocks - 1)
        context_lens = jnp.clip(context_lens, 0, table_keys)
    call = AttentionCall(
        q, pages, *(a.astype(jnp.int32) for a in (block_tables, context_lens, query_start_loc)),
        scale=scale, max_query_len=max_query_len, sliding_window=sliding_window, logit_softcap=logit_softcap,
        sinks=sinks, alibi_slopes=alibi_slopes, key_dim=key_dim,
    )  # fmt: skip
    return attend(call)
