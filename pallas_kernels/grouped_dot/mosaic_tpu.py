"""grouped_dot for TPU in Pallas, lowered through Mosaic: a program multiplies one block with one tile of its matrix.

Pallas fetches the next tile meanwhile, and fetches none for a block whose tile is that of the block before it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

Ref = Any  # an array inside a kernel
TILE_BYTES = 2 << 20  # of a matrix: two of them, and two blocks of rows and results, fit into 16 MiB of VMEM


def grouped_dot(
    x: Float[Array, "blocks rows in"],
    weights: Float[Array, "groups out in"],
    group_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
    *,
    interpret: Any = False,
) -> Float[Array, "blocks rows out"]:
    """As `pallas_kernels.grouped_dot` says. interpret: as in `paged_attention`'s kernel."""
    blocks, rows, width = x.shape
    out = weights.shape[1]
    tile = min(out, max(128, TILE_BYTES // (width * x.dtype.itemsize) // 128 * 128))

    def used(block: Array, used_ref: Ref) -> Array:
        """Blocks that nobody uses fetch nothing: they name the last one that is."""
        return jnp.maximum(jnp.minimum(block, used_ref[0] - 1), 0)

    return pl.pallas_call(
        _kernel,
        jax.ShapeDtypeStruct((blocks, rows, out), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(out, tile), blocks),  # blocks of one group after each other, with the same tile
            in_specs=[
                pl.BlockSpec((1, rows, width), lambda n, i, group, used_ref: (used(i, used_ref), 0, 0)),
                pl.BlockSpec((1, tile, width), lambda n, i, group, used_ref: (group[used(i, used_ref)], n, 0)),
            ],
            out_specs=pl.BlockSpec((1, rows, tile), lambda n, i, group, used_ref: (i, 0, n)),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="grouped_dot_tpu",
    )(group_of_block, num_blocks_used.reshape(1), x, weights)


def _kernel(group_ref: Ref, used_ref: Ref, x_ref: Ref, weights_ref: Ref, out_ref: Ref) -> None:
    @pl.when(pl.program_id(1) < used_ref[0])
    def _() -> None:
        exact = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
        product = lax.dot_general(
            x_ref[0], weights_ref[0], (((1,), (1,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
        )
        out_ref[0] = product.astype(out_ref.dtype)
