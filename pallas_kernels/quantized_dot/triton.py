"""quantized_dot for NVIDIA in Pallas, lowered through Triton, for the layout "rows".

This module assigns tiles to programs, one tile of outputs and one tile of rows each. `triton_tile` multiplies them. For
few rows, programs share the inputs too, and XLA adds their splits in order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.platforms import nvidia_capability, refuse_triton
from pallas_kernels.quantized_dot.tiling import Tiling, choose
from pallas_kernels.quantized_dot.triton_tile import Given, Problem, Ref, Tile, tile_sums
from pallas_kernels.quantized_dot.weight import CHUNK, QuantizedWeight, refuse_activations

FLOATS = ("bfloat16", "float16")
SCALES = (*FLOATS, "float32", "int8", "uint8", "float8_e4m3fn")
ROWS_TOGETHER = 2048  # rows whose tiles run at the same time: 16 MiB of x with 4,096 inputs stay in the L2 cache
LEAST_INPUTS = 16     # of a matmul
MOST_BYTES = 1 << 31  # of codes: Pallas addresses arrays up to 4 GiB with signed 32 bits


def quantized_dot(
    x: Float[Array, "rows in"],
    weight: QuantizedWeight,
    num_rows: Int[Array, ""],
    *,
    dtype: Any,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.quantized_dot`. Tiles of rows that begin at or after `num_rows` are zeros.

    tiling: None: chosen by device and shape. interpret: run the kernel in XLA operations, on any platform.
    """
    outputs, integers = weight.num_outputs, weight.activations == "int8"
    tiling = tiling or choose(x.shape[0], x.shape[1], outputs)
    problem = Problem(
        weight.kind, *x.shape, outputs, weight.groups, weight.divides, tiling, interpret, integers
    )  # fmt: skip
    given = Given.of(x, weight)
    exact = integers and problem.groups == 1 and tiling.splits > 1
    out = _launch(problem, num_rows, given, dtype if tiling.splits == 1 else jnp.int32 if exact else jnp.float32)
    if tiling.splits == 1:
        return out[0]
    total = out[0]
    for part in range(1, tiling.splits):
        total += out[part]
    if exact:
        scale = given.scales[:, 0].astype(jnp.float32)
        if given.outer is not None:
            scale = scale / given.outer[:, 0] if weight.divides else scale * given.outer[:, 0]
        total = total.astype(jnp.float32) * scale
    return (total if given.row_scales is None else total * given.row_scales[:, None]).astype(dtype)


def _launch(problem: Problem, num_rows: Array, given: Given, dtype: Any) -> Array:
    """The sums [splits, rows, out]."""
    tiling = problem.tiling
    tiles = pl.cdiv(problem.rows, tiling.rows)
    together = min(tiles, max(1, ROWS_TOGETHER // tiling.rows))
    names = tuple(given.present)
    return pl.pallas_call(
        functools.partial(_kernel, names=names, problem=problem, together=together),
        jax.ShapeDtypeStruct((tiling.splits, problem.rows, problem.outputs), dtype),
        grid=(together, pl.cdiv(problem.outputs, tiling.outputs), pl.cdiv(tiles, together) * tiling.splits),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=problem.interpret,
        name="quantized_dot",
    )(num_rows.reshape(1), *given.present.values())


def refuse(device: Any, x: Any, weight: QuantizedWeight, dtype: Any) -> str | None:
    """Reason why the kernel cannot take a call on a jax Device; None if it can."""
    del dtype
    if weight.layout != "rows":
        return f"it multiplies weights in the layout rows, not {weight.layout}"
    if weight.activations == "float" and x.dtype.name not in FLOATS:
        return f"x of {x.dtype}: it multiplies bfloat16 and float16"
    if (reason := refuse_activations(weight)) is not None:
        return reason
    if weight.activations == "int8" and (weight.kind not in ("int8", "int4") or weight.mins is not None):
        return f"activations=int8 with weights of {weight.kind}: must be int8 or int4, without minima"
    if weight.activations == "int8" and weight.kind == "int8" and weight.zeros is not None:
        return "activations=int8 with zero points of 8 bits: must have none, or activations=float"
    if weight.num_outputs * weight.codes.shape[-1] >= MOST_BYTES:
        return f"{weight.num_outputs * weight.codes.shape[-1]} bytes of codes: must be less than {MOST_BYTES}"
    inputs, size = weight.shape[-1], weight.group_size
    if weight.bits == 4 and inputs % CHUNK:
        return f"{inputs} inputs of 4 bits: must be a multiple of {CHUNK}"
    # 8-bit matmuls take 32 inputs
    least = LEAST_INPUTS if weight.activations == "float" else 2 * LEAST_INPUTS
    if weight.groups > 1 and size % CHUNK and size not in (least, 2 * LEAST_INPUTS):
        return f"groups of {size} inputs: must be {least}, {2 * LEAST_INPUTS}, a multiple of {CHUNK}, or all inputs"
    for name in ("scales", "mins"):
        array = getattr(weight, name)
        if array is not None and array.dtype.name not in SCALES:
            return f"{name} of {array.dtype}: must be one of {', '.join(SCALES)}"
    capability = nvidia_capability(device)
    eight = weight.kind == "fp8" or weight.scales.dtype.name == "float8_e4m3fn"
    if eight and capability and capability < (8, 9):
        instead = ": use activations=float and XLA, or weights of int8" if weight.activations == "fp8" else ""
        return f"float8 needs compute capability 8.9 (Ada) or newer, {device.device_kind} has {capability}{instead}"
    return refuse_triton(device)


def _kernel(num_rows: Ref, *refs: Ref, names: tuple[str, ...], problem: Problem, together: int) -> None:
    *arrays, out_ref = refs
    given, tiling = Given.from_refs(names, tuple(arrays)), problem.tiling
    block, split = lax.div(pl.program_id(2), tiling.splits), lax.rem(pl.program_id(2), tiling.splits)
    first = (block * together + pl.program_id(0)) * tiling.rows
    row = first + jnp.arange(tiling.rows)
    column = pl.program_id(1) * tiling.outputs + jnp.arange(tiling.outputs)

    def store(values: Array) -> None:
        mask = (row < problem.rows)[None, :] & (column < problem.outputs)[:, None]
        plgpu.store(out_ref.at[split, row[None, :], column[:, None]], values.astype(out_ref.dtype), mask=mask)

    def multiply() -> None:
        inside = None if problem.rows % tiling.rows == 0 else row < problem.rows
        # a tile at the edge repeats the last output, and does not store it
        total = tile_sums(problem, given, Tile(row, inside, jnp.minimum(column, problem.outputs - 1), split))
        if given.row_scales is not None and tiling.splits == 1:
            total *= plgpu.load(given.row_scales.at[jnp.minimum(row, problem.rows - 1)])[None, :]
        store(total)

    needed = first < num_rows[0]
    pl.when(needed)(multiply)
    pl.when(jnp.logical_not(needed))(lambda: store(jnp.zeros((tiling.outputs, tiling.rows), jnp.float32)))
