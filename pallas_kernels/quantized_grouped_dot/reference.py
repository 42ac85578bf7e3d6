"""The specification of quantized_grouped_dot in plain jnp. Dequantises all matrices."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_dot import reference
from pallas_kernels.quantized_dot.reference import rounded_to_fp8
from pallas_kernels.quantized_dot.weight import QuantizedWeight


def quantized_grouped_dot(
    x: Float[Array, "blocks rows in"],
    weight: QuantizedWeight,
    matrix_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
) -> Float[Array, "blocks rows out"]:
    """See `pallas_kernels.quantized_grouped_dot`. Arithmetic is float32. Unused blocks are zero."""
    rows = x.astype(jnp.float32)
    if weight.activations == "fp8":
        rows = rounded_to_fp8(rows.reshape(-1, x.shape[-1]), weight.groups).reshape(x.shape)
    numbers = weight.plain().numbers().reshape(weight.shape[0], -1, weight.shape[-1])
    product = reference.grouped_dot(rows, numbers, matrix_of_block, num_blocks_used)
    return product.astype(x.dtype)
