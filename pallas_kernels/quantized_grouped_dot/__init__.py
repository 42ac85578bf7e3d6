"""quantized_grouped_dot: multiplies blocks of rows, each with its own quantised matrix: a mixture of experts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import expect_floats, expect_integers
from pallas_kernels.platforms import Implementation, compiled_on, default_device, is_interpreted, pick
from pallas_kernels.quantized_dot.weight import QuantizedWeight
from pallas_kernels.quantized_grouped_dot import reference, triton, xla

# `Implementation.refuse` takes (device, x, weight)
IMPLEMENTATIONS = {
    "reference": Implementation(reference.quantized_grouped_dot),
    "xla": Implementation(xla.quantized_grouped_dot),
    "triton": Implementation(compiled_on("cuda", triton.quantized_grouped_dot), triton.refuse),
}


def quantized_grouped_dot(
    x: Float[Array, "blocks rows in"],
    weight: QuantizedWeight,
    matrix_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
    *,
    implementation: str | None = None,
) -> Float[Array, "blocks rows out"]:
    """x[i] @ weight[matrix_of_block[i]].T for the first `num_blocks_used` blocks. The others are undefined.

    x is not rounded, whatever `weight.activations` says. The bits of a row do not depend on the other rows of its
    block. With "triton" they depend on the tiling: blocks have up to 16 rows, up to 32, or more.

    weight:          [matrices, ..., in], in the layout "rows". All axes between are one axis of the result.
    matrix_of_block: int32 in [0, matrices), not checked. Blocks of the same matrix should be neighbours.
    implementation:  None: the best one for the platform that the call is lowered for. To lower for a missing card,
                     trace in a mesh that describes it. "xla" is a loop over the used blocks, which dequantises one
                     matrix at a time. "triton" is a kernel for NVIDIA: it multiplies codes, and makes no copy of a
                     matrix. On CPU it runs in interpret mode. "reference" dequantises the matrix of every block.

    Returns x's dtype. Raises ValueError, which names the argument, if shapes or dtypes do not fit, or if the
    implementation refuses them.
    """
    expect_floats("x", x, "[blocks, rows, in]")
    expect_integers("matrix_of_block", matrix_of_block, "[blocks]")
    if weight.layout != "rows" or len(weight.shape) < 3 or weight.shape[-1] != x.shape[2]:
        found = f"weight {weight.shape} in the layout {weight.layout}"
        raise ValueError(f"{found}: must be [matrices, ..., {x.shape[2]}] in the layout rows, as x is {x.shape}")
    if matrix_of_block.shape != x.shape[:1]:
        raise ValueError(f"matrix_of_block {matrix_of_block.shape}: must be [{x.shape[0]}], one per block of x")
    if weight.order is not None:
        x = x[..., weight.order]
    weight = dataclasses.replace(weight, order=None, activations="float")
    call = (x, weight, jnp.asarray(matrix_of_block, jnp.int32), jnp.asarray(num_blocks_used, jnp.int32))
    if not (x.size and weight.num_outputs):
        return jnp.zeros((*x.shape[:2], weight.num_outputs // max(1, weight.shape[0])), x.dtype)
    if implementation is not None:
        return pick(IMPLEMENTATIONS, implementation, x, weight)(*call)
    kernels: dict[str, Any] = {}
    # tracing the kernel takes 0.1 s: not where no card is meant
    if not is_interpreted() and triton.refuse(default_device(), x, weight) is None:
        kernels["cuda"] = triton.quantized_grouped_dot
    default = xla.quantized_grouped_dot
    return jax.lax.platform_dependent(*call, **kernels, default=default) if kernels else default(*call)
