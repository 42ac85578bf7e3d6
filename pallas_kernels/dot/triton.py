"""dot for NVIDIA in Pallas, lowered through Triton. A row's bits do not depend on the number of rows.

A program multiplies a tile of rows by a tile of the matrix. It adds the products of one tile of inputs after another,
in float32. The inputs may be cut into parts, whose sums are separate:

- `partial_dots`: a program for each part writes its sum. Few rows then use the whole GPU.
- `tree_dot`: one program computes all parts of a tile, and adds them in pairs, in registers. Many rows need no parts to
  fill the GPU, and their partial sums would be 4 * parts bytes for each output.

Both have the same bits after the sums of `partial_dots` are added in pairs.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.dot.tiling import Tiling
from pallas_kernels.platforms import refuse_triton

Ref = Any  # an array inside a kernel, addressed by `.at`
ROWS_TOGETHER = 2048  # as in gated_dot: programs that run together share x's rows and few tiles of the matrix


def dot(
    x: Float[Array, "rows in"], weight: Float[Array, "out in"], num_rows: Int[Array, ""], *, dtype: Any,
    tiling: Tiling | None = None, interpret: bool = False,
) -> Float[Array, "rows out"]:  # fmt: skip
    """See `pallas_kernels.dot`. Tiles of rows that begin at or after `num_rows` are zeros.

    tiling: None: the rule. interpret: run the kernel in XLA operations, on any platform.
    """
    return _call(x, weight, num_rows, "dot", dtype, 1, tiling, separate=False, interpret=interpret)[0]


def partial_dots(
    x: Float[Array, "rows in"], weight: Float[Array, "out in"], num_rows: Int[Array, ""], *, parts: int,
    tiling: Tiling | None = None, interpret: bool = False,
) -> Float[Array, "parts rows out"]:  # fmt: skip
    """See `pallas_kernels.partial_dots`."""
    return _call(x, weight, num_rows, "partial_dots", jnp.float32, parts, tiling, separate=True, interpret=interpret)


def tree_dot(
    x: Float[Array, "rows in"], weight: Float[Array, "out in"], num_rows: Int[Array, ""], *, parts: int,
    tiling: Tiling | None = None, interpret: bool = False,
) -> Float[Array, "1 rows out"]:  # fmt: skip
    """The sum of `partial_dots`, added in pairs. parts: a power of two."""
    return _call(x, weight, num_rows, "tree_dot", jnp.float32, parts, tiling, separate=False, interpret=interpret)


def refuse(device: Any, x: Any, weight: Any, dtype: Any) -> str | None:
    """Reason why the kernel cannot take a call on a jax Device; None if it can."""
    del weight, dtype
    if x.dtype == jnp.float32:
        return "x of float32: it multiplies bfloat16 and float16"
    return refuse_triton(device)


def _call(
    x: Array, weight: Array, num_rows: Array, name: str, dtype: Any, parts: int, tiling: Tiling | None, *,
    separate: bool, interpret: bool,
) -> Float[Array, "sums rows out"]:  # fmt: skip
    """Launch the kernel. separate: a program for each part, else one for all."""
    tiling = tiling or Tiling.choose(x.shape[0])
    tiles = pl.cdiv(x.shape[0], tiling.rows)
    together = min(tiles, max(1, ROWS_TOGETHER // tiling.rows))
    sums = parts if separate else 1
    columns = pl.cdiv(weight.shape[0], tiling.outputs)
    return pl.pallas_call(
        functools.partial(
            _kernel, tiling=tiling, together=together, columns=columns, width=x.shape[1] // parts, parts=parts // sums
        ),
        jax.ShapeDtypeStruct((sums, x.shape[0], weight.shape[0]), dtype),
        grid=(together, columns * sums, pl.cdiv(tiles, together)),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name=name,
    )(num_rows.reshape(1), x, weight)


def _kernel(
    num_rows_ref: Ref, x_ref: Ref, weight_ref: Ref, out_ref: Ref,
    *, tiling: Tiling, together: int, columns: int, width: int, parts: int,
) -> None:  # fmt: skip
    """Tile of one part, or of the sum of `parts` parts, of `width` inputs each."""
    rows, outputs = x_ref.shape[0], weight_ref.shape[0]
    tile = pl.program_id(1)
    first_part = lax.div(tile, jnp.int32(columns))
    first = (pl.program_id(2) * together + pl.program_id(0)) * tiling.rows
    row = first + jnp.arange(tiling.rows)
    column = (tile - first_part * columns) * tiling.outputs + jnp.arange(tiling.outputs)
    # Tiles at an edge repeat the last row or matrix row instead of masking every load. The results are not stored.
    from_row, from_column = jnp.minimum(row, rows - 1)[:, None], jnp.minimum(column, outputs - 1)[:, None]
    needed = first < num_rows_ref[0]
    steps = pl.cdiv(width, tiling.inputs)

    def store(values: Array) -> None:
        mask = (row < rows)[:, None] & (column < outputs)[None, :]
        target = out_ref.at[first_part, row[:, None], column[None, :]]
        plgpu.store(target, values.astype(out_ref.dtype), mask=mask)

    def load(ref: Ref, index: Array, part: Array, inputs: Array) -> Array:
        at = ref.at[index, (part * width + inputs)[None, :]]
        if width % tiling.inputs == 0:
            return plgpu.load(at)
        return plgpu.load(at, mask=inputs[None, :] < width, other=0.0)

    def sum_of(part: Array) -> Array:
        def add_tile(i: Array, total: Array) -> Array:
            inputs = i * tiling.inputs + jnp.arange(tiling.inputs)
            a, b = load(x_ref, from_row, part, inputs), load(weight_ref, from_column, part, inputs)
            return total + plgpu.dot(a, b.T)

        return repeat(steps, add_tile)

    def repeat(count: int, add: Callable[[Array, Array], Array]) -> Array:
        # The end is not a constant: a loop of one iteration would disappear, and its matmul would add to the sum of
        # the parts before it, in another order. Eight copies of the loop over a part would spill registers.
        end = jnp.minimum(count, num_rows_ref[0] + count)
        return lax.fori_loop(0, end, add, jnp.zeros((tiling.rows, tiling.outputs), jnp.float32))

    def tree(first: Array, count: int) -> Array:
        if count == 1:
            return sum_of(first)
        half = count // 2
        return repeat(2, lambda i, total: total + tree(first + i * half, half))

    pl.when(needed)(lambda: store(tree(first_part, parts)))
    pl.when(~needed)(lambda: store(jnp.zeros((tiling.rows, tiling.outputs), out_ref.dtype)))
