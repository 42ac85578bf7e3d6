"""grouped_dot for CPUs: calls the kernel of `cpu_kernel.py` through XLA's foreign function interface."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.dot.cpu import refuse_rows
from pallas_kernels.native import library
from pallas_kernels.native.kinds import KINDS
from pallas_kernels.platforms import refuse_cpu

KERNEL = "pallas_kernels.grouped_dot.cpu_kernel"


def refuse(device: Any, x: Any) -> str | None:
    """Reason why the kernel cannot run; None if it can."""
    return refuse_cpu(device) or refuse_rows(x, x.dtype) or kernel().reason


def kernel() -> library.Native:
    """The kernel in this process. Compiled or loaded at the first call."""
    return library.native(KERNEL, _check)


def _check(name: str) -> None:
    """Compare the kernel with float64. Raises ValueError. Called while a program is traced."""
    rng = np.random.default_rng(0)
    matrix_of_block, rows_of_block = np.array([2, 2, 0, 1], np.int32), np.array([8, 5, 8, 8], np.int32)
    used = (np.arange(8) < rows_of_block[:, None]) & (np.arange(4) < 3)[:, None]
    with jax.ensure_compile_time_eval():
        for dtype, limit in ((jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)):
            x, weights = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((4, 8, 96), (3, 133, 96)))
            out = _call(name, x, weights, jnp.asarray(matrix_of_block), jnp.int32(3), jnp.asarray(rows_of_block))
            expected = np.einsum("bri,boi->bro", x, np.asarray(weights, np.float64)[matrix_of_block], dtype=np.float64)
            error = np.abs(np.asarray(out, np.float64) - expected)[used].max() / np.abs(expected).max()
            if not error <= limit:  # also if it is NaN
                raise ValueError(f"products of {jnp.dtype(dtype)} differ from float64 by {error:.2g}")


def grouped_dot(
    x: Float[Array, "blocks rows in"],
    weights: Float[Array, "matrices out in"],
    matrix_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
    rows_of_block: Int[Array, " blocks"],
) -> Float[Array, "blocks rows out"]:
    """See `pallas_kernels.grouped_dot`. Results that are not needed are zero."""
    name = kernel().name
    assert name is not None, "refuse() comes first"
    return _call(name, x, weights, matrix_of_block, num_blocks_used, rows_of_block)


def _call(
    name: str,
    x: Float[Array, "blocks rows in"],
    weights: Float[Array, "matrices out in"],
    matrix_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
    rows_of_block: Int[Array, " blocks"],
) -> Float[Array, "blocks rows out"]:
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((*x.shape[:2], weights.shape[1]), x.dtype))
    kind = np.array([KINDS[x.dtype]], np.int32)
    return call(kind, num_blocks_used.reshape(1), matrix_of_block, rows_of_block, x, weights)
