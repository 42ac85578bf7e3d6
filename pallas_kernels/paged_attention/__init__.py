"""paged_attention: attention of ragged rows over paged keys and values. Signature, checks, choice of implementation."""

import functools
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_attention import reference, triton, xla
from pallas_kernels.platforms import on_cuda

IMPLEMENTATIONS = {
    "reference": reference.paged_attention,
    "xla": functools.partial(xla.paged_attention, device_loops=False),
    "xla_loop": functools.partial(xla.paged_attention, device_loops=True),
    "triton": on_cuda(triton.paged_attention),
}


def choose_implementation(device: Any) -> str:
    """The implementation for a jax Device: on CPU the one whose loops end where the rows end, kernels on NVIDIA.

    Triton's products of 16-bit numbers need compute capability 8.0 (Ampere) or newer; older cards and TPUs take XLA.
    """
    if device.platform == "cpu":
        return "xla_loop"
    major = str(getattr(device, "compute_capability", "")).split(".")[0]  # "9.0" on NVIDIA, a name like "gfx942" on AMD
    if device.platform == "gpu" and major.isdigit() and int(major) >= 8:
        return "triton"
    return "xla"


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
    implementation: str | None = None,
    debug: bool = False,
) -> Float[Array, "tokens q_heads head_dim"]:
    """Softmax attention of every token over the keys of its own row, up to and including itself.

    The tokens of a row lie behind each other, row i at query_start_loc[i] .. query_start_loc[i + 1] - 1; they are the
    last tokens of their sequence, and their keys are in the pages already (`write_kv` first). Any mix of one-token
    rows and longer chunks; tokens beyond query_start_loc[-1] are padding and come out as garbage or zeros.

    pages:           the layer's KV; q_heads must be a multiple of its kv_heads (query head h uses KV head h // group).
    block_tables:    int32; block i of a row holds its tokens i * block_size .. Entries past a row's end are not used.
    context_lens:    int32; keys that the row's last query sees, this step's tokens included; 0 = empty row.
    scale:           what q.k is multiplied by.
    max_query_len:   static bound on the tokens of one row; 1 = every row is one token.
    sliding_window:  a query sees this many keys at most, its own included.
    logit_softcap:   c: scores become c * tanh(scores / c)       (Gemma 2, arXiv:2408.00118).
    sinks:           one logit a head that joins the softmax's sum and nothing else   (arXiv:2309.17453).
    alibi_slopes:    float32 a head: slope * (key position - query position) is added (arXiv:2108.12409).
    implementation:  "reference" (plain, gathers everything), "xla" (online softmax over fixed blocks of keys, static
                     loops), "xla_loop" (the same, loops end at the longest row: for CPU), "triton" (kernels for
                     NVIDIA; in interpret mode elsewhere), or None to choose.
    debug:           check the index arguments on the host (only outside jit); raises ValueError.

    Returns q's shape and dtype. Sums over keys are in float32.
    """
    name = implementation or choose_implementation(jax.devices()[0])
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={name!r}: paged_attention has {', '.join(IMPLEMENTATIONS)}")
    if q.shape[1] % pages.num_kv_heads or q.shape[2] != pages.head_dim:
        raise ValueError(
            f"q {q.shape}: needs a multiple of {pages.num_kv_heads} heads of width {pages.head_dim}, as the pages have"
        )
    if query_start_loc.shape[0] != context_lens.shape[0] + 1 or block_tables.shape[0] != context_lens.shape[0]:
        raise ValueError(
            f"block_tables {block_tables.shape}, context_lens {context_lens.shape}, query_start_loc "
            f"{query_start_loc.shape}: must be [rows, width], [rows], [rows + 1]"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window={sliding_window}: must be at least 1")
    if debug:
        reference.check_indices(q, pages, block_tables, context_lens, query_start_loc, max_query_len)
    return IMPLEMENTATIONS[name](
        q, pages, block_tables, context_lens, query_start_loc,
        scale=scale, max_query_len=max_query_len, sliding_window=sliding_window, logit_softcap=logit_softcap,
        sinks=sinks, alibi_slopes=alibi_slopes,
    )  # fmt: skip
