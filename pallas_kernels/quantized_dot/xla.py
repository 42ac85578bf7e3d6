"""quantized_dot as XLA operations, for every platform."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.quantized_dot.weight import LARGEST, LARGEST_FP8, QuantizedWeight

SMALLEST = 1e-30  # a row with no larger number is quantised to zeros; see `native.integers`
OUTPUTS_AT_ONCE = 256  # that are dequantised at once: no copy of a matrix as numbers is made


def quantise_rows(x: Float[Array, "rows in"]) -> tuple[Int[Array, "rows in"], Float[Array, " rows"]]:
    """int8 codes and scales: x is about codes * scale. A row with NaN or infinity has such a scale."""
    x = x.astype(jnp.float32)
    most = jnp.abs(x).max(-1)
    inverse = jnp.where((most > SMALLEST) & jnp.isfinite(most), LARGEST / most, 0)
    # multiplying NaN or infinity by 0 gives NaN, whose conversion to int8 is undefined
    codes = jnp.where(jnp.isfinite(x), jnp.round(x * inverse[:, None]), 0)
    return codes.astype(jnp.int8), most / LARGEST


def quantise_groups(
    x: Float[Array, "rows in"], groups: int
) -> tuple[Float[Array, "rows in"], Float[Array, "rows groups"]]:
    """float8_e4m3fn codes and float32 scales of neighbouring inputs: x is about codes * scale.

    DeepSeek-V3 rounds activations so, in groups of 128 (arXiv:2412.19437, section 3.3.2). A group with NaN or infinity
    has such a scale.
    """
    by_group = x.astype(jnp.float32).reshape(x.shape[0], groups, -1)
    most = jnp.abs(by_group).max(-1)
    inverse = jnp.where((most > SMALLEST) & jnp.isfinite(most), LARGEST_FP8 / most, 0)
    codes = jnp.where(jnp.isfinite(by_group), by_group * inverse[:, :, None], 0)
    codes = jnp.clip(codes, -LARGEST_FP8, LARGEST_FP8)  # a product may be rounded up
    return codes.astype(jnp.float8_e4m3fn).reshape(x.shape), most / LARGEST_FP8


def rounded_to_fp8(x: Float[Array, "rows in"], groups: int) -> Float[Array, "rows in"]:
    """float32: x after `quantise_groups`, codes times scales."""
    codes, scales = quantise_groups(x, groups)
    by_group = codes.astype(jnp.float32).reshape(*scales.shape, -1)
    return (by_group * scales[:, :, None]).reshape(x.shape)


def quantized_dot(
    x: Float[Array, "rows in"], weight: QuantizedWeight, num_rows: Int[Array, ""], *, dtype: Any
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.quantized_dot`."""
    if weight.activations == "float":
        return _float_dot(x, weight, dtype)
    if weight.activations == "fp8":
        return _float_dot(rounded_to_fp8(x, weight.groups).astype(x.dtype), weight, dtype)
    codes, row_scales = quantise_rows(x)
    size, integers = weight.group_size, weight.integers()
    scales, mins = weight.scales_by_group(), weight.mins_by_group()

    def add_group(group: Array, total: Array) -> Array:
        start = group * size
        ours, theirs = (lax.dynamic_slice_in_dim(a, start, size, axis=1) for a in (codes, integers))
        product = lax.dot_general(ours, theirs, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
        total = total + product.astype(jnp.float32) * scales[group]
        if mins is None:
            return total
        return total - ours.astype(jnp.int32).sum(1)[:, None].astype(jnp.float32) * mins[group]

    total = jnp.zeros((x.shape[0], weight.num_outputs), jnp.float32)
    total = lax.fori_loop(0, scales.shape[0], add_group, total)
    return (total * row_scales[:, None]).astype(dtype)


def _float_dot(x: Float[Array, "rows in"], weight: QuantizedWeight, dtype: Any) -> Float[Array, "rows out"]:
    """Products with the dequantised weights, a block of outputs after the other."""
    outputs = weight.num_outputs
    size = min(OUTPUTS_AT_ONCE, outputs)

    def multiply(block: Array, out: Array) -> Array:
        start = jnp.minimum(block * size, outputs - size)  # the last block may repeat outputs of the one before
        product = dequantized_product(x, weight, start, size, dtype)
        return lax.dynamic_update_slice_in_dim(out, product, start, axis=1)

    return lax.fori_loop(0, -(-outputs // size), multiply, jnp.zeros((x.shape[0], outputs), dtype))


def dequantized_product(
    x: Float[Array, "rows in"], weight: QuantizedWeight, start: Int[Array, ""], size: int, dtype: Any
) -> Float[Array, "rows size"]:
    """x times `size` outputs from `start`, dequantised to x's dtype. Sums are float32."""
    numbers = weight.slice(start, size).numbers().astype(x.dtype)
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, numbers, dims, precision=exact, preferred_element_type=dtype)
