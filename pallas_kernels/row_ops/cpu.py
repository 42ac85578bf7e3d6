"""Operations on rows for CPUs: calls the kernel of `cpu_kernel.py` through XLA's foreign function interface."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.native import library
from pallas_kernels.native.kinds import KINDS
from pallas_kernels.platforms import refuse_cpu

RMS_NORM, SILU_AND_MUL = range(2)
OPTION_OPERATION, OPTION_KIND, OPTION_EPS = range(3)  # indices of the int32 options; EPS holds the bits of a float32
FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
MULTIPLE = 16  # row widths are multiples of it: whole vectors on every processor
KERNEL = "pallas_kernels.row_ops.cpu_kernel"


def refuse(device: Any, x: Any, width: int) -> str | None:
    """Reason why the kernel cannot run; None if it can. width: of the result."""
    if refuse_cpu(device) is not None:
        return refuse_cpu(device)
    if x.dtype not in FLOATS:
        return f"it computes bfloat16 or float32, not {x.dtype}"
    if width % MULTIPLE or not x.size:
        return f"rows of {width} numbers are not a multiple of {MULTIPLE}"
    return kernel().reason


def kernel() -> library.Native:
    """The kernel in this process. Compiled or loaded at the first call."""
    return library.native(KERNEL, _check)


def _check(name: str) -> None:
    """Compare the kernel with float64. Raises ValueError. Called while a program is traced."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((5, 96)).astype(np.float32) * 9, rng.standard_normal(96).astype(np.float32)
    wide = x.astype(np.float64)
    expected = {
        RMS_NORM: wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight,
        SILU_AND_MUL: wide[:, :48] / (1 + np.exp(-wide[:, :48])) * wide[:, 48:],
    }
    with jax.ensure_compile_time_eval():
        for operation, right in expected.items():
            found = _call(name, operation, jnp.asarray(x), jnp.asarray(weight), jnp.int32(5), right.shape[1], 1e-5)
            error = np.abs(np.asarray(found, np.float64) - right).max() / np.abs(right).max()
            if not error <= 1e-6:  # also if it is NaN
                raise ValueError(f"operation {operation} differs from float64 by {error:.2g}")


def call(
    operation: int,
    x: Float[Array, "rows in"],
    weight: Float[Array, "..."],
    num_rows: Int[Array, ""],
    width: int,
    eps: float,
) -> Float[Array, "rows width"]:
    """Run RMS_NORM, or SILU_AND_MUL, which does not read `weight`. Results of the rows after `num_rows` are zero."""
    name = kernel().name
    assert name is not None, "refuse() comes first"
    return _call(name, operation, x, weight, num_rows, width, eps)


def _call(
    name: str,
    operation: int,
    x: Float[Array, "rows in"],
    weight: Float[Array, "..."],
    num_rows: Int[Array, ""],
    width: int,
    eps: float,
) -> Float[Array, "rows width"]:
    options = np.array([operation, KINDS[x.dtype], np.float32(eps).view(np.int32)], np.int32)
    made = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((x.shape[0], width), x.dtype))
    return made(options, num_rows.reshape(1), x, weight)
