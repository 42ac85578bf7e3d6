"""quantized_dot as XLA operations, for every platform."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.quantized_dot.weight import LARGEST, LARGEST_FP8, QuantizedWeight

SMALLEST = 1e-30  # a row with no larger number is quantised to zeros; see `native.integers`
OUTPUTS_AT_ONCE = 256  # dequantised at once, so that no float copy of a matrix is made


def quantise_rows(x: Float[Array, "rows in"]) -> tuple[Int[Array, "rows in"], Float[Array, " rows"]]:
    """int8 codes and scales: x is about codes * scale. The scale of a row with NaN or infinity is NaN."""
    x = x.astype(jnp.float32)
    most = _largest(x)
    inverse = jnp.where((most > SMALLEST) & jnp.isfinite(most), LARGEST / most, 0)
    # multiplying NaN or infinity by 0 gives NaN, whose conversion to int8 is undefined
    codes = jnp.where(jnp.isfinite(x), jnp.round(x * inverse[:, None]), 0)
    return codes.astype(jnp.int8), most / LARGEST


def _largest(x: Float[Array, "*lead n"]) -> Float[Array, "*lead"]:
    """Largest magnitudes. NaN if a number is not finite: XLA's `max` on CPU drops a NaN (JAX 0.10.2 and 0.11.2)."""
    return jnp.where(jnp.isfinite(x).all(-1), jnp.abs(x).max(-1), jnp.nan)


def quantise_rows_to_fp8(
    x: Float[Array, "rows in"], groups: int
) -> tuple[Float[Array, "rows in"], Float[Array, "groups rows"]]:
    """Codes in e4m3 and scales: x is about codes * scale. Each row has a scale for each group of neighbouring inputs.

    The scale is the largest magnitude / 448 (DeepSeek-V3, arXiv:2412.19437, section 3.3.2); NaN if not all are finite.
    """
    numbers = x.astype(jnp.float32).reshape(x.shape[0], groups, -1)
    most = _largest(numbers)
    inverse = jnp.where((most > SMALLEST) & jnp.isfinite(most), LARGEST_FP8 / most, 0)
    codes = jnp.where(jnp.isfinite(numbers), numbers * inverse[..., None], 0).astype(jnp.float8_e4m3fn)
    # without a barrier, XLA may leave out a conversion to fp8 and back (its option `xla_allow_excess_precision`)
    return lax.optimization_barrier(codes.reshape(x.shape)), (most / LARGEST_FP8).T


def quantized_dot(
    x: Float[Array, "rows in"], weight: QuantizedWeight, num_rows: Int[Array, ""], *, dtype: Any
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.quantized_dot`."""
    if weight.activations == "float":
        multiply = lambda start, size: dequantized_product(x, weight, start, size, dtype)  # noqa: E731
        return _by_blocks(x.shape[0], weight.num_outputs, dtype, multiply)
    if weight.activations == "fp8":
        given = quantise_rows_to_fp8(x, weight.groups)
        multiply = lambda start, size: fp8_product(*given, weight, start, size, dtype)  # noqa: E731
        return _by_blocks(x.shape[0], weight.num_outputs, dtype, multiply)
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


def _by_blocks(
    rows: int, outputs: int, dtype: Any, multiply: Callable[[Array, int], Array]
) -> Float[Array, "rows out"]:
    """The matmul by blocks of outputs, one after the other. multiply(start, size): `size` outputs from `start`."""
    size = min(OUTPUTS_AT_ONCE, outputs)

    def add_block(block: Array, out: Array) -> Array:
        start = jnp.minimum(block * size, outputs - size)  # the last block may repeat outputs of the one before
        return lax.dynamic_update_slice_in_dim(out, multiply(start, size), start, axis=1)

    return lax.fori_loop(0, -(-outputs // size), add_block, jnp.zeros((rows, outputs), dtype))


def dequantized_product(
    x: Float[Array, "rows in"], weight: QuantizedWeight, start: Int[Array, ""], size: int, dtype: Any
) -> Float[Array, "rows size"]:
    """Multiply x by rows [start, start + size) of the weight matrix, dequantised to x's dtype. dtype: of the result."""
    numbers = weight.slice(start, size).numbers().astype(x.dtype)
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, numbers, dims, precision=exact, preferred_element_type=dtype)


def fp8_product(
    codes: Float[Array, "rows in"],
    row_scales: Float[Array, "groups rows"],
    weight: QuantizedWeight,
    start: Int[Array, ""],
    size: int,
    dtype: Any,
) -> Float[Array, "rows size"]:
    """Rows in fp8 times `size` outputs from `start`, in fp8. Groups are added in order, in float32."""
    part = weight.slice(start, size)
    numbers, scales = part.values(), part.scales_by_group()  # [size, groups, inputs], [groups, size]

    def add_group(group: Array, total: Array) -> Array:
        ours = lax.dynamic_slice_in_dim(codes, group * part.group_size, part.group_size, axis=1)
        theirs = lax.dynamic_index_in_dim(numbers, group, axis=1, keepdims=False)
        # Exact: an e4m3 number has 4 significant bits; GPUs and TPUs round float32 to 11 or 8 bits.
        product = lax.dot_general(
            ours.astype(jnp.float32), theirs, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return total + product * (row_scales[group][:, None] * scales[group])

    return lax.fori_loop(0, part.groups, add_group, jnp.zeros((codes.shape[0], size), jnp.float32)).astype(dtype)
