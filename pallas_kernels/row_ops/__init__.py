"""Operations on single rows, as native kernels on CPU: RMS norm, and the SiLU gate of a feed-forward network."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.platforms import takes_native
from pallas_kernels.row_ops import cpu
from pallas_kernels.write_qkv.reference import rms_norm


def rms_norm_rows(
    x: Float[Array, "rows width"], weight: Float[Array, " width"], eps: float, num_rows: Int[Array, ""] | int
) -> Float[Array, "rows width"]:
    """`rms_norm` of the first `num_rows` rows; the others are undefined. A row's bits depend on no other row."""

    def plain(x: Array, weight: Array, _: Array) -> Array:
        return rms_norm(x, weight, eps)

    def native(x: Array, weight: Array, num_rows: Array) -> Array:
        return cpu.call(cpu.RMS_NORM, x, weight.astype(x.dtype), num_rows, x.shape[1], eps)

    return _choose(plain, native, x, weight, jnp.asarray(num_rows, jnp.int32), width=x.shape[1])


def silu_and_mul(both: Float[Array, "rows twice_width"], num_rows: Int[Array, ""] | int) -> Float[Array, "rows width"]:
    """silu(first half) * second half of the first `num_rows` rows; the others are undefined.

    SiLU is computed in float32 and rounded to the rows' dtype. A row's bits depend on no other row.
    """
    width = both.shape[1] // 2

    def plain(both: Array, _: Array) -> Array:
        return jax.nn.silu(both[:, :width].astype(jnp.float32)).astype(both.dtype) * both[:, width:]

    def native(both: Array, num_rows: Array) -> Array:
        return cpu.call(cpu.SILU_AND_MUL, both, both[:1], num_rows, width, 0.0)

    return _choose(plain, native, both, jnp.asarray(num_rows, jnp.int32), width=width)


def _choose(plain: Any, native: Any, x: Array, *rest: Array, width: int) -> Array:
    if not takes_native(cpu.refuse, x, width):
        return plain(x, *rest)
    return lax.platform_dependent(x, *rest, cpu=native, default=plain)
