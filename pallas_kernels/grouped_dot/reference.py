"""The specification of grouped_dot in plain jnp. It gathers the matrix of every block."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def grouped_dot(
    x: Float[Array, "blocks rows in"],
    weights: Float[Array, "matrices out in"],
    matrix_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
) -> Float[Array, "blocks rows out"]:
    """See `pallas_kernels.grouped_dot`. Allocates blocks * out * in numbers."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jnp.einsum(
        "bri,boi->bro", x, weights[matrix_of_block], precision=exact, preferred_element_type=jnp.float32
    ).astype(x.dtype)
    used = jnp.arange(x.shape[0]) < num_blocks_used
    return jnp.where(used[:, None, None], out, 0)
