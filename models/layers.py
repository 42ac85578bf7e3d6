"""Parts of a layer: norms, activation functions, and the dense feed-forward network."""

from collections.abc import Container
from statistics import NormalDist

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jpaged.models.adapters import has_adapters
from jpaged.models.linear import LayerContext, add, linear, linear_with_bias
from jpaged.models.quantization import is_quantized
from jpaged.models.sharding import TENSOR, WHOLE, Shards
from jpaged.models.spec import Activation, DecoderSpec, Norm, WeightLayout
from pallas_kernels import activate, add_norm, gated_dot, rms_norm, rms_norm_rows, silu_and_mul


def softcap(x: Array, cap: float | None) -> Array:
    """cap * tanh(x / cap); x if there is no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def scaled(x: Float[Array, "..."], factor: float) -> Float[Array, "..."]:
    """x times a factor, in float32."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def normalise(name: str, x: Float[Array, "*lead width"], context: LayerContext) -> Float[Array, "*lead width"]:
    """Apply the model's norm over the last axis. name: leaf of the norm's weights."""
    spec, weight, bias = context.spec, context.params[name], context.params.get(f"{name}_bias")
    if spec.norm is Norm.RMS and context.shards.fixed_kernels(x.dtype) and x.ndim == 2:
        _, normed = add_norm(None, x, weight, eps=spec.norm_eps, implementation="triton")
        assert normed is not None  # there is a weight
        return normed
    if spec.norm is Norm.RMS and context.num_rows is not None:
        return rms_norm_rows(x, weight, spec.norm_eps, context.num_rows)
    if spec.norm is Norm.RMS:
        return rms_norm(x, weight, spec.norm_eps)
    y = x.astype(jnp.float32)
    if spec.norm is Norm.RMS_OFFSET:
        y *= lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + spec.norm_eps)
        return (y * (1 + weight.astype(jnp.float32))).astype(x.dtype)
    return layer_norm(x, weight, bias, spec.norm_eps)


def layer_norm(
    x: Float[Array, "*lead width"], weight: Float[Array, " width"], bias: Float[Array, " width"] | None, eps: float
) -> Float[Array, "*lead width"]:
    """(x - mean) / std * weight + bias, over the last axis, in float32."""
    y = x.astype(jnp.float32)
    y -= y.mean(-1, keepdims=True)
    y *= lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    y = y * weight.astype(jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)


def normalise_split(name: str, x: Float[Array, "rows width"], context: LayerContext) -> Float[Array, "rows width"]:
    """`normalise` for a last axis that is split over devices. RMS norms only."""
    shards, spec = context.shards, context.spec
    if shards.divisor == 1:
        return normalise(name, x, context)
    y = x.astype(jnp.float32)
    squares = [jnp.sum(part * part, axis=-1, keepdims=True) for part in jnp.split(y, shards.parts_here, axis=1)]
    mean = shards.total(squares, jnp.float32) / (x.shape[1] * shards.count)
    return (y * lax.rsqrt(mean + spec.norm_eps) * context.params[name].astype(jnp.float32)).astype(x.dtype)


def gate(spec: DecoderSpec, gated: Array, up: Array) -> Array:
    """act(gated) * up, the input of the down projection in a gated feed-forward network."""
    gated = scaled(gated, spec.gate_scale)
    if spec.swiglu_limit is None:
        return activate(spec.activation.value, gated) * up
    # Gate and up are clamped. gpt-oss: 1 is added to up, and the sigmoid is steeper than in SiLU.
    x, y = gated.astype(jnp.float32), up.astype(jnp.float32)
    x = jnp.minimum(x, spec.swiglu_limit)
    y = jnp.clip(y, -spec.swiglu_limit, spec.swiglu_limit)
    if spec.swiglu_alpha is None:
        return (jax.nn.silu(x) * y).astype(gated.dtype)
    return ((y + 1) * x * jax.nn.sigmoid(spec.swiglu_alpha * x)).astype(gated.dtype)


def xielu(x: Float[Array, "..."], numbers: Float[Array, "4"]) -> Float[Array, "..."]:
    """xIELU (arXiv:2411.13010), computed in float32, returned in x's dtype.

    numbers: alpha_p and alpha_n before their softplus, beta, and eps, the upper limit of the argument of expm1.
    """
    y = x.astype(jnp.float32)
    alpha_p, alpha_n, beta, eps = numbers.astype(jnp.float32)
    rising = jax.nn.softplus(alpha_p) * y * y
    falling = (jnp.expm1(jnp.minimum(y, eps)) - y) * (beta + jax.nn.softplus(alpha_n))
    return (jnp.where(y > 0, rising, falling) + beta * y).astype(x.dtype)


def takes_gated_dot(spec: DecoderSpec, layout: WeightLayout, leaves: Container[str]) -> bool:
    """True if a layer with these leaves can fuse gate, up and activation into one `gated_dot`, with dense weights.

    False with biases, separate or transposed matrices, a clamp, a factor of the gate, gates that are cut off, or no
    gate.
    """
    one_matrix = "gate_up" in leaves and not layout.split_gate_up and "gate_up" not in layout.transposed
    is_plain = spec.swiglu_limit is None and spec.gate_scale == 1 and not any(spec.activation_sparsity)
    return one_matrix and spec.gated and is_plain and "up_bias" not in leaves


