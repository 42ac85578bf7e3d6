"""Operations on rows for CPUs: calls the kernel of `cpu_kernel.py` through XLA's foreign function interface."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.native import library
from pallas_kernels.native.kinds import KINDS
from pallas_kernels.platforms import refuse_cpu

RMS_NORM, SILU_AND_MUL, ARGMAX, GATHER = range(4)
OPTION_OPERATION, OPTION_KIND, OPTION_EPS = range(3)  # indices of the int32 options; EPS holds the bits of a float32
OPTION_WIDTH = OPTION_EPS  # of ARGMAX
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


def refuse_argmax(device: Any, x: Any, width: int) -> str | None:
    """Reason why the kernel cannot run ARGMAX; None if it can."""
    if refuse_cpu(device) is not None:
        return refuse_cpu(device)
    if x.dtype != jnp.float32:
        return f"it compares float32, not {x.dtype}"
    if not x.size or not 0 < width <= x.shape[1]:
        return f"{width} numbers of rows of {x.shape[1]} have no largest"
    return kernel().reason


def refuse_gather(device: Any, table: Any) -> str | None:
    """Reason why the kernel cannot run GATHER; None if it can."""
    if refuse_cpu(device) is not None:
        return refuse_cpu(device)
    if table.dtype not in FLOATS:
        return f"it copies bfloat16 or float32, not {table.dtype}"
    return kernel().reason if table.size else "the table is empty"


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
        found = np.asarray(_argmax(name, jnp.asarray(x), jnp.int32(5), 83))
        if not np.array_equal(found, x[:, :83].argmax(1)):
            raise ValueError(f"indices of the largest numbers differ from numpy's: {found}")
        index = np.array([3, 0, 4, 4], np.int32)
        found = np.asarray(_gather(name, jnp.asarray(x), jnp.asarray(index), jnp.int32(4)))
        if not np.array_equal(found, x[index]):
            raise ValueError("gathered rows differ from numpy's")


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


def argmax(x: Float[Array, "rows vocab"], num_rows: Int[Array, ""], width: int) -> Int[Array, " rows"]:
    """Run ARGMAX. Results of the rows after `num_rows` are zero."""
    name = kernel().name
    assert name is not None, "refuse_argmax() comes first"
    return _argmax(name, x, num_rows, width)


def gather(
    table: Float[Array, "table_rows width"], index: Int[Array, " rows"], num_rows: Int[Array, ""]
) -> Float[Array, "rows width"]:
    """Run GATHER. Results of the rows after `num_rows` are zero."""
    name = kernel().name
    assert name is not None, "refuse_gather() comes first"
    return _gather(name, table, index, num_rows)


def _argmax(name: str, x: Array, num_rows: Array, width: int) -> Array:
    made = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((x.shape[0],), jnp.int32))
    return made(_options(ARGMAX, x, width), num_rows.reshape(1), x)


def _gather(name: str, table: Array, index: Array, num_rows: Array) -> Array:
    made = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((index.shape[0], table.shape[1]), table.dtype))
    return made(_options(GATHER, table), num_rows.reshape(1), table, index.astype(jnp.int32))


def _options(operation: int, x: Array, last: int | np.integer = 0) -> np.ndarray:
    return np.array([operation, KINDS[x.dtype], last], np.int32)


def _call(
    name: str,
    operation: int,
    x: Float[Array, "rows in"],
    weight: Float[Array, "..."],
    num_rows: Int[Array, ""],
    width: int,
    eps: float,
) -> Float[Array, "rows width"]:
    made = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((x.shape[0], width), x.dtype))
    return made(_options(operation, x, np.float32(eps).view(np.int32)), num_rows.reshape(1), x, weight)
