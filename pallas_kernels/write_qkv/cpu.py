"""write_qkv for CPUs: the kernel of `cpu_kernel.py`."""

from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import FLOATS, KVPages
from pallas_kernels.write_kv.cpu import call_kernel, kernel
from pallas_kernels.write_qkv import xla


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
) -> tuple[Float[Array, "tokens q_heads head_dim"], KVPages]:
    """See `pallas_kernels.write_qkv`. 8-bit pages, or no kernel: XLA operations. Queries of padding tokens are zero."""
    name = kernel().name
    arrays = (pages, qkv, slot_mapping, bias, cos, sin, q_norm, k_norm)
    if name is None or pages.dtype not in FLOATS:
        return xla.write_qkv(*arrays, norm_eps=norm_eps, write=KVPages.scatter)
    return call_kernel(name, *arrays, norm_eps=norm_eps)