def normalise_heads(
    x: Float[Array, "tokens heads dim"], weight: Float[Array, " dim"] | None, context: LayerContext
) -> Float[Array, "tokens heads dim"]:
    """RMS norm of each head, or of each group of a token's numbers. weight: None = 1.

    When serving, heads are rows of a kernel. XLA's norm on CPU has other bits with other numbers of tokens and heads.
    """
    gain, eps = jnp.ones(x.shape[2], x.dtype) if weight is None else weight, context.spec.norm_eps
    rows = context.num_rows
    if rows is None:
        return rms_norm(x, gain, eps)
    return rms_norm_rows(x.reshape(-1, x.shape[2]), gain, eps, rows * x.shape[1]).reshape(x.shape)


def feed_forward(x: Float[Array, "tokens hidden"], context: LayerContext) -> Float[Array, "tokens hidden"]:
    spec = context.spec
    if not spec.gated:
        hidden = linear_with_bias("up", x, context)
        if spec.activation is Activation.XIELU:
            hidden = xielu(hidden, context.params["xielu"])
        else:
            hidden = activate(spec.activation.value, hidden)
        return linear_with_bias("down", hidden, context)
    if context.num_rows is not None and takes_gated_dot(spec, context.layout, context.params):
        return linear_with_bias("down", _served_gate(x, context, context.num_rows), context)
    if context.layout.split_gate_up:
        gated, up = linear("gate", x, context), linear("up", x, context)
    else:
        gated, up = gate_and_up("gate_up", x, context)
    bias = context.params.get("up_bias")
    if bias is not None:
        gated, up = add(gated, bias[0]), add(up, bias[1])
    if any(spec.activation_sparsity):
        gated = largest_gates(gated, spec.activation_sparsity[0], context.shards)
    return linear_with_bias("down", gate(spec, gated, up), context)


def largest_gates(
    gated: Float[Array, "tokens inter"], share: float, shards: Shards = WHOLE
) -> Float[Array, "tokens inter"]:
    """Each token's gates above the quantile `share` of a normal distribution with their mean and deviation, less it.

    The others become 0 (Gemma 3n). Mean and deviation are of the gates of all devices.
    """
    x = gated.astype(jnp.float32)

    def mean_of(x: Array) -> Array:
        own = row_mean(x)
        return lax.pmean(own, TENSOR) if shards.count > 1 else own

    mean = mean_of(x)
    deviation = jnp.sqrt(mean_of(jnp.square(x - mean)))
    return jax.nn.relu(x - mean - deviation * NormalDist().inv_cdf(share)).astype(gated.dtype)


def _served_gate(
    x: Float[Array, "tokens hidden"], context: LayerContext, num_rows: Array
) -> Float[Array, "tokens inter"]:
    """Input of the down projection when serving. num_rows: number of needed rows."""
    weight, activation = context.params["gate_up"], context.spec.activation
    if not is_quantized(weight) and not has_adapters("gate_up", context.adapters):
        return gated_dot(x, weight, num_rows, activation=activation.value, implementation=context.gated_dot)
    if activation is Activation.SILU:
        return silu_and_mul(linear("gate_up", x, context), num_rows)
    return gate(context.spec, *gate_and_up("gate_up", x, context))


def expanded(spec: DecoderSpec, both: Float[Array, "*lead outputs"]) -> Float[Array, "*lead inter"]:
    """Input of an expert's down projection. both: gate and up side by side; only up in networks without a gate."""
    if not spec.gated:
        return activate(spec.activation.value, both)
    half = both.shape[-1] // 2
    return gate(spec, both[..., :half], both[..., half:])


def gate_and_up(
    name: str, x: Float[Array, "tokens hidden"], context: LayerContext
) -> tuple[Float[Array, "tokens inter"], Float[Array, "tokens inter"]]:
    """Gate and up projections in one matmul with the leaf `name` [2, inter, hidden]."""
    both = linear(name, x, context)
    width = both.shape[1] // 2
    return both[:, :width], both[:, width:]


def row_sum(x: Float[Array, "*lead width"]) -> Float[Array, "*lead"]:
    """Sum over the last axis by halving it. Unlike in XLA's sum, the bits do not depend on the number of rows."""
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        rest = x[..., half:]
        x = x[..., :half] + jnp.pad(rest, [(0, 0)] * (x.ndim - 1) + [(0, half - rest.shape[-1])])
    return x[..., 0]


def row_mean(x: Float[Array, "*lead width"]) -> Float[Array, "*lead one"]:
    """Mean over the last axis. On CPU, its bits do not depend on the number of rows."""
    width = x.shape[-1]
    return lax.platform_dependent(
        x, cpu=lambda x: row_sum(x)[..., None] / width, default=lambda x: jnp.mean(x, -1, keepdims=True)
    )
