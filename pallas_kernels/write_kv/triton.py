"""write_kv for NVIDIA in Pallas, lowered through Triton: a program copies one KV head of a few tokens, in place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import KVPages

Ref = Any  # an array inside a kernel, addressed by `.at`
TILE_TOKENS = 16  # tokens of a program: enough bytes to hide the launch of one, few enough to fill a card at 64 tokens


def write_kv(
    pages: KVPages,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slot_mapping: Int[Array, " tokens"],
    *,
    interpret: bool = False,
) -> KVPages:
    """As `pallas_kernels.write_kv` says. interpret: run the kernel in XLA operations, on any platform."""
    data = pages.data
    written = pl.pallas_call(
        functools.partial(_kernel, num_blocks=pages.num_blocks, block_size=pages.block_size),
        jax.ShapeDtypeStruct(data.shape, data.dtype),
        grid=(-(-k.shape[0] // TILE_TOKENS), pages.num_kv_heads),
        input_output_aliases={3: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="write_kv",
    )(slot_mapping, k, v, data)
    return KVPages(written)


def _kernel(
    slots_ref: Ref, k_ref: Ref, v_ref: Ref, _: Ref, data_ref: Ref, *, num_blocks: int, block_size: int
) -> None:
    tokens, _heads, head_dim = k_ref.shape
    token, head = pl.program_id(0) * TILE_TOKENS + jnp.arange(TILE_TOKENS), pl.program_id(1)
    column = jnp.arange(pl.next_power_of_2(head_dim))[None, :]
    slot = plgpu.load(slots_ref.at[token], mask=token < tokens, other=-1)
    mask = (slot >= 0)[:, None] & (column < head_dim)
    # What is masked must point past the end, too: interpret mode would write it over slot 0.
    block = jnp.where(slot >= 0, slot // block_size, num_blocks)[:, None]
    place = jnp.where(slot >= 0, slot % block_size, 0)[:, None]
    for which, ref in enumerate((k_ref, v_ref)):
        rows = plgpu.load(ref.at[token[:, None], head, column], mask=mask, other=0.0)
        plgpu.store(data_ref.at[block, which, head, place, column], rows.astype(data_ref.dtype), mask=mask)
