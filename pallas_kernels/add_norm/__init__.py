"""add_norm: adds the partial sums of a matmul to the residual stream, and applies the next RMS norm."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.add_norm import reference, triton
from pallas_kernels.checks import expect_floats, expect_number
from pallas_kernels.platforms import Implementation, compiled_on, pick

# `Implementation.refuse` takes (device, width)
IMPLEMENTATIONS = {
    "reference": Implementation(reference.add_norm),
    "xla": Implementation(reference.add_norm),
    "triton": Implementation(compiled_on("cuda", triton.add_norm), triton.refuse),
}


def add_norm(
    parts: Float[Array, "parts rows width"] | None,
    residual: Float[Array, "rows width"],
    weight: Float[Array, " width"] | Float[Array, "layers width"] | None,
    *,
    layer: Int[Array, ""] | int = 0,
    eps: float = 1e-6,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows width"], Float[Array, "rows width"] | None]:
    """residual + the sum of the parts, and the RMS norm of that. A row's bits depend on no other row.

    parts:          float32, 2^n of them, added in pairs: neighbours first. The sum is rounded to the residual's dtype
                    before it is added. None: nothing is added.
    weight:         of the norm, as in `rms_norm`. None: no norm, and None as the second result.
    layer:          index of the norm in a `weight` with an axis of layers. XLA copies a slice for a kernel.
    implementation: None: the best one for the device. "triton" is one kernel for NVIDIA, a program for each row. On CPU
                    it runs in interpret mode. "xla" and "reference" are the specification, in plain jnp.

    Raises ValueError, which names the argument, if shapes or dtypes do not fit, or if the implementation refuses them.
    """
    expect_floats("residual", residual, "[rows, width]")
    eps = expect_number("eps", eps)
    if parts is None and weight is None:
        raise ValueError("parts and weight: give at least one")
    if parts is not None:
        expect_floats("parts", parts, "[parts, rows, width]")
        count = parts.shape[0]
        if parts.shape[1:] != residual.shape or count & (count - 1) or not count or parts.dtype != jnp.float32:
            raise ValueError(
                f"parts {parts.shape} of {parts.dtype}: must be float32 [2^n, {', '.join(map(str, residual.shape))}]"
            )
    if weight is not None and (weight.ndim not in (1, 2) or weight.shape[-1] != residual.shape[1]):
        raise ValueError(f"weight {weight.shape}: must be [{residual.shape[1]}] or [layers, {residual.shape[1]}]")
    call: Any = pick(IMPLEMENTATIONS, implementation, residual.shape[1])
    if not residual.size:
        return residual, None if weight is None else residual
    norms = weight[None] if weight is not None and weight.ndim == 1 else weight
    return call(parts, residual, norms, jnp.asarray(layer, jnp.int32), eps=eps)
