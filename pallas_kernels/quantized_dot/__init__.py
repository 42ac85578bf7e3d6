"""quantized_dot: rows times a matrix of weights in 8 or 4 bits, a `QuantizedWeight`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import expect_floats
from pallas_kernels.platforms import Implementation, pick
from pallas_kernels.quantized_dot import cpu, reference, xla
from pallas_kernels.quantized_dot.grouped import quantized_grouped_dot
from pallas_kernels.quantized_dot.weight import QuantizedWeight, quantize

__all__ = ["IMPLEMENTATIONS", "QuantizedWeight", "quantize", "quantized_dot", "quantized_grouped_dot"]

# `Implementation.refuse` takes (device, x, weight, dtype)
IMPLEMENTATIONS = {
    "reference": Implementation(reference.quantized_dot),
    "xla": Implementation(xla.quantized_dot),
    "cpu": Implementation(cpu.quantized_dot, cpu.refuse),
}


def quantized_dot(
    x: Float[Array, "rows in"],
    weight: QuantizedWeight,
    num_rows: Int[Array, ""] | int,
    *,
    dtype: Any = None,
    implementation: str | None = None,
) -> Float[Array, "rows out"]:
    """x @ weight.T.

    With `weight.activations` "int8", every row of x is rounded to 8 bits: code = round(127 * number / largest
    magnitude). Sums within a group of the weights are exact. The groups' sums, times their scales, are added in
    float32, in order. So a row has the same bits with any number of other rows, in every implementation.

    With "float", the weights are dequantised to x's dtype, and sums are float32.

    weight:         [..., in]; all axes but the last are one axis of the result.
    num_rows:       the first rows of x that are needed. The results of the others are undefined, but finite if x is.
    dtype:          of the result; None: x's dtype.
    implementation: None: the best one for the platform that the call is lowered for. "xla" is XLA operations. "cpu" is
                    a native kernel for CPU, for the layout "tiles". "reference" is the specification.

    Raises ValueError, which names the argument, if shapes or dtypes do not fit, or if the implementation refuses them.
    """
    expect_floats("x", x, "[rows, in]")
    if weight.shape[-1] != x.shape[1]:
        raise ValueError(f"weight {weight.shape}: must be [..., {x.shape[1]}], as x is {x.shape}")
    dtype = x.dtype if dtype is None else jnp.dtype(dtype)
    if weight.order is not None:
        x = x[:, weight.order]
    call = (x, weight, jnp.asarray(num_rows, jnp.int32))
    if implementation is not None:
        return pick(IMPLEMENTATIONS, implementation, x, weight, dtype)(*call, dtype=dtype)
    default = lambda *arrays: xla.quantized_dot(*arrays, dtype=dtype)  # noqa: E731
    if not x.size or cpu.refuse(jax.devices("cpu")[0], x, weight, dtype) is not None:
        return default(*call)
    return lax.platform_dependent(*call, cpu=lambda *arrays: cpu.quantized_dot(*arrays, dtype=dtype), default=default)
