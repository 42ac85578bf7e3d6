"""grouped_dot: multiplies blocks of rows, each by its own matrix. These are the matmuls of a mixture of experts."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import expect_blocks, expect_floats
from pallas_kernels.grouped_dot import cpu, mosaic_tpu, reference, triton, xla
from pallas_kernels.platforms import (
    Implementation,
    compiled_on,
    default_device,
    pick,
    refuse_tpu,
    refuse_triton,
    takes_native,
)


def _of_all_rows(call: Callable[..., Any]) -> Callable[..., Any]:
    """An implementation that computes all rows of the used blocks."""
    return lambda x, weights, matrix_of_block, num_blocks_used, _: call(x, weights, matrix_of_block, num_blocks_used)


# `Implementation.refuse` takes (device, x)
IMPLEMENTATIONS = {
    "reference": Implementation(_of_all_rows(reference.grouped_dot)),
    "xla": Implementation(_of_all_rows(functools.partial(xla.grouped_dot, device_loops=False))),
    "xla_loop": Implementation(_of_all_rows(functools.partial(xla.grouped_dot, device_loops=True))),
    "cpu": Implementation(cpu.grouped_dot, cpu.refuse),
    "triton": Implementation(
        _of_all_rows(compiled_on("cuda", triton.grouped_dot)), lambda device, _: refuse_triton(device)
    ),
    "mosaic_tpu": Implementation(
        _of_all_rows(compiled_on("tpu", mosaic_tpu.grouped_dot)), lambda device, _: refuse_tpu(device)
    ),
}


def grouped_dot(
    x: Float[Array, "blocks rows in"],
    weights: Float[Array, "matrices out in"],
    matrix_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
    *,
    rows_of_block: Int[Array, " blocks"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "blocks rows out"]:
    """x[i] @ weights[matrix_of_block[i]].T for the first `num_blocks_used` blocks. The others are undefined.

    x, weights:      of the same dtype. Sums are float32, and float32 inputs are multiplied in full float32 precision.
    matrix_of_block: int32 in [0, matrices), not checked. Blocks of the same matrix should be neighbours.
    rows_of_block:   int32, number of leading rows of each block that are needed; None: all. Results of other rows
                     are undefined, but finite. Only "cpu" skips them.
    implementation:  None: the best one for the platform that the call is lowered for. "reference" gathers the matrices.
                     "xla" is a loop of static length. "xla_loop" is for CPU: a loop over the used blocks only. "cpu" is
                     a native kernel for CPU: a row has the same bits in any block. It has no gradient. "triton" is a
                     kernel for NVIDIA, "mosaic_tpu" one for TPU. On CPU these two run in interpret mode.

    Returns x's dtype. Raises ValueError, which names the argument, if shapes or dtypes do not fit.
    """
    expect_floats("x", x, "[blocks, rows, in]")
    expect_floats("weights", weights, "[matrices, out, in]")
    if weights.shape[2] != x.shape[2] or weights.dtype != x.dtype:
        raise ValueError(
            f"weights {weights.shape} of {weights.dtype}: must be [matrices, out, {x.shape[2]}] of {x.dtype}, as x"
        )
    rows_of_block = expect_blocks(x, matrix_of_block, rows_of_block)
    call = (
        x, weights, matrix_of_block.astype(jnp.int32), jnp.asarray(num_blocks_used, jnp.int32),
        rows_of_block,
    )  # fmt: skip
    if not (x.size and weights.size):
        return jnp.zeros((*x.shape[:2], weights.shape[1]), x.dtype)
    if implementation is not None:
        return pick(IMPLEMENTATIONS, implementation, x)(*call)
    device = default_device()
    on_nvidia = "xla" if device.platform == "gpu" and refuse_triton(device) else "triton"
    on_cpu = "cpu" if takes_native(cpu.refuse, x) else "xla_loop"
    by_platform = {"cpu": on_cpu, "cuda": on_nvidia, "tpu": "mosaic_tpu"}
    calls = {platform: IMPLEMENTATIONS[name].call for platform, name in by_platform.items()}
    return jax.lax.platform_dependent(*call, **calls, default=IMPLEMENTATIONS["xla"].call)
