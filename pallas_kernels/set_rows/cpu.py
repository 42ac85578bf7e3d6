"""set_rows for CPUs: calls the kernel of `cpu_kernel.py` through XLA's foreign function interface.

XLA for CPU has no operations in bfloat16 and float8, and converts the whole table for each update: to float32 in JAX
0.10, and float8 to float16 in 0.11 as well. A pool of 768 MiB took 1.2 s and as much memory again.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from pallas_kernels.native import library
from pallas_kernels.platforms import refuse_cpu

CONVERTED = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float8_e4m3fn))
OPTION_ROW_BYTES, OPTION_ROWS = range(2)  # indices of the int32 options
KERNEL = "pallas_kernels.set_rows.cpu_kernel"


def refuse(device: Any, table: Any) -> str | None:
    """Reason why the kernel cannot run, or is not needed; None if it can."""
    if refuse_cpu(device) is not None:
        return refuse_cpu(device)
    if table.dtype not in CONVERTED:
        return f"XLA updates {table.dtype} in place"
    return kernel().reason


def kernel() -> library.Native:
    """The kernel in this process. Compiled or loaded at the first call."""
    return library.native(KERNEL, _check)


def set_rows(
    table: Shaped[Array, "*shape"], index: Int[Array, " n"], rows: Shaped[Array, "n width"]
) -> Shaped[Array, "*shape"]:
    """See `pallas_kernels.set_rows`."""
    name = kernel().name
    assert name is not None, "refuse() comes first"
    return _call(name, table, index, rows)


def _call(name: str, table: Any, index: Any, rows: Any) -> Array:
    # the table keeps its shape: XLA copies a donated array that is reshaped first
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(table.shape, table.dtype), input_output_aliases={3: 0})
    options = np.array([rows.shape[1] * table.dtype.itemsize, table.size // rows.shape[1]], np.int32)
    return call(options, index.astype(jnp.int32), rows, table)


def _check(name: str) -> None:
    """Compare the kernel with numpy. Raises ValueError. Called while a program is traced."""
    rng = np.random.default_rng(0)
    table, rows = (rng.integers(0, 256, (n, 6), np.uint8) for n in (40, 20))
    index = rng.permutation(40)[:20].astype(np.int32)
    index[[3, 11]] = -1, 40  # padding
    expected = table.copy()
    expected[index[index % 40 == index]] = rows[index % 40 == index]
    with jax.ensure_compile_time_eval():
        found = _call(name, jnp.asarray(table.reshape(8, 5, 2, 3)), jnp.asarray(index), jnp.asarray(rows))
        if not np.array_equal(np.asarray(found).reshape(40, 6), expected):
            raise ValueError("the rows of the table differ from numpy's")
