"""The specification of grouped_dot in plain jnp: every block's own matrix is gathered."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def grouped_dot(
    x: Float[Array, "blocks rows in"],
    weights: Float[Array, "groups out in"],
    group_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
) -> Float[Array, "blocks rows out"]:
    """As `pallas_kernels.grouped_dot` says. Takes blocks * out * in numbers of memory."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jnp.einsum(
        "bri,boi->bro", x, weights[group_of_block], precision=exact, preferred_element_type=jnp.float32
    ).astype(x.dtype)
    used = jnp.arange(x.shape[0]) < num_blocks_used
    return jnp.where(used[:, None, None], out, 0)
