"""write_qkv: bias, norm and rotary embedding of a layer's q, k and v. Stores k and v; `finish_qkv` returns them."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import expect_floats, expect_integers, expect_number, expect_pages
from pallas_kernels.kv_pages import FLOATS, KVPages
from pallas_kernels.platforms import Implementation, choose, compiled_on, default_device, pick
from pallas_kernels.raw_qkv import RawQKV
from pallas_kernels.write_kv import IMPLEMENTATIONS as WRITES
from pallas_kernels.write_qkv import cpu, triton, xla

# Arithmetic in XLA operations, then an implementation of write_kv. "triton" and "cpu" do both in one kernel.
IMPLEMENTATIONS = {
    name: Implementation(functools.partial(xla.write_qkv, write=write.call), write.refuse)
    for name, write in WRITES.items()
} | {
    "triton": Implementation(compiled_on("cuda", triton.write_qkv), WRITES["triton"].refuse),
    "cpu": Implementation(cpu.write_qkv, WRITES["cpu"].refuse),
}


def write_qkv(
    pages: KVPages,
    qkv: Float[Array, "tokens kv_heads q_per_kv_plus_2 head_dim"],
    slot_mapping: Int[Array, " tokens"],
    *,
    bias: Float[Array, "kv_heads q_per_kv_plus_2 head_dim"] | None = None,
    cos: Float[Array, "tokens half"] | None = None,
    sin: Float[Array, "tokens half"] | None = None,
    q_norm: Float[Array, " head_dim"] | None = None,
    k_norm: Float[Array, " head_dim"] | None = None,
    norm_eps: float = 1e-6,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], KVPages]:
    """q, ready for `paged_attention`, and the pages with the new keys and values in their slots.

    The steps, in this order: add the bias; RMS norm of q and k, per head (arXiv:1910.07467); rotary embedding of q and
    k (arXiv:2104.09864). A step is skipped if its arguments are None.

    qkv:            per KV head: its query heads, then its key, then its value.
    slot_mapping:   as in `write_kv`. The queries of padding are undefined, but finite if qkv is.
    cos, sin:       float32, of each token's angles, in the rotate-half form: dimension i is paired with i + half.
                    Dimensions from 2 * half on are not rotated.
    q_norm, k_norm: weights of the norms; both or neither.
    implementation: as in `write_kv`. "triton" and "cpu" are one kernel.

    Returns q in qkv's dtype, with heads in the order of the KV heads. The write is in place if the pages are donated.
    Raises ValueError, which names the argument.
    """
    raw = RawQKV(qkv, bias, cos, sin, q_norm, k_norm, expect_number("norm_eps", norm_eps))
    _check(pages, raw)
    tokens, kv_heads, lanes, head_dim = qkv.shape
    expect_integers("slot_mapping", slot_mapping, "[tokens]")
    if slot_mapping.shape != (tokens,):
        raise ValueError(f"slot_mapping {slot_mapping.shape}: must be [{tokens}], one per token of qkv")
    write = pick(IMPLEMENTATIONS, implementation, pages)
    if not tokens:
        return jnp.zeros((0, kv_heads * (lanes - 2), head_dim), qkv.dtype), pages
    return write(pages, raw, slot_mapping.astype(jnp.int32))


def finish_qkv(
    pages: KVPages,
    qkv: Float[Array, "tokens kv_heads q_per_kv_plus_2 head_dim"],
    *,
    bias: Float[Array, "kv_heads q_per_kv_plus_2 head_dim"] | None = None,
    cos: Float[Array, "tokens half"] | None = None,
    sin: Float[Array, "tokens half"] | None = None,
    q_norm: Float[Array, " head_dim"] | None = None,
    k_norm: Float[Array, " head_dim"] | None = None,
    norm_eps: float = 1e-6,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "tokens q_heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
]:
    """q, k and v, with the bits that `write_qkv` returns and stores. `write_kv` stores them.

    It is for keys and values that other devices need too. Arguments and errors as in `write_qkv`; `pages` do not
    change. k and v have the dtype of `pages` if that is a float, else qkv's.
    """
    raw = RawQKV(qkv, bias, cos, sin, q_norm, k_norm, expect_number("norm_eps", norm_eps))
    _check(pages, raw)
    name = implementation or choose(IMPLEMENTATIONS, default_device(), pages)
    pick(IMPLEMENTATIONS, name, pages)  # raises if it cannot take the call
    fused = name == "triton" or (name == "cpu" and pages.dtype in FLOATS)
    if not fused:
        return xla.finish(raw)
    tokens, kv_heads, _, head_dim = qkv.shape
    dtype = pages.dtype if pages.dtype in FLOATS else qkv.dtype
    one_block = KVPages(jnp.zeros((1, 2, kv_heads, tokens, head_dim), dtype))  # the kernel stores into it
    q, one_block = write_qkv(one_block, slot_mapping=jnp.arange(tokens), **vars(raw), implementation=name)
    return q, one_block.data[0, 0].swapaxes(0, 1), one_block.data[0, 1].swapaxes(0, 1)


def _check(pages: KVPages, raw: RawQKV) -> None:
    """Raise ValueError for arguments of `write_qkv` that do not fit each other."""
    qkv, cos, sin = raw.qkv, raw.cos, raw.sin
    expect_pages(pages)
    expect_floats("qkv", qkv, "[tokens, kv_heads, q_per_kv + 2, head_dim]")
    if pages.v_dim is not None:
        raise ValueError("pages: latent pages do not store values separately; use write_kv")
    tokens, kv_heads, lanes, head_dim = qkv.shape
    if (kv_heads, head_dim) != (pages.num_kv_heads, pages.head_dim) or lanes < 3:
        raise ValueError(
            f"qkv {qkv.shape}: must be [tokens, {pages.num_kv_heads}, q_per_kv + 2, {pages.head_dim}], as the pages "
            "have"
        )
    if (cos is None) != (sin is None) or (raw.q_norm is None) != (raw.k_norm is None):
        raise ValueError("cos and sin, q_norm and k_norm: give both of a pair, or neither")
    for part, given in (("cos", cos), ("sin", sin)):
        if given is not None:
            expect_floats(part, given, "[tokens, half]")
        if given is not None and (given.shape[0] != tokens or not 1 <= given.shape[1] <= head_dim // 2):
            raise ValueError(f"{part} {given.shape}: must be [{tokens}, half], half 1 to {head_dim // 2}")
    if cos is not None and sin is not None and cos.shape != sin.shape:
        raise ValueError(f"cos {cos.shape}, sin {sin.shape}: must have the same shape")
    for part, given in (("q_norm", raw.q_norm), ("k_norm", raw.k_norm)):
        if given is not None and given.shape != (head_dim,):
            raise ValueError(f"{part} {given.shape}: must be [{head_dim}]")
    if raw.bias is not None and raw.bias.shape != qkv.shape[1:]:
        raise ValueError(f"bias {raw.bias.shape}: must be {list(qkv.shape[1:])}, as in qkv")
