"""quantized_grouped_dot for NVIDIA in Pallas, lowered through Triton, for the layout "rows".

Grid: (tiles of outputs, tiles of a block's rows, blocks). A program multiplies one tile of its block's matrix by one
tile of the block's rows: see `quantized_dot.triton_tile`. Programs of unused blocks return at once, and leave their
results undefined.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.quantized_dot import triton
from pallas_kernels.quantized_dot.tiling import Tiling, choose_for_blocks
from pallas_kernels.quantized_dot.triton_tile import Given, Problem, Ref, Tile, tile_sums
from pallas_kernels.quantized_dot.weight import QuantizedWeight


def quantized_grouped_dot(
    x: Float[Array, "blocks rows in"],
    weight: QuantizedWeight,
    matrix_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
    *,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Float[Array, "blocks rows out"]:
    """See `pallas_kernels.quantized_grouped_dot`. tiling: None: chosen by device and shape, without splits.

    interpret: run the kernel in XLA operations, on any platform.
    """
    (blocks, rows, inputs), outputs = x.shape, weight.num_outputs // weight.shape[0]
    tiling = tiling or choose_for_blocks(rows)
    problem = Problem(weight.kind, rows, inputs, outputs, weight.groups, weight.divides, tiling, interpret)
    given = Given.of(x, weight)
    return pl.pallas_call(
        functools.partial(_kernel, names=tuple(given.present), problem=problem),
        jax.ShapeDtypeStruct((blocks, rows, outputs), x.dtype),
        grid=(pl.cdiv(outputs, tiling.outputs), pl.cdiv(rows, tiling.rows), blocks),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name="quantized_grouped_dot",
    )(matrix_of_block, num_blocks_used.reshape(1), *given.present.values())


def refuse(device: Any, x: Any, weight: QuantizedWeight) -> str | None:
    """Reason why the kernel cannot take a call on a jax Device; None if it can."""
    return triton.refuse(device, x, weight, x.dtype)


def _kernel(matrix_ref: Ref, used_ref: Ref, *refs: Ref, names: tuple[str, ...], problem: Problem) -> None:
    *arrays, out_ref = refs
    tiling, block = problem.tiling, pl.program_id(2)
    row = pl.program_id(1) * tiling.rows + jnp.arange(tiling.rows)
    column = pl.program_id(0) * tiling.outputs + jnp.arange(tiling.outputs)

    def multiply() -> None:
        inside = None if problem.rows % tiling.rows == 0 else row < problem.rows
        # a tile at the edge repeats the matrix's last output, and does not store it
        output = matrix_ref[block] * problem.outputs + jnp.minimum(column, problem.outputs - 1)
        tile = Tile(block * problem.rows + row, inside, output, jnp.int32(0))
        given = Given.from_refs(names, tuple(arrays))
        total = tile_sums(problem, given, tile)
        if given.row_scales is not None:
            total *= plgpu.load(given.row_scales.at[jnp.minimum(tile.row, given.row_scales.shape[0] - 1)])[None, :]
        mask = (row < problem.rows)[None, :] & (column < problem.outputs)[:, None]
        plgpu.store(out_ref.at[block, row[None, :], column[:, None]], total.astype(out_ref.dtype), mask=mask)

    pl.when(block < used_ref[0])(multiply)
