"""Checks of arguments at trace time. Errors name the argument, its value, and what is accepted."""

import math
import operator
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.kv_pages import FLOATS, KVPages


def expect_floats(name: str, array: Any, shape: str) -> None:
    """Raise ValueError unless `array` has a float dtype and the axes of `shape`, for example "[tokens, heads]"."""
    _expect_array(name, array, shape)
    if array.dtype not in FLOATS:
        raise ValueError(f"{name} of {array.dtype}: must be bfloat16, float16 or float32")


def expect_integers(name: str, array: Any, shape: str) -> None:
    """Raise ValueError unless `array` has an integer dtype and the axes of `shape`."""
    _expect_array(name, array, shape)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} of {array.dtype}: must be int32")


def expect_blocks(
    x: Array, matrix_of_block: Array, rows_of_block: Array | None
) -> Int[Array, " blocks"]:
    """Raise ValueError unless the index arrays fit x [blocks, rows, in]. Returns rows_of_block; None: all rows."""
    expect_integers("matrix_of_block", matrix_of_block, "[blocks]")
    if rows_of_block is None:
        rows_of_block = jnp.full(x.shape[0], x.shape[1], jnp.int32)
    expect_integers("rows_of_block", rows_of_block, "[blocks]")
    for name, array in (("matrix_of_block", matrix_of_block), ("rows_of_block", rows_of_block)):
        if array.shape != x.shape[:1]:
            raise ValueError(f"{name} {array.shape}: must be [{x.shape[0]}], one per block of x")
    return rows_of_block.astype(jnp.int32)


def expect_pages(pages: Any) -> None:
    """Raise ValueError unless `pages` is a KVPages."""
    if not isinstance(pages, KVPages):
        raise ValueError(f"pages of type {type(pages).__name__}: must be KVPages, from KVPages.create")


def expect_static(name: str, value: Any, least: int) -> int:
    """`value` as an int. Raises ValueError unless it is a Python or numpy integer that is at least `least`."""
    try:
        number = operator.index(value)
    except Exception as error:  # traced values raise JAX's own errors
        raise ValueError(
            f"{name}={value}: must be a whole number that is known at trace time (static), not {type(value).__name__}"
        ) from error
    if number < least:
        raise ValueError(f"{name}={number}: must be at least {least}")
    return number


def expect_number(name: str, value: Any, *, above: float = -math.inf) -> float:
    """`value` as a float. Raises ValueError unless it is static, finite and larger than `above`."""
    try:
        number = float(value)
    except Exception as error:  # traced values raise JAX's own errors
        raise ValueError(
            f"{name}={value}: must be a number that is known at trace time (static), not {type(value).__name__}"
        ) from error
    if not (math.isfinite(number) and number > above):
        raise ValueError(f"{name}={number}: must be finite{'' if above == -math.inf else f' and above {above:g}'}")
    return number


def _expect_array(name: str, array: Any, shape: str) -> None:
    if not (hasattr(array, "shape") and hasattr(array, "dtype")):
        raise ValueError(f"{name} of type {type(array).__name__}: must be an array {shape}")
    if len(array.shape) != shape.count(",") + 1:
        raise ValueError(f"{name} {tuple(array.shape)}: must be {shape}")
