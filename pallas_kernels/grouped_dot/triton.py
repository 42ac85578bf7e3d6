"""grouped_dot for NVIDIA in Pallas, lowered through Triton.

Grid: (tiles of TILE_OUT output columns, blocks). A program sums one tile [rows, TILE_OUT], TILE_IN inputs at a time.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

Ref = Any  # an array inside a kernel, addressed by `.at`
TILE_OUT, TILE_IN = 64, 64  # tile of a matrix: 8 KiB in bfloat16; not tuned on a GPU yet
MIN_ROWS = 16               # fewest rows of a Triton matmul


def grouped_dot(
    x: Float[Array, "blocks rows in"],
    weights: Float[Array, "matrices out in"],
    matrix_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
    *,
    interpret: bool = False,
) -> Float[Array, "blocks rows out"]:
    """See `pallas_kernels.grouped_dot`. interpret: run the kernel in XLA operations, on any platform."""
    blocks, rows, _ = x.shape
    out = weights.shape[1]
    return pl.pallas_call(
        functools.partial(_kernel, tile_rows=max(MIN_ROWS, pl.next_power_of_2(rows))),
        jax.ShapeDtypeStruct((blocks, rows, out), x.dtype),
        grid=(pl.cdiv(out, TILE_OUT), blocks),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="grouped_dot",
    )(matrix_of_block, num_blocks_used.reshape(1), x, weights)


def _kernel(matrix_ref: Ref, used_ref: Ref, x_ref: Ref, weights_ref: Ref, out_ref: Ref, *, tile_rows: int) -> None:
    rows, width = x_ref.shape[1:]
    first, block = pl.program_id(0) * TILE_OUT, pl.program_id(1)
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
    row, column = jnp.arange(tile_rows), first + jnp.arange(TILE_OUT)
    in_rows, in_columns = row < rows, column < out_ref.shape[2]

    def multiply() -> None:
        matrix = matrix_ref[block]

        def add_tile(i: Array, total: Array) -> Array:
            k = i * TILE_IN + jnp.arange(TILE_IN)
            inside = k < width
            a = plgpu.load(
                x_ref.at[block, row[:, None], k[None, :]], mask=in_rows[:, None] & inside[None, :], other=0.0
            )
            b = plgpu.load(
                weights_ref.at[matrix, column[:, None], k[None, :]], mask=in_columns[:, None] & inside[None, :],
                other=0.0,
            )  # fmt: skip
            return total + plgpu.dot(a, b.T, precision=precision)

        total = lax.fori_loop(0, pl.cdiv(width, TILE_IN), add_tile, jnp.zeros((tile_rows, TILE_OUT), jnp.float32))
        plgpu.store(
            out_ref.at[block, row[:, None], column[None, :]], total.astype(out_ref.dtype),
            mask=in_rows[:, None] & in_columns[None, :],
        )  # fmt: skip

    pl.when(block < used_ref[0])(multiply)
