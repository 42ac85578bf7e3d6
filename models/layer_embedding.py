"""Per-layer embeddings (Gemma 3n, Gemma 4): `spec.LayerEmbedding` describes them."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jpaged.models.layers import normalise, normalise_heads
from jpaged.models.linear import LayerContext, linear, take_rows
from jpaged.models.spec import LayerEmbedding
from pallas_kernels import activate


def embed_for_layers(
    embedding: LayerEmbedding, x: Float[Array, "tokens hidden"], token_ids: Int[Array, " tokens"],
    context: LayerContext,
) -> Float[Array, "tokens layers size"]:  # fmt: skip
    """Vectors of all layers. x: input of the first layer. context: with the model's whole tree.

    The embedding is multiplied by sqrt(size). The projection is divided by sqrt(hidden) and normalised. The sum of both
    is divided by sqrt(2), so that it keeps their variance.
    """
    shape = (x.shape[0], -1, embedding.size)
    known = jnp.where(token_ids < embedding.vocab_size, token_ids, 0)  # as in Transformers
    of_token = take_rows("layer_embed", known, context).reshape(shape)
    of_token *= jnp.asarray(math.sqrt(embedding.size), of_token.dtype)
    projected = (linear("layer_embed_in", x, context) * context.spec.hidden_size**-0.5).reshape(shape)
    projected = normalise_heads(projected, context.params["layer_embed_norm"], context)
    return (projected + of_token) * 2**-0.5


def gated_layer_input(
    x: Float[Array, "tokens hidden"], layer_input: Float[Array, "tokens size"], context: LayerContext
) -> Float[Array, "tokens hidden"]:
    """The layer's vectors, gated by x, projected to the hidden size, and normalised."""
    gate = activate(context.spec.activation.value, linear("layer_in", x, context))
    return normalise("layer_out_norm", linear("layer_out", gate * layer_input, context), context)
