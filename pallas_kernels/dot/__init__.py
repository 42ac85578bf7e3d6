"""dot: rows times a weight matrix [out, in], the matmul of a linear layer."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import expect_floats
from pallas_kernels.dot import cpu
from pallas_kernels.platforms import Implementation, pick, takes_native


def _xla(
    x: Float[Array, "rows in"], weight: Float[Array, "out in"], num_rows: Int[Array, ""], *, dtype: Any
) -> Float[Array, "rows out"]:
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=exact, preferred_element_type=dtype)


# `Implementation.refuse` takes (device, x, weight, dtype)
IMPLEMENTATIONS = {"xla": Implementation(_xla), "cpu": Implementation(cpu.dot, cpu.refuse)}


def dot(
    x: Float[Array, "rows in"],
    weight: Float[Array, "out in"],
    num_rows: Int[Array, ""] | int,
    *,
    dtype: Any = None,
    implementation: str | None = None,
) -> Float[Array, "rows out"]:
    """x @ weight.T, with sums in float32.

    x, weight:      of the same dtype. float32 inputs are multiplied in full float32 precision.
    num_rows:       number of leading rows of x that are needed. Results of other rows are undefined, but finite.
    dtype:          of the result; None: x's dtype.
    implementation: None: the best one for the platform that the call is lowered for. "xla" is XLA's matmul. "cpu" is a
                    native kernel for CPU, in which a row's bits do not depend on other rows. It has no gradient.

    Raises ValueError, which names the argument, if shapes or dtypes do not fit, or if the implementation refuses them.
    """
    expect_product(x, weight)
    dtype = x.dtype if dtype is None else jnp.dtype(dtype)
    call = (x, weight, jnp.asarray(num_rows, jnp.int32))
    if implementation is not None:
        return pick(IMPLEMENTATIONS, implementation, x, weight, dtype)(*call, dtype=dtype)
    branches = {"default": lambda *arrays: _xla(*arrays, dtype=dtype)}
    if not (x.size and weight.size) or not takes_native(cpu.refuse, x, weight, dtype):
        return branches["default"](*call)
    return lax.platform_dependent(*call, cpu=lambda *arrays: cpu.dot(*arrays, dtype=dtype), **branches)


def expect_product(x: Any, weight: Any) -> None:
    """Raise ValueError, which names the argument, unless the arrays are x and weight of `dot`."""
    expect_floats("x", x, "[rows, in]")
    expect_floats("weight", weight, "[out, in]")
    if weight.shape[1] != x.shape[1] or weight.dtype != x.dtype:
        raise ValueError(f"weight {weight.shape} of {weight.dtype}: must be [out, {x.shape[1]}] of {x.dtype}, as x")
