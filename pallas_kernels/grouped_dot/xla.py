"""grouped_dot in XLA operations: a loop over the blocks, with a dynamic index for the matrix.

It does not use `jax.lax.ragged_dot`, in which XLA multiplies every row by every matrix on CPU and NVIDIA. That takes
168 ms on CPU with 64 experts and 8 per token; the needed matmuls take 10 ms.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def grouped_dot(
    x: Float[Array, "blocks rows in"],
    weights: Float[Array, "matrices out in"],
    matrix_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
    *,
    device_loops: bool,
) -> Float[Array, "blocks rows out"]:
    """See `pallas_kernels.grouped_dot`. device_loops: end the loop at the last used block, a number on the device."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def multiply_block(i: Array, out: Array) -> Array:
        rows = lax.dynamic_index_in_dim(x, i, keepdims=False)
        matrix = lax.dynamic_index_in_dim(weights, matrix_of_block[i], keepdims=False)
        product = lax.dot_general(
            rows, matrix, (((1,), (1,)), ((), ())), precision=exact, preferred_element_type=x.dtype
        )
        return lax.dynamic_update_index_in_dim(out, product, i, 0)

    blank = jnp.zeros((*x.shape[:2], weights.shape[1]), x.dtype)
    return lax.fori_loop(0, num_blocks_used if device_loops else x.shape[0], multiply_block, blank)
