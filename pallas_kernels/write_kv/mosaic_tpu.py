"""write_kv for TPU in Pallas, lowered through Mosaic.

A slab is the smallest part of a page that a TPU can read and write: 8 tokens in float32, 16 in bfloat16 (32 bytes of
each column). It has the keys and values of all heads. Grid: (slabs with new tokens,). A program reads one slab, fills
the slots of its new tokens, and writes the slab back in place. The tokens are sorted by slot, so each slab has exactly
one program. Pallas fetches the next slab and writes the previous one back during the work on a slab.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.platforms import refuse_tpu

Ref = Any  # an array inside a kernel


def refuse(device: Any, pages: KVPages) -> str | None:
    """Reason why the kernels for TPU cannot take pages on a jax Device; None if they can."""
    if pages.dtype not in (jnp.float32, jnp.bfloat16) or pages.v_dim is not None:
        return f"pages are {pages.dtype}{'' if pages.v_dim is None else ', latent'}: it takes float32 and bfloat16"
    packed = 32 // pages.dtype.itemsize  # tokens in a register: 8 of float32, 16 of bfloat16
    if pages.block_size % packed:
        return f"block_size={pages.block_size}: it takes multiples of {packed} for {pages.dtype}"
    return refuse_tpu(device)


def write_kv(
    pages: KVPages,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slot_mapping: Int[Array, " tokens"],
    *,
    interpret: Any = False,
) -> KVPages:
    """See `pallas_kernels.write_kv`. Takes float32 and bfloat16 pages.

    interpret: True to run the kernel in XLA operations, on any platform; `pltpu.InterpretParams` to check its DMAs.
    """
    data, tokens = pages.data, k.shape[0]
    num_blocks, _, heads, block_size, head_dim = data.shape
    size = 32 // data.dtype.itemsize
    # --- tokens of each slab: the same for all layers of a step, so XLA computes this once ------------------------
    past_end = num_blocks * block_size  # slot of padding
    slots = jnp.where((slot_mapping < 0) | (slot_mapping > past_end), past_end, slot_mapping).astype(jnp.int32)
    order = jnp.argsort(slots)
    slots = slots[order]
    slab = slots // size
    is_first = (slots < past_end) & (slab != jnp.roll(slab, 1).at[0].set(-1))
    used = jnp.sum(slots < past_end, dtype=jnp.int32)
    # first token of each slab, in order; then the number of tokens that are written
    starts = jnp.sort(jnp.where(is_first, jnp.arange(tokens, dtype=jnp.int32), used))
    starts = jnp.append(starts, used)
    # A program reads `size` tokens, starting at its slab's first. In float32, because half of a register cannot be
    # addressed.
    new = jnp.stack([k, v], axis=1).astype(data.dtype).astype(jnp.float32)[order][:, :, :, None]
    new = jnp.pad(new, ((0, size), (0, 0), (0, 0), (0, 0), (0, 0)))

    def slab_of(i: Array, slots: Ref, starts: Ref) -> tuple[Array, int, int, Array, int]:
        slot = jnp.minimum(slots[jnp.minimum(starts[i], tokens - 1)], past_end - 1)
        return lax.div(slot, block_size), 0, 0, lax.div(lax.rem(slot, block_size), size), 0

    a_slab = pl.BlockSpec((1, 2, heads, size, head_dim), slab_of)
    own_tokens = pl.BlockSpec(  # indexed by token, not by blocks of `size` tokens
        tuple(pl.Element(n) for n in (size, 2, heads, 1, head_dim)), lambda i, _, starts: (starts[i], 0, 0, 0, 0)
    )
    written = pl.pallas_call(
        _kernel,
        jax.ShapeDtypeStruct(data.shape, data.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            # at least one program; with nothing to write, it writes back the slab that it read
            grid=(jnp.maximum(jnp.sum(is_first, dtype=jnp.int32), 1),),
            in_specs=[own_tokens, a_slab],
            out_specs=a_slab,
        ),
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="write_kv_tpu",
    )(slots, starts, new, data)
    return KVPages(written)


def _kernel(slots_ref: Ref, starts_ref: Ref, new_ref: Ref, slab_ref: Ref, out_ref: Ref) -> None:
    """new_ref: [size, 2, heads, 1, head_dim] tokens; those of this slab come first."""
    i = pl.program_id(0)
    start, size = starts_ref[i], slab_ref.shape[3]

    def put_token(token: Array, slab: Array) -> Array:
        offset = lax.rem(slots_ref[start + token], size)
        return jnp.where(lax.broadcasted_iota(jnp.int32, slab.shape, 2) == offset, new_ref[token], slab)

    slab = lax.fori_loop(0, starts_ref[i + 1] - start, put_token, slab_ref[0].astype(jnp.float32))
    out_ref[0] = slab.astype(out_ref.dtype)
