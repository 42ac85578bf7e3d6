"""Mamba-2 layers (arXiv:2405.21060): Granite 4, Nemotron-H, Falcon-H1.

A layer's state is two arrays with one slot per request: the last inputs of a convolution, and a float32 matrix for each
head.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jpaged.models.layers import normalise_heads, scaled
from jpaged.models.linear import LayerContext, add, linear, linear_with_bias
from jpaged.models.recurrent_spec import GateNorm, Mamba2
from jpaged.models.spec import Params
from pallas_kernels.causal_conv import causal_conv
from pallas_kernels.mamba2 import mamba2


def mamba2_inputs(
    mamba: Mamba2, x: Float[Array, "tokens hidden"], context: LayerContext
) -> tuple[tuple[Array, ...], Float[Array, "tokens width"]]:
    """`recurrent.token_inputs`: input of the convolution and time steps; gates."""
    width = mamba.inner_size
    z, mixed, dt = jnp.split(_projected(mamba, x, context), (width, width + mamba.channels), axis=1)
    return (mixed, jax.nn.softplus(dt.astype(jnp.float32) + context.params["mamba_dt_bias"])), z


def advance_mamba2(
    mamba: Mamba2, params: Params, inputs: tuple[Array, ...], state: Any, rows: Any
) -> tuple[Float[Array, "tokens width"], Any]:
    """`recurrent.advance`. rows: `recurrent.StateRows`."""
    (mixed, dt), (earlier, matrices) = inputs, state
    tokens, width = mixed.shape[0], mamba.inner_size
    mixed, earlier = causal_conv(
        mixed, params["mamba_conv"], params.get("mamba_conv_bias"), earlier, activation="silu", **rows.of_kernel()
    )
    values, b, c = jnp.split(mixed, (width, width + mamba.groups * mamba.state_dim), axis=1)
    b, c = (each.reshape(tokens, mamba.groups, mamba.state_dim) for each in (b, c))
    out, matrices = mamba2(
        values.reshape(tokens, mamba.heads, mamba.head_dim), dt, -jnp.exp(params["mamba_a_log"]), b, c,
        params["mamba_d"], matrices, **rows.of_kernel(),
    )  # fmt: skip
    return out.reshape(tokens, width), (earlier, matrices)


def mamba2_output(
    mamba: Mamba2, out: Float[Array, "tokens width"], gate: Float[Array, "tokens width"], context: LayerContext
) -> Float[Array, "tokens hidden"]:
    """Gate, norm, and the output matrix."""
    out = _gated(mamba, out, gate, context)
    return scaled(linear_with_bias("mamba_o", out, context), mamba.out_scale)


def _projected(mamba: Mamba2, x: Float[Array, "tokens hidden"], context: LayerContext) -> Float[Array, "tokens parts"]:
    """z, x, b, c and dt, each times its factor."""
    product, bias = linear("mamba_in", x, context), context.params.get("mamba_in_bias")
    if mamba.in_scale == 1 and set(mamba.part_scales) == {1.0}:
        return add(product, bias)
    of_group = mamba.groups * mamba.state_dim
    sizes = (mamba.inner_size, mamba.inner_size, of_group, of_group, mamba.heads)
    factors = np.repeat(np.array(mamba.part_scales, np.float32), sizes)
    out = product.astype(jnp.float32) * (factors * np.float32(mamba.in_scale))
    return (out if bias is None else out + bias.astype(jnp.float32) * factors).astype(x.dtype)


def _gated(
    mamba: Mamba2, x: Float[Array, "tokens width"], gate: Float[Array, "tokens width"], context: LayerContext
) -> Float[Array, "tokens width"]:
    """x times silu(gate), with an RMS norm over each group of heads before or after the gate, in float32."""
    y, gates = x.astype(jnp.float32), jax.nn.silu(gate.astype(jnp.float32))
    if mamba.gate_norm is not GateNorm.BEFORE:
        y *= gates
    if mamba.gate_norm is not GateNorm.NONE:
        grouped = y.reshape(x.shape[0], mamba.groups, -1)
        y = normalise_heads(grouped, None, context).reshape(x.shape)
        y *= context.params["mamba_norm"].astype(jnp.float32)
    if mamba.gate_norm is GateNorm.BEFORE:
        y *= gates
    return y.astype(x.dtype)
