"""quantized_grouped_dot: multiplies blocks of rows, each by its own quantised matrix, for mixtures of experts."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import expect_blocks, expect_floats
from pallas_kernels.platforms import Implementation, compiled_on, default_device, pick, takes_native, traced_platform
from pallas_kernels.quantized_dot.weight import QuantizedWeight, TilesWeight, refuse_activations
from pallas_kernels.quantized_grouped_dot import cpu, mosaic_tpu, reference, triton, xla


def _of_all_rows(call: Callable[..., Any]) -> Callable[..., Any]:
    """An implementation that computes all rows of the used blocks."""
    return lambda x, weight, matrix_of_block, num_blocks_used, _: call(x, weight, matrix_of_block, num_blocks_used)


# `Implementation.refuse` takes (device, x, weight)
IMPLEMENTATIONS = {
    "reference": Implementation(_of_all_rows(reference.quantized_grouped_dot)),
    "xla": Implementation(_of_all_rows(xla.quantized_grouped_dot)),
    "cpu": Implementation(cpu.quantized_grouped_dot, cpu.refuse),
    "triton": Implementation(_of_all_rows(compiled_on("cuda", triton.quantized_grouped_dot)), triton.refuse),
    "mosaic_tpu": Implementation(_of_all_rows(compiled_on("tpu", mosaic_tpu.quantized_grouped_dot)), mosaic_tpu.refuse),
}


def quantized_grouped_dot(
    x: Float[Array, "blocks rows in"],
    weight: QuantizedWeight,
    matrix_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
    *,
    rows_of_block: Int[Array, " blocks"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "blocks rows out"]:
    """x[i] @ weight[matrix_of_block[i]].T for the first `num_blocks_used` blocks. The others are undefined.

    Layout "tiles": rows of x are rounded to 8 bits, and a row has the bits that `quantized_dot` gives it, in any block.
    Layouts "rows" and "lanes": rows are rounded to e4m3 if `weight.activations` is "fp8", else not at all. A row's bits
    do not depend on the other rows of its block. With "triton" they depend on the tiling, which is one of three: blocks
    have up to 16 rows, up to 32, or more.

    weight:          [matrices, ..., in], in the layout "rows", "tiles" or "lanes". The axes between are one axis of
                     the result. With "tiles" that axis must be a multiple of 16.
    matrix_of_block: int32 in [0, matrices), not checked. Blocks of the same matrix should be neighbours.
    rows_of_block:   int32, number of leading rows of each block that are needed; None: all. Results of other rows
                     are undefined, but finite if x is. Only "cpu" skips them.
    implementation:  None: the best one for the platform that the call is lowered for. To lower for a missing GPU,
                     trace in a mesh that describes it. "xla" is a loop over the used blocks, which dequantises one
                     matrix at a time. "cpu" is a native kernel for CPU, for the layout "tiles". "triton" is a kernel
                     for NVIDIA, for the layout "rows", and "mosaic_tpu" one for TPU, for the layout "lanes", and "rows"
                     of int8 with one group per output. These three multiply codes, and make no copy of a matrix. On
                     CPU, "triton" and "mosaic_tpu" run in interpret mode. "reference" dequantises the matrix of every
                     block, and rounds x only to fp8.

    Returns x's dtype. Raises ValueError, which names the argument, if shapes or dtypes do not fit, or if the
    implementation refuses them.
    """
    expect_floats("x", x, "[blocks, rows, in]")
    if weight.layout == "plain" or len(weight.shape) < 3 or weight.shape[-1] != x.shape[2]:
        found = f"weight {weight.shape} in the layout {weight.layout}"
        accepted = f"must be [matrices, ..., {x.shape[2]}] in the layout rows, tiles or lanes"
        raise ValueError(f"{found}: {accepted}, as x is {x.shape}")
    if isinstance(weight, TilesWeight) and (reason := weight.refuse_matrices(weight.shape)) is not None:
        raise ValueError(f"weight {weight.shape} in the layout tiles: {reason}")
    if (reason := refuse_activations(weight)) is not None:
        raise ValueError(f"weight {weight.shape}: {reason}")
    rows_of_block = expect_blocks(x, matrix_of_block, rows_of_block)
    if weight.order is not None:
        x = x[..., weight.order]
    activations = "float" if weight.layout != "tiles" and weight.activations == "int8" else weight.activations
    weight = dataclasses.replace(weight, order=None, activations=activations)
    call = (
        x, weight, matrix_of_block.astype(jnp.int32), jnp.asarray(num_blocks_used, jnp.int32),
        rows_of_block,
    )  # fmt: skip
    if not (x.size and weight.num_outputs):
        return jnp.zeros((*x.shape[:2], weight.num_outputs // max(1, weight.shape[0])), x.dtype)
    if implementation is not None:
        return pick(IMPLEMENTATIONS, implementation, x, weight)(*call)
    names = {}
    if takes_native(cpu.refuse, x, weight):
        names["cpu"] = "cpu"
    # tracing a kernel takes 0.1 s: only for the device that is lowered for
    if traced_platform() == "gpu" and triton.refuse(default_device(), x, weight) is None:
        names["cuda"] = "triton"
    if traced_platform() == "tpu" and mosaic_tpu.refuse(default_device(), x, weight) is None:
        names["tpu"] = "mosaic_tpu"
    default, kernels = IMPLEMENTATIONS["xla"].call, {on: IMPLEMENTATIONS[name].call for on, name in names.items()}
    return jax.lax.platform_dependent(*call, **kernels, default=default) if kernels else default(*call)
