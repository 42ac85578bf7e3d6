"""The specification of add_norm in plain jnp."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.write_qkv.reference import rms_norm


def add_norm(
    parts: Float[Array, "parts rows width"] | None, residual: Float[Array, "rows width"],
    weight: Float[Array, "layers width"] | None, layer: Int[Array, ""], *, eps: float,
) -> tuple[Float[Array, "rows width"], Float[Array, "rows width"] | None]:  # fmt: skip
    """See `pallas_kernels.add_norm`."""
    total = residual
    if parts is not None:
        # XLA on GPUs may leave out a conversion to 16 bits and back, but not this rounding
        digits = jnp.finfo(residual.dtype)
        added = lax.reduce_precision(tree_sum(list(parts.astype(jnp.float32))), digits.nexp, digits.nmant)
        total = residual + added.astype(residual.dtype)
    return total, None if weight is None else rms_norm(total, weight[layer], eps)


def tree_sum(values: list[Array]) -> Array:
    """Sum of 2^n values. Neighbours are added first."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]
