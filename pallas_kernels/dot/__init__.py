"""dot: rows times a weight matrix [out, in], the matmul of a linear layer. partial_dots: the same, by parts."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.add_norm.reference import tree_sum
from pallas_kernels.checks import expect_floats, expect_static
from pallas_kernels.dot import cpu, triton
from pallas_kernels.dot.tiling import FIXED
from pallas_kernels.platforms import Implementation, compiled_on, pick, takes_native


def _xla(
    x: Float[Array, "rows in"], weight: Float[Array, "out in"], num_rows: Int[Array, ""], *, dtype: Any
) -> Float[Array, "rows out"]:
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=exact, preferred_element_type=dtype)


def _xla_parts(
    x: Float[Array, "rows in"], weight: Float[Array, "out in"], num_rows: Int[Array, ""], *, parts: int, together: bool
) -> Float[Array, "sums rows out"]:
    width = x.shape[1] // parts
    cuts = [slice(part * width, (part + 1) * width) for part in range(parts)]
    sums = [_xla(x[:, cut], weight[:, cut], num_rows, dtype=jnp.float32) for cut in cuts]
    return tree_sum(sums)[None] if together else jnp.stack(sums)


def _triton_parts(*arrays: Array, parts: int, together: bool, **options: Any) -> Float[Array, "sums rows out"]:
    return (triton.tree_dot if together else triton.partial_dots)(*arrays, parts=parts, **options)


# `Implementation.refuse` takes (device, x, weight, dtype)
IMPLEMENTATIONS = {
    "xla": Implementation(_xla),
    "cpu": Implementation(cpu.dot, cpu.refuse),
    "triton": Implementation(compiled_on("cuda", triton.dot), triton.refuse),
    "triton_fixed": Implementation(
        compiled_on("cuda", functools.partial(triton.dot, tiling=FIXED)), triton.refuse
    ),
}  # fmt: skip
PARTIAL_IMPLEMENTATIONS = {
    "xla": Implementation(_xla_parts),
    "triton": Implementation(compiled_on("cuda", _triton_parts), triton.refuse),
    "triton_fixed": Implementation(
        compiled_on("cuda", functools.partial(_triton_parts, tiling=FIXED)), triton.refuse
    ),
}  # fmt: skip


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
                    native kernel for CPU, in which a row's bits do not depend on other rows. "triton" is a kernel for
                    NVIDIA, bfloat16 and float16, with tiles for the number of rows. "triton_fixed" is the same kernel
                    with one tile for every number of rows. On CPU both run in interpret mode. The kernels have no
                    gradient.

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


def partial_dots(
    x: Float[Array, "rows in"],
    weight: Float[Array, "out in"],
    num_rows: Int[Array, ""] | int,
    *,
    parts: int,
    together: bool = False,
    implementation: str = "xla",
) -> Float[Array, "sums rows out"]:
    """float32 products of equal parts of the inputs: x[:, part] @ weight[:, part].T. Their sum is `dot`.

    parts:          a power of two that divides the inputs.
    together:       return one sum, [1, rows, out]: the parts are added in pairs, neighbours first. The bits are those
                    of adding the parts so afterwards.
    num_rows, implementation: as in `dot`, without "cpu". The default has gradients.

    Raises ValueError, which names the argument, if shapes or dtypes do not fit, or if the implementation refuses them.
    """
    expect_product(x, weight)
    parts = expect_static("parts", parts, 1)
    if parts & (parts - 1) or x.shape[1] % parts:
        raise ValueError(f"parts={parts}: must be a power of two that divides the {x.shape[1]} inputs")
    call = pick(PARTIAL_IMPLEMENTATIONS, implementation, x, weight, jnp.float32)
    if not (x.size and weight.size):
        return jnp.zeros((1 if together else parts, x.shape[0], weight.shape[0]), jnp.float32)
    return call(x, weight, jnp.asarray(num_rows, jnp.int32), parts=parts, together=together)


def expect_product(x: Any, weight: Any) -> None:
    """Raise ValueError, which names the argument, unless the arrays are x and weight of `dot`."""
    expect_floats("x", x, "[rows, in]")
    expect_floats("weight", weight, "[out, in]")
    if weight.shape[1] != x.shape[1] or weight.dtype != x.dtype:
        raise ValueError(f"weight {weight.shape} of {weight.dtype}: must be [out, {x.shape[1]}] of {x.dtype}, as x")
