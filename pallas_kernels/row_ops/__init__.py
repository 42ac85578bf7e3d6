"""Operations on single rows, as native kernels on CPU: RMS norm, the SiLU gate, argmax, and rows of a table."""

from collections.abc import Callable
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

    return _choose(plain, native, cpu.refuse, x, weight, jnp.asarray(num_rows, jnp.int32), refused=(x.shape[1],))


def silu_and_mul(both: Float[Array, "rows twice_width"], num_rows: Int[Array, ""] | int) -> Float[Array, "rows width"]:
    """silu(first half) * second half of the first `num_rows` rows; the others are undefined.

    SiLU is computed in float32 and rounded to the rows' dtype. A row's bits depend on no other row.
    """
    width = both.shape[1] // 2

    def plain(both: Array, _: Array) -> Array:
        return jax.nn.silu(both[:, :width].astype(jnp.float32)).astype(both.dtype) * both[:, width:]

    def native(both: Array, num_rows: Array) -> Array:
        return cpu.call(cpu.SILU_AND_MUL, both, both[:1], num_rows, width, 0.0)

    return _choose(plain, native, cpu.refuse, both, jnp.asarray(num_rows, jnp.int32), refused=(width,))


def argmax_rows(
    x: Float[Array, "rows vocab"], num_rows: Int[Array, ""] | int, *, width: int | None = None,
    plain: Callable[[Array], Array] | None = None,
) -> Int[Array, " rows"]:  # fmt: skip
    """Index of the largest of a row's first `width` numbers, for the first `num_rows` rows; the others are undefined.

    The lowest index wins a tie. Results are int32 in [0, width). The kernel takes float32, and ignores NaN.

    width: None: all numbers.
    plain: XLA operations for devices without a kernel, of x[:, :width]; None: `jnp.argmax`.
    """
    width = x.shape[1] if width is None else width

    def by_xla(x: Array, _: Array) -> Array:
        x = x[:, :width]
        return jnp.argmax(x, axis=1).astype(jnp.int32) if plain is None else plain(x)

    def native(x: Array, num_rows: Array) -> Array:
        return cpu.argmax(x, num_rows, width)

    return _choose(by_xla, native, cpu.refuse_argmax, x, jnp.asarray(num_rows, jnp.int32), refused=(width,))


def gather_rows(
    table: Float[Array, "table_rows width"], index: Int[Array, " rows"], num_rows: Int[Array, ""] | int
) -> Float[Array, "rows width"]:
    """Row index[i] of the table for each of the first `num_rows` i; the others are undefined, but finite.

    Indices are clipped. XLA for CPU gathers bfloat16 as float32, and inside a loop it converts the whole table before
    the loop: 80 us for [4096, 96]. The kernel copies the bits.
    """

    def plain(table: Array, index: Array, _: Array) -> Array:
        return jnp.take(table, index, axis=0, mode="clip")

    def native(table: Array, index: Array, num_rows: Array) -> Array:
        return cpu.gather(table, index, num_rows)

    return _choose(plain, native, cpu.refuse_gather, table, index, jnp.asarray(num_rows, jnp.int32))


def _choose(plain: Any, native: Any, refuse: Any, x: Array, *rest: Array, refused: tuple[int, ...] = ()) -> Array:
    """Call the native form on CPUs that take it. refused: further arguments of `refuse`."""
    if not takes_native(refuse, x, *refused):
        return plain(x, *rest)
    return lax.platform_dependent(x, *rest, cpu=native, default=plain)
