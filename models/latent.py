"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): the KV cache holds one small vector per token.

Keys and values of all heads are linear functions of this latent vector. Instead of computing them, this code transforms
the queries into the latent space ("absorbed", section 2.1.2 of the paper). Attention then has one KV head. Its key is
the latent vector followed by the rotated part, and its value is the latent vector.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jpaged.models.indexer import IndexQueries, index_queries_and_keys
from jpaged.models.linear import LayerContext, linear, linear_per_head, linear_with_bias
from jpaged.models.spec import Latent
from pallas_kernels import apply_rope, rms_norm

_EPS = 1e-6  # epsilon of the latent vectors' norms; the config's value is for all other norms


def latent_queries_and_keys(
    latent: Latent, x: Float[Array, "tokens hidden"], context: LayerContext
) -> tuple[Float[Array, "tokens heads width"], Float[Array, "tokens 1 width"], IndexQueries | None]:
    """Queries of every head, and one vector per token: [latent vector, rotated part, key of the indexer].

    Queries are zero where the vector has the indexer's key, and so is the vector itself in a layer that takes its
    tokens from the layer before. Without rope angles nothing is rotated. The third result is None in a layer without an
    indexer.
    """
    tokens = x.shape[0]
    source = x
    if latent.q_rank is not None:
        compressed = linear_with_bias("q_a", x, context)
        source = rms_norm(compressed, context.params["q_a_norm"], _EPS)
    heads = context.params["q_b"].shape[0]
    q = linear("q_b", source, context).reshape(tokens, heads, -1)
    kv = linear_with_bias("kv_a", x, context)
    key = rms_norm(kv[:, : latent.kv_rank], context.params["kv_a_norm"], _EPS)
    rotated_q, rotated_k = q[..., latent.nope_dim :], kv[:, None, latent.kv_rank :]
    if context.cos is not None and context.sin is not None:
        rotated_q, rotated_k = (
            apply_rope(_halves(latent, x), context.cos, context.sin) for x in (rotated_q, rotated_k)
        )
    absorbed = linear_per_head(
        "kv_b", q[..., : latent.nope_dim], context, part=slice(latent.nope_dim), transposed=True
    )
    q = jnp.concatenate([absorbed, rotated_q], -1)
    if context.query_factors is not None:
        q = (q.astype(jnp.float32) * context.query_factors[:, None, None]).astype(q.dtype)
    vector = jnp.concatenate([key[:, None], rotated_k], -1)
    if latent.indexer is None:
        return q, vector, None
    padding = ((0, 0), (0, 0), (0, latent.indexer.head_dim))
    if "index_q" not in context.params:
        return jnp.pad(q, padding), jnp.pad(vector, padding), None
    index, index_key = index_queries_and_keys(latent.indexer, x, source, context)
    return jnp.pad(q, padding), jnp.concatenate([vector, index_key], -1), index


def latent_values(
    latent: Latent, out: Float[Array, "tokens heads kv_rank"], context: LayerContext
) -> Float[Array, "tokens heads v_dim"]:
    """Each head's output, from attention's output in the latent space."""
    return linear_per_head("kv_b", out, context, part=slice(latent.nope_dim, None), transposed=False)


def _halves(latent: Latent, x: Float[Array, "tokens heads rope"]) -> Float[Array, "tokens heads rope"]:
    """Reorder interleaved pairs for rotate-half. The same order for queries and keys keeps q.k the same."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], -1) if latent.interleaved else x
