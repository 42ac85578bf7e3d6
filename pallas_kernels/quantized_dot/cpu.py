"""quantized_dot for CPUs: calls the kernel of `cpu_kernel.py` through XLA's foreign function interface."""

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
from pallas_kernels.quantized_dot.weight import QuantizedWeight, quantize

OPTION_KIND, OPTION_OUT_KIND, OPTION_BITS, OPTION_OUTPUTS = range(4)  # indices of the int32 options
FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
KERNEL = "pallas_kernels.quantized_dot.cpu_kernel"


def refuse(device: Any, x: Any, weight: QuantizedWeight, dtype: Any) -> str | None:
    """Reason why the kernel cannot run; None if it can."""
    if refuse_cpu(device) is not None:
        return refuse_cpu(device)
    if weight.layout != "tiles" or weight.activations != "int8":
        return f"it multiplies weights in the layout tiles by rows in 8 bits, not in the layout {weight.layout}"
    if x.dtype not in FLOATS or jnp.dtype(dtype) not in FLOATS:
        return f"it multiplies bfloat16 or float32, not {x.dtype} to {jnp.dtype(dtype)}"
    return kernel().reason


def kernel() -> library.Native:
    """The kernel in this process. Compiled or loaded at the first call."""
    return library.native(KERNEL, _check)


def _check(name: str) -> None:
    """Compare the kernel with XLA operations. Raises ValueError. Called while a program is traced."""
    rng = np.random.default_rng(0)
    with jax.ensure_compile_time_eval():
        for bits, dtype, has_mins in ((8, jnp.float32, True), (4, jnp.bfloat16, False), (4, jnp.float32, True)):
            x, numbers = (jnp.asarray(rng.standard_normal((rows, 96)), dtype) for rows in (21, 133))
            weight = quantize(numbers, bits, 48)
            if has_mins:
                weight = dataclasses.replace(weight, zeros=None, mins=0.7 * weight.scales)
            out = np.asarray(_call(name, x, weight, jnp.int32(19), jnp.dtype(jnp.float32)))[:19]
            expected = np.asarray(xla.quantized_dot(x, weight, jnp.int32(19), dtype=jnp.float32))[:19]
            error = np.abs(out - expected).max() / np.abs(expected).max()
            if not error <= 1e-6:  # also if it is NaN
                raise ValueError(f"products with weights in {bits} bits differ from XLA's by {error:.2g}")


def quantized_dot(
    x: Float[Array, "rows in"], weight: QuantizedWeight, num_rows: Int[Array, ""], *, dtype: Any
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.quantized_dot`. Results of the rows after `num_rows` are zero."""
    name = kernel().name
    assert name is not None, "refuse() comes first"
    return _call(name, x, weight, num_rows, jnp.dtype(dtype))


def _call(
    name: str, x: Float[Array, "rows in"], weight: QuantizedWeight, num_rows: Int[Array, ""], dtype: Any
) -> Float[Array, "rows out"]:
    options = np.zeros(4, np.int32)
    options[OPTION_KIND], options[OPTION_OUT_KIND] = KINDS[x.dtype], KINDS[dtype]
    options[OPTION_BITS], options[OPTION_OUTPUTS] = weight.bits, weight.num_outputs
    zeros = np.zeros(0, np.uint8) if weight.zeros is None else weight.zeros
    mins = np.zeros(0, np.float32) if weight.mins is None else weight.mins
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((x.shape[0], weight.num_outputs), dtype))
    return call(options, num_rows.astype(jnp.int32).reshape(1), x, weight.codes, weight.scales, zeros, mins)
