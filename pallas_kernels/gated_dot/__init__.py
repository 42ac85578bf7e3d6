"""gated_dot: the gate and up projections of a feed-forward network, and the activation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import expect_floats
from pallas_kernels.gated_dot import reference, tiling, triton, xla
from pallas_kernels.gated_dot.activation import ACTIVATIONS
from pallas_kernels.platforms import Implementation, compiled_on, default_device, device_kind, pick

# `Implementation.refuse` takes (device, x, weight, activation)
IMPLEMENTATIONS = {
    "reference": Implementation(reference.gated_dot),
    "xla": Implementation(xla.gated_dot),
    "triton": Implementation(compiled_on("cuda", triton.gated_dot), triton.refuse),
    "triton_fixed": Implementation(
        compiled_on("cuda", functools.partial(triton.gated_dot, tiling=tiling.FIXED)), triton.refuse
    ),
}  # fmt: skip


def choose_implementation(device: Any, x: Any, weight: Any, activation: str, *, kind: str | None = None) -> str:
    """"triton" if it was measured as the fastest for the GPU and the shape, else "xla".

    device: a jax Device. kind: name of the GPU; None: the device's. x, weight: arrays or ShapeDtypeStructs.
    """
    wanted = tiling.measured(kind or device.device_kind, x, weight)
    return "xla" if wanted is None or triton.refuse(device, x, weight, activation) else "triton"


def gated_dot(
    x: Float[Array, "rows in"],
    weight: Float[Array, "2 out in"],
    num_rows: Int[Array, ""] | int,
    *,
    activation: str,
    implementation: str | None = None,
) -> Float[Array, "rows out"]:
    """act(x @ weight[0].T) * (x @ weight[1].T), with sums in float32.

    Both matmuls and the activation are rounded to x's dtype, as separate operations would be. The activation is
    computed in float32.

    weight:         gate, then up. Of x's dtype. float32 inputs are multiplied in full float32 precision.
    num_rows:       leading rows of x that are needed. Results of other rows are undefined, but finite if x is.
    activation:     "silu", "gelu" (exact), "gelu_tanh" (the tanh approximation), "relu" or "relu2" (squared).
    implementation: None: the fastest one measured on the GPU (tuning.json), else "xla". "xla" is one matmul with both
                    matrices, then the activation. On CPU both are native kernels for SiLU. "triton" is one kernel for
                    NVIDIA that never writes the matmul's result: bfloat16 and float16, not "gelu". A row's bits depend
                    on no other row. On CPU it runs in interpret mode. "reference" is the specification.

    Raises ValueError, which names the argument, if shapes or dtypes do not fit, or if the implementation refuses them.
    """
    expect_floats("x", x, "[rows, in]")
    expect_floats("weight", weight, "[2, out, in]")
    if weight.shape[0] != 2 or weight.shape[2] != x.shape[1] or weight.dtype != x.dtype:
        raise ValueError(f"weight {weight.shape} of {weight.dtype}: must be [2, out, {x.shape[1]}] of {x.dtype}, as x")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: must be one of {', '.join(ACTIVATIONS)}")
    call = (x, weight, jnp.asarray(num_rows, jnp.int32))
    plain = functools.partial(IMPLEMENTATIONS["xla"].call, activation=activation)
    if not (x.size and weight.size):
        return plain(*call)
    if implementation is not None:
        return pick(IMPLEMENTATIONS, implementation, x, weight, activation)(*call, activation=activation)
    if choose_implementation(default_device(), x, weight, activation, kind=device_kind()) == "xla":
        return plain(*call)
    kernel = functools.partial(triton.gated_dot, activation=activation)
    return jax.lax.platform_dependent(*call, cuda=kernel, default=plain)
