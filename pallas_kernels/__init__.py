"""Attention over a paged KV cache, for anyone with JAX. Knows nothing of the engine that uses it.

`paged_attention` reads pages, `write_kv` and `write_qkv` fill them, `KVPages` owns their layout, `self_check` compares
what was chosen for a device with the specification. `grouped_dot` multiplies rows with the matrix of their group.
"""

from pallas_kernels.grouped_dot import grouped_dot
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.self_check import KernelCheckError, self_check
from pallas_kernels.write_kv import write_kv
from pallas_kernels.write_qkv import write_qkv

__all__ = ["KVPages", "KernelCheckError", "grouped_dot", "paged_attention", "self_check", "write_kv", "write_qkv"]
