"""AltUp and LAuReL (Gemma 3n): several streams of hidden states, and a low-rank matrix next to attention.

1. `spread` makes the streams from the embedding, by a matrix each.
2. Before a layer, `predict` mixes the streams. The active one passes through the layer.
3. After it, `correct` changes all streams by how far the active one is from its prediction.
4. `merge` is the mean of the streams, after a matrix each. Streams made by a matrix get the active one's magnitude.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jpaged.models.layers import normalise, row_mean, row_sum
from jpaged.models.linear import LayerContext, linear
from jpaged.models.spec import AltUp

LEAST = 1e-5  # smallest mean square that a stream is divided by


def spread(
    altup: AltUp, x: Float[Array, "tokens hidden"], context: LayerContext
) -> Float[Array, "streams tokens hidden"]:
    """The streams of an embedding. context: with the model's whole tree."""
    others = [linear(f"altup_in_{i}", x, context) for i in range(altup.streams - 1)]
    return jnp.stack([x, *(_with_magnitude(other, x) for other in others)])


def merge(
    altup: AltUp, x: Float[Array, "streams tokens hidden"], context: LayerContext
) -> Float[Array, "tokens hidden"]:
    """The hidden state before the final norm. context: with the model's whole tree."""
    others = [linear(f"altup_out_{i}", x[i + 1], context) for i in range(altup.streams - 1)]
    total = x[0].astype(jnp.float32)
    for other in others:
        total += _with_magnitude(other, x[0]).astype(jnp.float32)
    return (total / altup.streams).astype(x.dtype)


def predict(
    altup: AltUp, x: Float[Array, "streams tokens hidden"], context: LayerContext
) -> Float[Array, "streams tokens hidden"]:
    """The streams, plus mixtures of them with weights that depend on the active stream."""
    weights = context.params["altup_predict"]  # [of the result, of the input, modality]
    modalities = _modalities(x[altup.active], context)
    mixture = row_sum(modalities[:, None, None] * weights.astype(jnp.float32)).astype(x.dtype).astype(jnp.float32)
    wide = x.astype(jnp.float32)
    mixed = [sum(mixture[:, out, i, None] * wide[i] for i in range(altup.streams)) for out in range(altup.streams)]
    return jnp.stack(mixed).astype(x.dtype) + x


def correct(
    altup: AltUp, predictions: Float[Array, "streams tokens hidden"], out: Float[Array, "tokens hidden"],
    context: LayerContext,
) -> Float[Array, "streams tokens hidden"]:  # fmt: skip
    """The streams after a layer. out: its output for the active stream."""
    weights = context.params["altup_correct"].astype(jnp.float32)  # [stream, modality]
    factors = row_sum(_modalities(out, context)[:, None] * weights).astype(out.dtype) + 1  # [tokens, streams]
    return predictions + (out - predictions[altup.active]) * factors.T[:, :, None]


def with_laurel(
    attended: Float[Array, "tokens hidden"], normed: Float[Array, "tokens hidden"], context: LayerContext
) -> Float[Array, "tokens hidden"]:
    """The residual sum after attention, plus the low-rank path from attention's input, divided by sqrt(2)."""
    low_rank = linear("laurel_right", linear("laurel_left", normed, context), context)
    return (attended + normed + normalise("laurel_norm", low_rank, context)) / jnp.asarray(2**0.5, attended.dtype)


def _modalities(x: Float[Array, "tokens hidden"], context: LayerContext) -> Float[Array, "tokens streams"]:
    """float32 numbers from -1 to 1 that the weights of the streams are made from."""
    routed = linear("altup_router", normalise("altup_router_norm", x, context) / x.shape[1], context)
    return jnp.tanh(routed.astype(jnp.float32)).astype(x.dtype).astype(jnp.float32)


def _with_magnitude(
    x: Float[Array, "tokens hidden"], of: Float[Array, "tokens hidden"]
) -> Float[Array, "tokens hidden"]:
    """x, scaled to the root mean square of another stream."""
    own, wanted = (row_mean(jnp.square(a.astype(jnp.float32))) for a in (x, of))
    return (x.astype(jnp.float32) * jnp.sqrt(wanted / jnp.maximum(own, LEAST))).astype(x.dtype)
