"""write_kv for TPU in Pallas, lowered through Mosaic: a program fills the new places of one slab of a page, in place.

A slab is what a TPU can read and write of a page's tokens: 8 in float32, 16 in bfloat16 (32 bytes of each column), all
heads, keys and values. The tokens are sorted by slot, so that each slab is one program's and no two touch the same;
Pallas fetches the next slab and writes back the last one meanwhile.
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
    """Why the kernels for TPU cannot take pages on a jax Device; None where they can."""
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
    """As `pallas_kernels.write_kv` says; float32 and bfloat16 pages. interpret: as in `paged_attention`'s kernel."""
    data, tokens = pages.data, k.shape[0]
    num_blocks, _, heads, block_size, head_dim = data.shape
    size = 32 // data.dtype.itemsize
    # --- which tokens go to which slab: the same for every layer of a step, and computed once ----------------------
    nowhere = num_blocks * block_size
    slots = jnp.where((slot_mapping < 0) | (slot_mapping > nowhere), nowhere, slot_mapping).astype(jnp.int32)
    order = jnp.argsort(slots)
    slots = slots[order]
    slab = slots // size
    is_first = (slots < nowhere) & (slab != jnp.roll(slab, 1).at[0].set(-1))
    used = jnp.sum(slots < nowhere, dtype=jnp.int32)
    # first token of each slab, in order; behind them the number of tokens that are written
    starts = jnp.sort(jnp.where(is_first, jnp.arange(tokens, dtype=jnp.int32), used))
    starts = jnp.append(starts, used)
    # a program reads `size` tokens from its first one on; float32 since half a register cannot be addressed
    new = jnp.stack([k, v], axis=1).astype(data.dtype).astype(jnp.float32)[order][:, :, :, None]
    new = jnp.pad(new, ((0, size), (0, 0), (0, 0), (0, 0), (0, 0)))

    def slab_of(i: Array, slots: Ref, starts: Ref) -> tuple[Array, int, int, Array, int]:
        slot = jnp.minimum(slots[jnp.minimum(starts[i], tokens - 1)], nowhere - 1)
        return lax.div(slot, block_size), 0, 0, lax.div(lax.rem(slot, block_size), size), 0

    a_slab = pl.BlockSpec((1, 2, heads, size, head_dim), slab_of)
    own_tokens = pl.BlockSpec(  # counted in tokens, not in blocks of them
        tuple(pl.Element(n) for n in (size, 2, heads, 1, head_dim)), lambda i, _, starts: (starts[i], 0, 0, 0, 0)
    )
    written = pl.pallas_call(
        _kernel,
        jax.ShapeDtypeStruct(data.shape, data.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            # one program where there is nothing to write: it puts back what it reads
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
    """new_ref: [size, 2, heads, 1, head_dim] tokens, of which this slab's come first."""
    i = pl.program_id(0)
    start, size = starts_ref[i], slab_ref.shape[3]

    def one(token: Array, slab: Array) -> Array:
        place = lax.rem(slots_ref[start + token], size)
        return jnp.where(lax.broadcasted_iota(jnp.int32, slab.shape, 2) == place, new_ref[token], slab)

    slab = lax.fori_loop(0, starts_ref[i + 1] - start, one, slab_ref[0].astype(jnp.float32))
    out_ref[0] = slab.astype(out_ref.dtype)
