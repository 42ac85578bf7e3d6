"""grouped_dot for TPU in Pallas, lowered through Mosaic.

Grid: (tiles of output columns, blocks). A program multiplies one block of rows [rows, in] by one tile [tile, in] of
its matrix, and writes [rows, tile]. Pallas fetches the next tile during the matmul. Neighbouring blocks with the same
matrix share the fetched tile.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

Ref = Any  # an array inside a kernel
TILE_BYTES = 2 << 20  # of a matrix tile; two tiles, two blocks of rows and two results fit into 16 MiB of VMEM


def grouped_dot(
    x: Float[Array, "blocks rows in"],
    weights: Float[Array, "matrices out in"],
    matrix_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
    *,
    interpret: Any = False,
) -> Float[Array, "blocks rows out"]:
    """See `pallas_kernels.grouped_dot`. interpret: as in `paged_attention`'s kernel."""
    blocks, rows, width = x.shape
    out = weights.shape[1]
    tile = min(out, max(128, TILE_BYTES // (width * x.dtype.itemsize) // 128 * 128))

    def used(block: Array, used_ref: Ref) -> Array:
        """The block; the last used one if the block is unused, so that unused blocks fetch nothing."""
        return jnp.maximum(jnp.minimum(block, used_ref[0] - 1), 0)

    return pl.pallas_call(
        _kernel,
        jax.ShapeDtypeStruct((blocks, rows, out), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(out, tile), blocks),  # blocks are innermost: neighbours share a tile
            in_specs=[
                pl.BlockSpec((1, rows, width), lambda n, i, matrix, used_ref: (used(i, used_ref), 0, 0)),
                pl.BlockSpec((1, tile, width), lambda n, i, matrix, used_ref: (matrix[used(i, used_ref)], n, 0)),
            ],
            out_specs=pl.BlockSpec((1, rows, tile), lambda n, i, matrix, used_ref: (i, 0, n)),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="grouped_dot_tpu",
    )(matrix_of_block, num_blocks_used.reshape(1), x, weights)


def _kernel(matrix_ref: Ref, used_ref: Ref, x_ref: Ref, weights_ref: Ref, out_ref: Ref) -> None:
    @pl.when(pl.program_id(1) < used_ref[0])
    def _() -> None:
        exact = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
        product = lax.dot_general(
            x_ref[0], weights_ref[0], (((1,), (1,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
        )
        out_ref[0] = product.astype(out_ref.dtype)
