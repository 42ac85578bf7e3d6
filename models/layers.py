"""Parts of a layer that all models share: norms, activation functions, and the dense feed-forward network."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jpaged.models.linear import LayerContext, add, linear, linear_with_bias
from jpaged.models.spec import Activation, DecoderSpec, Norm
from pallas_kernels import rms_norm, rms_norm_rows, silu_and_mul


def softcap(x: Array, cap: float | None) -> Array:
    """cap * tanh(x / cap); x if there is no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def normalise(name: str, x: Float[Array, "*lead width"], context: LayerContext) -> Float[Array, "*lead width"]:
    """The model's norm over the last axis, with the leaf `name` as its weights."""
    spec, weight, bias = context.spec, context.params[name], context.params.get(f"{name}_bias")
    if spec.norm is Norm.RMS and context.num_rows is not None:
        return rms_norm_rows(x, weight, spec.norm_eps, context.num_rows)
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
    """The activation function, in float32: bf16 transcendentals lose digits, and not every back end lowers them."""
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
    """Input of the down projection of a gated feed-forward network: act(gated) * up."""
    if spec.swiglu_limit is None:
        return activate(spec, gated) * up
    # gpt-oss: gate and up are clamped, one is added to up, and the sigmoid is steeper than SiLU's
    x, y = gated.astype(jnp.float32), up.astype(jnp.float32)
    x = jnp.minimum(x, spec.swiglu_limit)
    y = jnp.clip(y, -spec.swiglu_limit, spec.swiglu_limit)
    return ((y + 1) * x * jax.nn.sigmoid(spec.swiglu_alpha * x)).astype(gated.dtype)


def feed_forward(x: Float[Array, "tokens hidden"], context: LayerContext) -> Float[Array, "tokens hidden"]:
    """The dense feed-forward network."""
    spec = context.spec
    if not spec.gated:
        return linear_with_bias("down", activate(spec, linear_with_bias("up", x, context)), context)
    is_plain_silu = spec.activation is Activation.SILU and spec.swiglu_limit is None and "up_bias" not in context.params
    if context.num_rows is not None and is_plain_silu and not context.layout.split_gate_up:
        gated = silu_and_mul(linear("gate_up", x, context), context.num_rows)
        return linear_with_bias("down", gated, context)
    if context.layout.split_gate_up:
        gated, up = linear("gate", x, context), linear("up", x, context)
    else:
        gated, up = gate_and_up("gate_up", x, context)
    bias = context.params.get("up_bias")
    if bias is not None:
        gated, up = add(gated, bias[0]), add(up, bias[1])
    return linear_with_bias("down", gate(spec, gated, up), context)


def gate_and_up(
    name: str, x: Float[Array, "tokens hidden"], context: LayerContext
) -> tuple[Float[Array, "tokens inter"], Float[Array, "tokens inter"]]:
    """Gate and up projections in one product, with the leaf `name` [2, inter, hidden]."""
    both = linear(name, x, context)
    width = both.shape[1] // 2
    return both[:, :width], both[:, width:]
