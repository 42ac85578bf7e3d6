"""write_kv: put new keys and values into their slots, in place where the pages are donated."""

from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.platforms import on_cuda
from pallas_kernels.write_kv import triton

IMPLEMENTATIONS = {
    "xla": KVPages.scatter,
    "triton": on_cuda(triton.write_kv),
}


def write_kv(
    pages: KVPages,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slot_mapping: Int[Array, " tokens"],
    *,
    implementation: str | None = None,
) -> KVPages:
    """Pages with the keys and values of new tokens in their slots.

    k, v:         cast to the pages' dtype.
    slot_mapping: int32; block * block_size + offset, distinct, below num_blocks * block_size; negative = padding,
                  nothing written. Checked by nobody on the device: an id too large is dropped silently.
    implementation: "xla", "triton" (a kernel for NVIDIA; in interpret mode elsewhere), or None to choose.

    Under jit with donated pages the write is in place: no copy of the pages is made.
    """
    name = implementation or "xla"
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}: write_kv has {', '.join(IMPLEMENTATIONS)}")
    expected = (pages.num_kv_heads, pages.head_dim)
    if k.shape != v.shape or k.shape[1:] != expected:
        raise ValueError(f"k {k.shape}, v {v.shape}: both must be [tokens, {expected[0]}, {expected[1]}] as the pages")
    return IMPLEMENTATIONS[name](pages, k, v, slot_mapping)
