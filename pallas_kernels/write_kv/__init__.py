"""write_kv: stores new keys and values in their slots; in place if the pages are donated."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import expect_floats, expect_integers, expect_pages
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.platforms import Implementation, compiled_on, pick, refuse_cpu
from pallas_kernels.write_kv import cpu, mosaic_tpu, triton

# `Implementation.refuse` takes (device, pages)
IMPLEMENTATIONS = {
    "xla": Implementation(KVPages.scatter),
    "cpu": Implementation(cpu.write_kv, lambda device, pages: refuse_cpu(device)),
    "triton": Implementation(compiled_on("cuda", triton.write_kv), triton.refuse),
    "mosaic_tpu": Implementation(compiled_on("tpu", mosaic_tpu.write_kv), mosaic_tpu.refuse),
}


def matching_write(attention: str) -> str:
    """The write implementation for an implementation of paged_attention: the same back end, or XLA."""
    if attention in ("triton_small", "triton_fixed", "mosaic_prefill"):  # one write for all of these
        return "triton"
    return attention if attention in IMPLEMENTATIONS else "xla"


def write_kv(
    pages: KVPages,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"] | None,
    slot_mapping: Int[Array, " tokens"],
    *,
    implementation: str | None = None,
) -> KVPages:
    """Pages with the keys and values of new tokens in their slots.

    k, v:           cast to the pages' dtype. int8 pages get one scale per token and KV head: the largest absolute value
                    / 127. For fp8 pages, numbers are divided by the static scales and clipped to the fp8 range.
                    Latent pages take v=None, because the values are the first numbers of the keys.
    slot_mapping:   int32, block * block_size + offset. Slots are distinct and below num_blocks * block_size; a negative
                    slot is padding. The values are not checked: a slot that is too large is dropped silently.
    implementation: "xla", "cpu" (a native kernel), "triton" (a kernel for NVIDIA), "mosaic_tpu" (a kernel for TPU), or
                    None for the best one. "cpu" uses XLA operations for latent and 8-bit pages. On CPU, "triton" and
                    "mosaic_tpu" run in interpret mode.

    Under jit with donated pages the write is in place, without a copy of the pages.
    """
    expect_pages(pages)
    expect_floats("k", k, "[tokens, kv_heads, head_dim]")
    if v is not None:
        expect_floats("v", v, "[tokens, kv_heads, head_dim]")
    expect_integers("slot_mapping", slot_mapping, "[tokens]")
    if v is None and pages.v_dim is None:
        raise ValueError("v=None: only latent pages (made with v_dim) take no values")
    if v is not None and pages.v_dim is not None:
        raise ValueError(f"v {v.shape}: latent pages (v_dim={pages.v_dim}) take None, their keys contain the values")
    expected = (pages.num_kv_heads, pages.head_dim)
    if k.shape[1:] != expected or (v is not None and v.shape != k.shape):
        given = None if v is None else v.shape
        raise ValueError(f"k {k.shape}, v {given}: both must be [tokens, {expected[0]}, {expected[1]}], as the pages")
    if slot_mapping.shape != k.shape[:1]:
        raise ValueError(f"slot_mapping {slot_mapping.shape}: must be [{k.shape[0]}], one per token of k")
    write = pick(IMPLEMENTATIONS, implementation, pages)
    if not k.shape[0]:
        return pages
    written = write(pages, k, v, slot_mapping.astype(jnp.int32))
    return written if written.whole is not pages.whole or pages.whole is None else pages.with_data(written.data)
