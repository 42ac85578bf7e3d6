"""gated_dot for NVIDIA in Pallas, lowered through Triton.

A program sums a tile of gate and the same tile of up in float32, and stores act(gate) * up. So gate and up, 2 * outputs
numbers per row, are neither written to memory nor read again.

Grid: (tiles of rows in a block of ROWS_TOGETHER, tiles of outputs, blocks). Programs that run at the same time share
x's rows and few tiles of the matrices. So each block reads the matrices once, and x stays in the L2 cache.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_dot.activation import gated
from pallas_kernels.gated_dot.tiling import Tiling, choose
from pallas_kernels.platforms import refuse_triton

Ref = Any  # an array inside a kernel, addressed by `.at`
ROWS_TOGETHER = 2048  # 16 MiB of x with 4,096 inputs: a third of an H200's L2 cache


def gated_dot(
    x: Float[Array, "rows in"],
    weight: Float[Array, "2 out in"],
    num_rows: Int[Array, ""],
    *,
    activation: str,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.gated_dot`. Tiles of rows that begin at or after `num_rows` are zeros.

    tiling: None: chosen by device and shape. interpret: run the kernel in XLA operations, on any platform.
    """
    tiling = tiling or choose(x, weight)
    tiles = pl.cdiv(x.shape[0], tiling.rows)
    together = min(tiles, max(1, ROWS_TOGETHER // tiling.rows))
    return pl.pallas_call(
        functools.partial(_kernel, activation=activation, tiling=tiling, together=together),
        jax.ShapeDtypeStruct((x.shape[0], weight.shape[1]), x.dtype),
        grid=(together, pl.cdiv(weight.shape[1], tiling.outputs), pl.cdiv(tiles, together)),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name="gated_dot",
    )(num_rows.reshape(1), x, weight)


def refuse(device: Any, x: Any, weight: Any, activation: str) -> str | None:
    """Reason why the kernel cannot take a call on a jax Device; None if it can."""
    del weight
    if x.dtype == jnp.float32:
        return "x of float32: it multiplies bfloat16 and float16"
    if activation == "gelu":
        return "activation='gelu': Triton has no complementary error function"
    return refuse_triton(device)


def _kernel(
    num_rows_ref: Ref, x_ref: Ref, weight_ref: Ref, out_ref: Ref, *, activation: str, tiling: Tiling, together: int
) -> None:
    rows, width = x_ref.shape
    outputs = weight_ref.shape[1]
    first = (pl.program_id(2) * together + pl.program_id(0)) * tiling.rows
    row, column = first + jnp.arange(tiling.rows), pl.program_id(1) * tiling.outputs + jnp.arange(tiling.outputs)
    # Tiles at an edge repeat the last row or matrix row instead of masking every load. The results are not stored.
    from_row, from_column = jnp.minimum(row, rows - 1)[:, None], jnp.minimum(column, outputs - 1)[:, None]

    def store(values: Array) -> None:
        mask = (row < rows)[:, None] & (column < outputs)[None, :]
        plgpu.store(out_ref.at[row[:, None], column[None, :]], values.astype(out_ref.dtype), mask=mask)

    def load(ref: Ref, *index: Any, inputs: Array) -> Array:
        if width % tiling.inputs == 0:
            return plgpu.load(ref.at[*index, inputs[None, :]])
        return plgpu.load(ref.at[*index, inputs[None, :]], mask=inputs[None, :] < width, other=0.0)

    def add_tile(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        inputs = i * tiling.inputs + jnp.arange(tiling.inputs)
        a = load(x_ref, from_row, inputs=inputs)
        gate, up = (load(weight_ref, half, from_column, inputs=inputs) for half in (0, 1))
        return sums[0] + plgpu.dot(a, gate.T), sums[1] + plgpu.dot(a, up.T)

    def multiply() -> None:
        zeros = jnp.zeros((tiling.rows, tiling.outputs), jnp.float32)
        gate, up = lax.fori_loop(0, pl.cdiv(width, tiling.inputs), add_tile, (zeros, zeros))
        # rounded as separate matmuls would be
        store(gated(activation, gate.astype(out_ref.dtype), up.astype(out_ref.dtype)))

    needed = first < num_rows_ref[0]
    pl.when(needed)(multiply)
    pl.when(~needed)(lambda: store(jnp.zeros((tiling.rows, tiling.outputs), out_ref.dtype)))
