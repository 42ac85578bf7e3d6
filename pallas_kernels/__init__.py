"""Attention over a paged KV cache, for anyone with JAX. Knows nothing of the engine that uses it.

`paged_attention` reads pages, `write_kv` fills them, `KVPages` owns their layout.
"""

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.write_kv import write_kv

__all__ = ["KVPages", "paged_attention", "write_kv"]
