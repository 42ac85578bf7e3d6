"""write_kv: put new keys and values into their slots, in place where the pages are donated."""

from collections.abc import Collection
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import FLOATS, KVPages
from pallas_kernels.platforms import on_cuda, refuse_triton
from pallas_kernels.write_kv import triton

IMPLEMENTATIONS = {
    "xla": KVPages.scatter,
    "triton": on_cuda(triton.write_kv),
}


def choose_implementation(device: Any, pages: KVPages) -> str:
    """The implementation of the writes for a jax Device: a kernel on NVIDIA, XLA's scatter elsewhere."""
    return "triton" if device.platform == "gpu" and _refuse_triton(device, pages) is None else "xla"


def check_implementation(name: str, implementations: Collection[str], pages: KVPages) -> None:
    """Raise ValueError where a write's implementation is not there, or cannot run here."""
    if name not in implementations:
        raise ValueError(f"implementation={name!r}: must be one of {', '.join(implementations)}")
    reason = _refuse_triton(jax.devices()[0], pages) if name == "triton" else None
    if reason is not None:
        raise ValueError(f"implementation={name!r} cannot take this: {reason}. Leave it out to have one chosen")


def _refuse_triton(device: Any, pages: KVPages) -> str | None:
    return refuse_triton(device) if pages.v_dim is None else "latent pages go through 'xla'"


def write_kv(
    pages: KVPages,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"] | None,
    slot_mapping: Int[Array, " tokens"],
    *,
    implementation: str | None = None,
) -> KVPages:
    """Pages with the keys and values of new tokens in their slots.

    k, v:         cast to the pages' dtype; int8 pages get a scale a token and KV head (largest absolute value / 127),
                  fp8 pages are divided by their static scales, and what is too large becomes the largest number.
                  Latent pages take no v: it is the beginning of k.
    slot_mapping: int32; block * block_size + offset, distinct, below num_blocks * block_size; negative = padding,
                  nothing written. Checked by nobody on the device: an id too large is dropped silently.
    implementation: "xla", "triton" (a kernel for NVIDIA; in interpret mode elsewhere), or None to choose.

    Under jit with donated pages the write is in place: no copy of the pages is made.
    """
    name = implementation or choose_implementation(jax.devices()[0], pages)
    check_implementation(name, IMPLEMENTATIONS, pages)
    if (v is None) != (pages.v_dim is not None):
        raise ValueError(f"v: latent pages (v_dim={pages.v_dim}) take None, others an array")
    expected = (pages.num_kv_heads, pages.head_dim)
    if k.shape[1:] != expected or (v is not None and v.shape != k.shape):
        given = None if v is None else v.shape
        raise ValueError(f"k {k.shape}, v {given}: both must be [tokens, {expected[0]}, {expected[1]}] as the pages")
    if k.dtype not in FLOATS or (v is not None and v.dtype not in FLOATS):
        raise ValueError(f"k of {k.dtype}: must be bfloat16, float16 or float32, and v too")
    if slot_mapping.shape != k.shape[:1]:
        raise ValueError(f"slot_mapping {slot_mapping.shape}: must be [{k.shape[0]}], as many as k has tokens")
    return IMPLEMENTATIONS[name](pages, k, v, slot_mapping)
