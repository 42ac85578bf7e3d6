"""grouped_dot in XLA's operations: one block after the other, its matrix addressed by a dynamic index.

`jax.lax.ragged_dot` would be one operation; XLA on CPU and on NVIDIA makes of it every row times every group's matrix
(64 experts, 8 a token, on CPU: 168 ms where the products that are needed take 10).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def grouped_dot(
    x: Float[Array, "blocks rows in"],
    weights: Float[Array, "groups out in"],
    group_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
    *,
    device_loops: bool,
) -> Float[Array, "blocks rows out"]:
    """As `pallas_kernels.grouped_dot` says. device_loops: stop at the last used block; the device decides when."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def one(i: Array, out: Array) -> Array:
        rows = lax.dynamic_index_in_dim(x, i, keepdims=False)
        matrix = lax.dynamic_index_in_dim(weights, group_of_block[i], keepdims=False)
        product = lax.dot_general(
            rows, matrix, (((1,), (1,)), ((), ())), precision=exact, preferred_element_type=x.dtype
        )
        return lax.dynamic_update_index_in_dim(out, product, i, 0)

    blank = jnp.zeros((*x.shape[:2], weights.shape[1]), x.dtype)
    return lax.fori_loop(0, num_blocks_used if device_loops else x.shape[0], one, blank)
