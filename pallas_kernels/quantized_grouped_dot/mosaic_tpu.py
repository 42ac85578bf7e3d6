"""quantized_grouped_dot for TPU in Pallas, lowered through Mosaic, for int8 and int4 in the layout "lanes".

It is the kernel of `quantized_dot` with a tile of rows for each block. The matrix of a block is a range of all
outputs. Blocks are outermost in the grid, so a matrix is read once for each of its blocks.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantized_dot import mosaic_tpu
from pallas_kernels.quantized_dot.mosaic_tpu import MOST_ROWS, MOST_STACKED, Places, Problem, Tiling, arrays_of, launch
from pallas_kernels.quantized_dot.weight import LANES, QuantizedWeight

ROWS = 16  # rows of a bfloat16 register


def quantized_grouped_dot(
    x: Float[Array, "blocks rows in"],
    weight: QuantizedWeight,
    matrix_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
    *,
    interpret: Any = False,
) -> Float[Array, "blocks rows out"]:
    """See `pallas_kernels.quantized_grouped_dot`. Unused blocks are zeros. interpret: run in XLA operations."""
    (blocks, given_rows, inputs), outputs = x.shape, weight.num_outputs // weight.shape[0]
    x = jnp.pad(x, ((0, 0), (0, -given_rows % ROWS), (0, 0)))
    rows = x.shape[1]
    tiling = Tiling.by_rule(rows, inputs, outputs, bits=weight.bits, group_size=weight.group_size, divides=True)
    tiles = outputs // tiling.outputs
    used = lambda i, scalars: jnp.maximum(jnp.minimum(i, scalars[1][0] - 1), 0)  # noqa: E731
    places = Places(
        rows=used,
        outputs=lambda i, n, scalars: scalars[0][used(i, scalars)] * tiles + n,
        needed=lambda i, scalars: i < scalars[1][0],
    )
    given = {"x": x.reshape(blocks * rows, inputs)} | arrays_of(weight)
    out = launch(
        Problem.of(weight, tiling), given, (matrix_of_block, num_blocks_used.reshape(1)), places, outputs, x.dtype,
        interpret, "quantized_grouped_dot_tpu",
    )  # fmt: skip
    return out.reshape(blocks, rows, outputs)[:, :given_rows]


def refuse(device: Any, x: Any, weight: QuantizedWeight) -> str | None:
    """Reason why the kernel cannot take a call on a jax Device; None if it can."""
    outputs = weight.num_outputs // weight.shape[0]
    if outputs % LANES:
        return f"{outputs} outputs of a matrix: must be a multiple of {LANES}"
    most = min(MOST_ROWS, MOST_STACKED * min(LANES, weight.group_size) // LANES)
    if x.shape[1] > most:
        return f"{x.shape[1]} rows in a block: must be at most {most}"
    return mosaic_tpu.refuse(device, x, weight, x.dtype)
