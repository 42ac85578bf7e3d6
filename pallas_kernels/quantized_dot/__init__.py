"""quantized_dot: rows times a matrix of weights in 8 or 4 bits, a `QuantizedWeight`."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import expect_floats
from pallas_kernels.platforms import (
    Implementation,
    compiled_on,
    default_device,
    is_hopper,
    pick,
    takes_native,
    traced_platform,
)
from pallas_kernels.quantized_dot import cpu, mosaic_tpu, reference, triton, xla
from pallas_kernels.quantized_dot.tiling import SOME_ROWS
from pallas_kernels.quantized_dot.weight import QuantizedWeight, quantize, refuse_activations

__all__ = ["IMPLEMENTATIONS", "QuantizedWeight", "quantize", "quantized_dot"]


def _mosaic_gpu(name: str) -> Callable[..., Any]:
    """A function of mosaic_gpu.py, imported at the first call: importing it takes 0.25 s, and few calls need it."""

    def call(*args: Any, **options: Any) -> Any:
        return getattr(importlib.import_module("pallas_kernels.quantized_dot.mosaic_gpu"), name)(*args, **options)

    return call


# `Implementation.refuse` takes (device, x, weight, dtype)
IMPLEMENTATIONS = {
    "reference": Implementation(reference.quantized_dot),
    "xla": Implementation(xla.quantized_dot),
    "cpu": Implementation(cpu.quantized_dot, cpu.refuse),
    "triton": Implementation(compiled_on("cuda", triton.quantized_dot), triton.refuse),
    "mosaic_gpu": Implementation(_mosaic_gpu("quantized_dot"), _mosaic_gpu("refuse")),
    "mosaic_tpu": Implementation(compiled_on("tpu", mosaic_tpu.quantized_dot), mosaic_tpu.refuse),
}


def quantized_dot(
    x: Float[Array, "rows in"],
    weight: QuantizedWeight,
    num_rows: Int[Array, ""] | int,
    *,
    dtype: Any = None,
    implementation: str | None = None,
) -> Float[Array, "rows out"]:
    """x @ weight.T.

    With `weight.activations` "int8", every row of x is rounded to 8 bits: code = round(127 * number / largest
    magnitude). Sums within a group of the weights are exact. The groups' sums, times their scales, are added in
    float32, in order. So a row's bits do not depend on other rows, and "xla" and "cpu" give the same bits. "triton" and
    "mosaic_tpu" give the same bits if an output has one group. With more groups, "triton" adds them in another order,
    "mosaic_tpu" in order.

    With "fp8", every row of x is rounded to e4m3, with one scale for each group of the weights: the largest magnitude /
    448. The weights must be fp8. Products within a group are summed in float32, times both scales, and added in order.
    A product of two e4m3 numbers is exact. This is the matmul of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2).

    With "float", the weights are dequantised to x's dtype, and sums are float32. "triton" and "mosaic_tpu" multiply x
    by codes, and then the sums by the scales. They do not round the weights.

    A row's bits from "triton" depend on the tiling, not on other rows. There are three tilings: for up to 16 rows of x,
    up to 64, or more. "mosaic_gpu" has one tiling.

    weight:         [..., in]; all axes but the last are one axis of the result.
    num_rows:       leading rows of x that are needed. Results of other rows are undefined, but finite if x is.
    dtype:          of the result; None: x's dtype.
    implementation: None: the best one for the platform that the call is lowered for. To lower for a missing GPU, trace
                    in a mesh that describes it. "xla" is XLA operations. "cpu" is a native kernel for CPU, for the
                    layout "tiles". "triton" is a kernel for NVIDIA, for the layout "rows". "mosaic_tpu" is a kernel for
                    TPU, for the layout "lanes", and "rows" of int8 with one group per output. On CPU these two run in
                    interpret mode. "mosaic_gpu" is a kernel for Hopper, for activations "fp8". It is chosen for more
                    than 64 rows. "reference" is the specification.

    Raises ValueError, which names the argument, if shapes or dtypes do not fit, or if the implementation refuses them.
    """
    expect_floats("x", x, "[rows, in]")
    if weight.shape[-1] != x.shape[1]:
        raise ValueError(f"weight {weight.shape}: must be [..., {x.shape[1]}], as x is {x.shape}")
    dtype = x.dtype if dtype is None else jnp.dtype(dtype)
    if (reason := refuse_activations(weight)) is not None:
        raise ValueError(f"weight {weight.shape}: {reason}")
    if weight.order is not None:
        x = x[:, weight.order]
    call = (x, weight, jnp.asarray(num_rows, jnp.int32))
    if implementation is not None:
        return pick(IMPLEMENTATIONS, implementation, x, weight, dtype)(*call, dtype=dtype)
    default = functools.partial(xla.quantized_dot, dtype=dtype)
    if not (x.size and weight.num_outputs):
        return default(*call)
    kernels = {}
    if takes_native(cpu.refuse, x, weight, dtype):
        kernels["cpu"] = functools.partial(cpu.quantized_dot, dtype=dtype)
    # tracing a kernel takes 0.1 s: only for the device that is lowered for
    traced = traced_platform()
    many = weight.activations == "fp8" and x.shape[0] > SOME_ROWS
    hopper = IMPLEMENTATIONS["mosaic_gpu"]
    if traced == "gpu" and many and is_hopper() and hopper.refuse(default_device(), x, weight, dtype) is None:
        kernels["cuda"] = functools.partial(hopper.call, dtype=dtype)
    elif traced == "gpu" and triton.refuse(default_device(), x, weight, dtype) is None:
        kernels["cuda"] = functools.partial(triton.quantized_dot, dtype=dtype)
    if traced == "tpu" and mosaic_tpu.refuse(default_device(), x, weight, dtype) is None:
        kernels["tpu"] = functools.partial(mosaic_tpu.quantized_dot, dtype=dtype)
    return lax.platform_dependent(*call, **kernels, default=default) if kernels else default(*call)
