"""Kimi Delta Attention (arXiv:2510.26692; Kimi Linear): gated DeltaNet with a decay for each channel of a key.

Decays and output gates have matrices of low rank. The norm of the output has a sigmoid gate, not SiLU.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jpaged.models.layers import rms_of_groups
from jpaged.models.linear import LayerContext, linear, linear_with_bias
from jpaged.models.recurrent_spec import KimiDelta


def kimi_inputs(
    delta: KimiDelta, x: Float[Array, "tokens hidden"], context: LayerContext
) -> tuple[tuple[Array, ...], Float[Array, "tokens heads head_dim"]]:
    """`recurrent.token_inputs`: input of the convolution, decays and beta; gates."""
    params, tokens, head_dim = context.params, x.shape[0], delta.head_dim
    mixed = linear("delta_qkv", x, context)
    compressed = linear("delta_low", x, context)
    forget = linear("delta_forget", compressed[:, :head_dim], context, dtype=jnp.float32)
    gate = linear("delta_gate", compressed[:, head_dim:], context).reshape(tokens, -1, head_dim)
    # these three are whole on every device: a device's part would be too small for whole tiles
    beta = jax.nn.sigmoid(linear("delta_beta", x, context, dtype=jnp.float32))
    rate, bias = -jnp.exp(params["delta_a_log"]), params["delta_dt_bias"]
    if context.shards.count > 1:
        heads = gate.shape[1]
        first = context.shards.first(heads)
        beta = lax.dynamic_slice_in_dim(beta, first, heads, axis=1)
        rate, bias = (lax.dynamic_slice_in_dim(each, first, heads, axis=0) for each in (rate, bias))
    decay = rate[:, None] * jax.nn.softplus(forget.reshape(gate.shape) + bias)
    return (mixed, decay, beta), gate


def kimi_output(
    mixed: Float[Array, "tokens heads head_dim"], gate: Float[Array, "tokens heads head_dim"], context: LayerContext
) -> Float[Array, "tokens hidden"]:
    """Norm over each head, gate, and the output matrix. Norm and gate are in float32."""
    weight = context.params["delta_norm"].astype(jnp.float32)
    y = rms_of_groups(mixed.astype(jnp.float32), weight, context) * jax.nn.sigmoid(gate.astype(jnp.float32))
    return linear_with_bias("delta_o", y.astype(mixed.dtype).reshape(mixed.shape[0], -1), context)
