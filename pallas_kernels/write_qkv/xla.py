"""write_qkv on every platform: the reference arithmetic in XLA operations, then an implementation of write_kv."""

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.raw_qkv import RawQKV
from pallas_kernels.write_qkv.reference import norm_and_rope


def write_qkv(
    pages: KVPages, raw: RawQKV, slot_mapping: Int[Array, " tokens"], *, write: Callable[..., KVPages]
) -> tuple[Float[Array, "tokens q_heads head_dim"], KVPages]:
    """See `pallas_kernels.write_qkv`. write: an implementation of write_kv."""
    q, k, v = finish(raw)
    return q, write(pages, k, v, slot_mapping)


def finish(
    raw: RawQKV,
) -> tuple[
    Float[Array, "tokens q_heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
]:
    """q, k and v. See `pallas_kernels.finish_qkv`."""
    qkv = raw.qkv if raw.bias is None else (raw.qkv + raw.bias).astype(raw.qkv.dtype)
    tokens, _, _, head_dim = qkv.shape
    q, k = norm_and_rope(
        qkv[:, :, :-2].reshape(tokens, -1, head_dim), qkv[:, :, -2],
        cos=raw.cos, sin=raw.sin, q_norm=raw.q_norm, k_norm=raw.k_norm, norm_eps=raw.norm_eps,
    )  # fmt: skip
    return q, k, qkv[:, :, -1]
