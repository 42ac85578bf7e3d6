"""The specification of gated_dot in plain jnp."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_dot.activation import gated


def gated_dot(
    x: Float[Array, "rows in"], weight: Float[Array, "2 out in"], num_rows: Int[Array, ""], *, activation: str
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.gated_dot`. Computes all rows."""
    del num_rows
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    gate, up = jnp.einsum("ri,hoi->hro", x, weight, precision=exact, preferred_element_type=jnp.float32).astype(x.dtype)
    return gated(activation, gate, up)
