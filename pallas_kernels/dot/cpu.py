"""dot for CPUs: calls the kernel of `cpu_kernel.py` through XLA's foreign function interface."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.native import library
from pallas_kernels.native.kinds import KINDS
from pallas_kernels.platforms import refuse_cpu

OPTION_KIND, OPTION_OUT_KIND = range(2)  # indices of the int32 options
FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
VECTOR_BYTES = 64
KERNEL = "pallas_kernels.dot.cpu_kernel"


def refuse(device: Any, x: Any, weight: Any, dtype: Any) -> str | None:
    """Reason why the kernel cannot run; None if it can."""
    if refuse_cpu(device) is not None:
        return refuse_cpu(device)
    return refuse_rows(x, dtype) or kernel().reason


def refuse_rows(x: Any, dtype: Any) -> str | None:
    """Reason why native matmuls cannot take x[..., in] with results of `dtype`; None if they can."""
    if x.dtype not in FLOATS or jnp.dtype(dtype) not in FLOATS:
        return f"it multiplies bfloat16 or float32, not {x.dtype} to {jnp.dtype(dtype)}"
    if x.shape[-1] * x.dtype.itemsize % VECTOR_BYTES:
        return f"rows of {x.shape[-1]} numbers are not a multiple of {VECTOR_BYTES} bytes"
    return None


def kernel() -> library.Native:
    """The kernel in this process. Compiled or loaded at the first call."""
    return library.native(KERNEL, _check)


def _check(name: str) -> None:
    """Compare the kernel with float64. Raises ValueError. Called while a program is traced."""
    rng = np.random.default_rng(0)
    with jax.ensure_compile_time_eval():
        for dtype, limit in ((jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)):
            x, weight = (jnp.asarray(rng.standard_normal((rows, 96)), dtype) for rows in (21, 133))
            out = np.asarray(_call(name, x, weight, jnp.int32(19), jnp.dtype(dtype)), np.float64)[:19]
            expected = np.asarray(x, np.float64)[:19] @ np.asarray(weight, np.float64).T
            error = np.abs(out - expected).max() / np.abs(expected).max()
            if not error <= limit:  # also if it is NaN
                raise ValueError(f"products of {jnp.dtype(dtype)} differ from float64 by {error:.2g}")


def dot(
    x: Float[Array, "rows in"], weight: Float[Array, "out in"], num_rows: Int[Array, ""], *, dtype: Any
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.dot`. Results of the rows after `num_rows` are zero."""
    name = kernel().name
    assert name is not None, "refuse() comes first"
    return _call(name, x, weight, num_rows, jnp.dtype(dtype))


def _call(
    name: str, x: Float[Array, "rows in"], weight: Float[Array, "out in"], num_rows: Int[Array, ""], dtype: Any
) -> Float[Array, "rows out"]:
    options = np.zeros(2, np.int32)
    options[OPTION_KIND], options[OPTION_OUT_KIND] = KINDS[x.dtype], KINDS[dtype]
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), dtype))
    return call(options, num_rows.astype(jnp.int32).reshape(1), x, weight)
