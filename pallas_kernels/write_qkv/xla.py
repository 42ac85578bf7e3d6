"""write_qkv on every platform: the reference arithmetic in XLA operations, then an implementation of write_kv."""

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.write_qkv.reference import norm_and_rope


def write_qkv(
    pages: KVPages,
    qkv: Float[Array, "tokens kv_heads q_per_kv_plus_2 head_dim"],
    slot_mapping: Int[Array, " tokens"],
    bias: Float[Array, "kv_heads q_per_kv_plus_2 head_dim"] | None,
    cos: Float[Array, "tokens half"] | None,
    sin: Float[Array, "tokens half"] | None,
    q_norm: Float[Array, " head_dim"] | None,
    k_norm: Float[Array, " head_dim"] | None,
    *,
    norm_eps: float,
    write: Callable[..., KVPages],
) -> tuple[Float[Array, "tokens q_heads head_dim"], KVPages]:
    """See `pallas_kernels.write_qkv`. write: an implementation of write_kv."""
    q, k, v = finish(qkv, bias, cos, sin, q_norm, k_norm, norm_eps=norm_eps)
    return q, write(pages, k, v, slot_mapping)


def finish(
    qkv: Float[Array, "tokens kv_heads q_per_kv_plus_2 head_dim"],
    bias: Float[Array, "kv_heads q_per_kv_plus_2 head_dim"] | None,
    cos: Float[Array, "tokens half"] | None,
    sin: Float[Array, "tokens half"] | None,
    q_norm: Float[Array, " head_dim"] | None,
    k_norm: Float[Array, " head_dim"] | None,
    *,
    norm_eps: float,
) -> tuple[
    Float[Array, "tokens q_heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
]:
    """q, k and v. See `pallas_kernels.finish_qkv`."""
    if bias is not None:
        qkv = (qkv + bias).astype(qkv.dtype)
    tokens, _, _, head_dim = qkv.shape
    q = qkv[:, :, :-2].reshape(tokens, -1, head_dim)
    q, k = norm_and_rope(q, qkv[:, :, -2], cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm, norm_eps=norm_eps)
    return q, k, qkv[:, :, -1]
