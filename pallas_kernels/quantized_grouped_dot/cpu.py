"""quantized_grouped_dot for CPUs: calls `cpu_kernel.py` through XLA's foreign function interface."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.native import library
from pallas_kernels.native.kinds import KINDS
from pallas_kernels.platforms import refuse_cpu
from pallas_kernels.quantized_dot import xla
from pallas_kernels.quantized_dot.cpu import FLOATS
from pallas_kernels.quantized_dot.weight import QuantizedWeight, quantize

OPTION_KIND, OPTION_BITS, OPTION_OUTPUTS = range(3)  # indices of the int32 options
KERNEL = "pallas_kernels.quantized_grouped_dot.cpu_kernel"


def refuse(device: Any, x: Any, weight: QuantizedWeight) -> str | None:
    """Reason why the kernel cannot run; None if it can."""
    if refuse_cpu(device) is not None:
        return refuse_cpu(device)
    if weight.layout != "tiles" or weight.activations != "int8":
        return f"it multiplies weights in the layout tiles by rows in 8 bits, not in the layout {weight.layout}"
    if x.dtype not in FLOATS:
        return f"it multiplies bfloat16 or float32, not {x.dtype}"
    return kernel().reason


def kernel() -> library.Native:
    """The kernel in this process. Compiled or loaded at the first call."""
    return library.native(KERNEL, _check)


def _check(name: str) -> None:
    """Compare the kernel with XLA operations. Raises ValueError. Called while a program is traced."""
    rng = np.random.default_rng(0)
    matrix_of_block, rows_of_block = np.array([2, 2, 0, 1], np.int32), np.array([8, 1, 8, 8], np.int32)
    used = (np.arange(8) < rows_of_block[:, None]) & (np.arange(4) < 3)[:, None]
    with jax.ensure_compile_time_eval():
        for bits, dtype, has_mins in ((8, jnp.float32, True), (4, jnp.bfloat16, False)):
            x, numbers = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((4, 8, 96), (3, 144, 96)))
            weight = quantize(numbers, bits, 48)
            if has_mins:
                weight = dataclasses.replace(weight, zeros=None, mins=0.7 * weight.scales)
            blocks = (jnp.asarray(matrix_of_block), jnp.int32(3), jnp.asarray(rows_of_block))
            out = np.asarray(_call(name, x, weight, *blocks), np.float32)
            products = [
                xla.quantized_dot(rows, weight.matrix(index), jnp.int32(8), dtype=x.dtype)
                for rows, index in zip(x, matrix_of_block.tolist(), strict=True)
            ]
            expected = np.asarray(jnp.stack(products), np.float32)
            error = np.abs(out - expected)[used].max() / np.abs(expected).max()
            if not error <= 1e-6:  # also if it is NaN
                raise ValueError(f"products with weights in {bits} bits differ from XLA's by {error:.2g}")


def quantized_grouped_dot(
    x: Float[Array, "blocks rows in"],
    weight: QuantizedWeight,
    matrix_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
    rows_of_block: Int[Array, " blocks"],
) -> Float[Array, "blocks rows out"]:
    """See `pallas_kernels.quantized_grouped_dot`. Results that are not needed are zero."""
    name = kernel().name
    assert name is not None, "refuse() comes first"
    return _call(name, x, weight, matrix_of_block, num_blocks_used, rows_of_block)


def _call(
    name: str,
    x: Float[Array, "blocks rows in"],
    weight: QuantizedWeight,
    matrix_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
    rows_of_block: Int[Array, " blocks"],
) -> Float[Array, "blocks rows out"]:
    outputs = weight.num_outputs // weight.shape[0]
    options = np.zeros(3, np.int32)
    options[OPTION_KIND], options[OPTION_BITS], options[OPTION_OUTPUTS] = KINDS[x.dtype], weight.bits, outputs
    zeros = np.zeros(0, np.uint8) if weight.zeros is None else weight.zeros
    mins = np.zeros(0, np.float32) if weight.mins is None else weight.mins
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((*x.shape[:2], outputs), x.dtype))
    return call(
        options, num_blocks_used.astype(jnp.int32).reshape(1), matrix_of_block.astype(jnp.int32),
        rows_of_block.astype(jnp.int32), x, weight.codes, weight.scales, zeros, mins,
    )  # fmt: skip
