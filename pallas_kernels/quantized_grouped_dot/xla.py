"""quantized_grouped_dot as XLA operations, for every platform: a loop over the used blocks."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.quantized_dot import xla
from pallas_kernels.quantized_dot.weight import QuantizedWeight, TilesWeight


def quantized_grouped_dot(
    x: Float[Array, "blocks rows in"],
    weight: QuantizedWeight,
    matrix_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
) -> Float[Array, "blocks rows out"]:
    """See `pallas_kernels.quantized_grouped_dot`. One matrix at a time is dequantised. Unused blocks are zero."""
    outputs = weight.num_outputs // weight.shape[0]

    def multiply_block(i: Array, out: Array) -> Array:
        rows = lax.dynamic_index_in_dim(x, i, keepdims=False)
        if isinstance(weight, TilesWeight):
            matrix = weight.matrix(matrix_of_block[i])
            product = xla.quantized_dot(rows, matrix, jnp.int32(rows.shape[0]), dtype=x.dtype)
        elif weight.activations == "fp8":
            given = xla.quantise_rows_to_fp8(rows, weight.groups)
            product = xla.fp8_product(*given, weight, matrix_of_block[i] * outputs, outputs, x.dtype)
        else:
            product = xla.dequantized_product(rows, weight, matrix_of_block[i] * outputs, outputs, x.dtype)
        return lax.dynamic_update_index_in_dim(out, product, i, 0)

    return lax.fori_loop(0, num_blocks_used, multiply_block, jnp.zeros((*x.shape[:2], outputs), x.dtype))
