"""RMS norm and rotary embedding in plain jnp: the specification of write_qkv's arithmetic."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*lead width"], weight: Float[Array, " width"], eps: float) -> Float[Array, "*lead width"]:
    """RMS norm (arXiv:1910.07467): x / rms(x) * weight. The mean is in float32, the result in x's dtype."""
    y = x.astype(jnp.float32)
    y *= lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return y.astype(x.dtype) * weight.astype(x.dtype)


def apply_rope(
    x: Float[Array, "tokens heads head_dim"], cos: Float[Array, "tokens half"], sin: Float[Array, "tokens half"]
) -> Float[Array, "tokens heads head_dim"]:
    """Rotary embedding (arXiv:2104.09864) in the rotate-half form: dimension i is paired with i + half.

    Dimensions from 2 * half on are not rotated (partial rotary embedding).
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    y = x.astype(jnp.float32)
    a, b = y[..., :half], y[..., half : 2 * half]
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin, y[..., 2 * half :]], axis=-1)
    return rotated.astype(x.dtype)


def norm_and_rope(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    *,
    cos: Float[Array, "tokens half"] | None,
    sin: Float[Array, "tokens half"] | None,
    q_norm: Float[Array, " head_dim"] | None,
    k_norm: Float[Array, " head_dim"] | None,
    norm_eps: float,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens kv_heads head_dim"]]:
    """q and k after RMS norm and rotary embedding. A step is skipped if its arguments are None."""
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, norm_eps), rms_norm(k, k_norm, norm_eps)
    if cos is not None and sin is not None:
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    return q, k
