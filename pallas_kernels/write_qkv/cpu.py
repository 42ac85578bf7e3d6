"""write_qkv for CPUs: the kernel of `cpu_kernel.py`."""

from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import FLOATS, KVPages
from pallas_kernels.raw_qkv import RawQKV
from pallas_kernels.write_kv.cpu import call_kernel, kernel
from pallas_kernels.write_qkv import xla


def write_qkv(
    pages: KVPages, raw: RawQKV, slot_mapping: Int[Array, " tokens"]
) -> tuple[Float[Array, "tokens q_heads head_dim"], KVPages]:
    """See `pallas_kernels.write_qkv`. 8-bit pages, or no kernel: XLA operations. Queries of padding tokens are zero."""
    name = kernel().name
    if name is None or pages.dtype not in FLOATS:
        return xla.write_qkv(pages, raw, slot_mapping, write=KVPages.scatter)
    return call_kernel(name, pages, raw, slot_mapping)
