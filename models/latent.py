"""Multi-head latent attention: keys and values of all heads are made from one small vector a token, and only that is
kept (DeepSeek-V2, arXiv:2405.04434).

Queries are brought into the latent space instead of keys and values out of it ("absorbed", section 2.1.2): attention
then has one KV head, whose keys are the latent vector and the rotated part, and whose values are the latent vector.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jpaged.models.layers import Params, add, product
from jpaged.models.spec import Latent
from pallas_kernels.write_qkv.reference import rms_norm, rotate

_EPS = 1e-6  # of the norms of latent vectors, whatever the config says of the others


def latent_queries_and_keys(
    latent: Latent, matrices: Params, vectors: Params, x: Float[Array, "tokens hidden"],
    cos: Float[Array, "tokens half"], sin: Float[Array, "tokens half"],
) -> tuple[Float[Array, "tokens heads latent"], Float[Array, "tokens 1 latent"]]:  # fmt: skip
    """Queries of every head and the one key of a token, [latent vector, rotated part]."""
    tokens = x.shape[0]
    source = x
    if latent.q_rank is not None:
        compressed = add(product(x, matrices["q_a"]), vectors.get("q_a_bias"))
        source = rms_norm(compressed, vectors["q_a_norm"], _EPS)
    q_b = matrices["q_b"]
    q = product(source, q_b.reshape(-1, q_b.shape[-1])).reshape(tokens, *q_b.shape[:2])
    kv = add(product(x, matrices["kv_a"]), vectors.get("kv_a_bias"))
    key = rms_norm(kv[:, : latent.kv_rank], vectors["kv_a_norm"], _EPS)
    turned_q = rotate(_halves(latent, q[..., latent.nope_dim :]), cos, sin)
    turned_k = rotate(_halves(latent, kv[:, None, latent.kv_rank :]), cos, sin)
    absorbed = _per_head(q[..., : latent.nope_dim], matrices["kv_b"][:, : latent.nope_dim], contract=1)
    return jnp.concatenate([absorbed, turned_q], -1), jnp.concatenate([key[:, None], turned_k], -1)


def latent_values(
    latent: Latent, matrices: Params, out: Float[Array, "tokens heads kv_rank"]
) -> Float[Array, "tokens heads v_dim"]:
    """What attention gives in the latent space -> every head's values."""
    return _per_head(out, matrices["kv_b"][:, latent.nope_dim :], contract=2)


def _halves(latent: Latent, x: Float[Array, "tokens heads rope"]) -> Float[Array, "tokens heads rope"]:
    """Neighbours that are turned together -> the rotate-half form; q.k does not mind the order of its terms."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], -1) if latent.interleaved else x


def _per_head(
    x: Float[Array, "tokens heads in"], weight: Float[Array, "heads a b"], contract: int
) -> Float[Array, "tokens heads out"]:
    """A product of every head with its own matrix."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def direct(x: Array, weight: Array) -> Array:
        return lax.dot_general(x, weight, (((2,), (contract,)), ((1,), (0,))), precision=exact)

    def by_rows(x: Array, weight: Array) -> Array:
        turned = lax.optimization_barrier(weight.swapaxes(1, 2))
        return lax.dot_general(x, turned, (((2,), (2,)), ((1,), (0,))), precision=exact)

    if contract == 2:
        out = direct(x, weight)
    else:  # XLA's CPU products with [in, out] matrices have other bits from 64 rows on
        out = lax.platform_dependent(x, weight, cpu=by_rows, default=direct)
    return out.swapaxes(0, 1)
