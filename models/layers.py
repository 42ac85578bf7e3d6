"""What layers are made of: products, norms, non-linearities, and the dense feed-forward layer."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jpaged.models.spec import Activation, DecoderSpec, Norm, WeightLayout
from pallas_kernels.write_qkv.reference import rms_norm

Params = dict[str, Any]  # the tree of spec.param_shapes, or one layer's part of it


def product(x: Array, weight: Array, transposed: bool = False, dtype: Any = None) -> Array:
    """x [rows, in] times weight [out, in] ([in, out] if transposed); float32 is true float32 on every platform."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (0 if transposed else 1,)), ((), ()))
    return lax.dot_general(x, weight, dims, precision=exact, preferred_element_type=dtype or x.dtype)


def add(x: Array, bias: Array | None) -> Array:
    """x, and a bias where there is one."""
    return x if bias is None else x + bias


def softcap(x: Array, cap: float | None) -> Array:
    """cap * tanh(x / cap), where there is a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def normalise(spec: DecoderSpec, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """The model's norm over the last axis."""
    if spec.norm is Norm.RMS:
        return rms_norm(x, weight, spec.norm_eps)
    y = x.astype(jnp.float32)
    if spec.norm is Norm.RMS_OFFSET:
        y *= lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + spec.norm_eps)
        return (y * (1 + weight.astype(jnp.float32))).astype(x.dtype)
    y -= y.mean(-1, keepdims=True)
    y *= lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + spec.norm_eps)
    y = y * weight.astype(jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)


def activate(spec: DecoderSpec, x: Array) -> Array:
    """The non-linearity, in float32: bf16 transcendentals lose digits and do not lower in every kernel back end."""
    y = x.astype(jnp.float32)
    match spec.activation:
        case Activation.SILU:
            y = jax.nn.silu(y)
        case Activation.GELU:
            y = jax.nn.gelu(y, approximate=False)
        case Activation.GELU_TANH:
            y = jax.nn.gelu(y, approximate=True)
        case Activation.RELU:
            y = jax.nn.relu(y)
    return y.astype(x.dtype)


def gate(spec: DecoderSpec, gated: Array, up: Array) -> Array:
    """What goes into the last matrix of a gated feed-forward layer."""
    if spec.swiglu_limit is None:
        return activate(spec, gated) * up
    # gpt-oss: clamped, the up part shifted by one, and a sigmoid steeper than SiLU's
    x, y = gated.astype(jnp.float32), up.astype(jnp.float32)
    x = jnp.minimum(x, spec.swiglu_limit)
    y = jnp.clip(y, -spec.swiglu_limit, spec.swiglu_limit)
    return ((y + 1) * x * jax.nn.sigmoid(spec.swiglu_alpha * x)).astype(gated.dtype)


def feed_forward(
    spec: DecoderSpec, layout: WeightLayout, matrices: Params, vectors: Params, x: Float[Array, "tokens hidden"]
) -> Float[Array, "tokens hidden"]:
    """The dense feed-forward layer."""
    bias = vectors.get("up_bias")
    if not spec.gated:
        h = activate(spec, add(product(x, matrices["up"], "up" in layout.transposed), bias))
    else:
        if layout.split_gate_up:
            gated, up = (product(x, matrices[n], n in layout.transposed) for n in ("gate", "up"))
        else:
            gated, up = gate_and_up(x, matrices["gate_up"])
        if bias is not None:
            gated, up = add(gated, bias[0]), add(up, bias[1])
        h = gate(spec, gated, up)
    return add(product(h, matrices["down"], "down" in layout.transposed), vectors.get("down_bias"))


def gate_and_up(
    x: Float[Array, "tokens hidden"], weight: Float[Array, "2 inter hidden"]
) -> tuple[Float[Array, "tokens inter"], Float[Array, "tokens inter"]]:
    """Both products of a gated feed-forward layer, as one."""
    both = product(x, weight.reshape(-1, weight.shape[-1]))
    return both[:, : weight.shape[1]], both[:, weight.shape[1] :]
