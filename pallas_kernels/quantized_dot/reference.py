"""The specification of quantized_dot: dequantise, then multiply."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.quantized_dot.weight import QuantizedWeight
from pallas_kernels.quantized_dot.xla import quantise_rows, quantise_rows_to_fp8


def quantized_dot(
    x: Float[Array, "rows in"], weight: QuantizedWeight, num_rows: Int[Array, ""], *, dtype: Any
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.quantized_dot`. All arithmetic is float32."""
    numbers = weight.plain().numbers()
    if weight.activations == "int8":
        codes, scales = quantise_rows(x)
        x = codes.astype(jnp.float32) * scales[:, None]
    elif weight.activations == "fp8":
        x = rounded_to_fp8(x, weight.groups)
    product = lax.dot_general(
        x.astype(jnp.float32), numbers, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
    )
    return product.astype(dtype)


def rounded_to_fp8(x: Float[Array, "rows in"], groups: int) -> Float[Array, "rows in"]:
    """Rows of x, rounded to fp8 with a scale for each group, in float32."""
    codes, scales = quantise_rows_to_fp8(x, groups)
    return (codes.astype(jnp.float32).reshape(*scales.T.shape, -1) * scales.T[..., None]).reshape(x.shape)
