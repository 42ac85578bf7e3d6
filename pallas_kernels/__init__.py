"""Kernels for inference with a paged KV cache, for any JAX program. The package knows nothing of the engine.

- `KVPages` owns the layout of the pages.
- `write_kv` and `write_qkv` store keys and values in the pages; `paged_attention` attends over them.
- `finish_qkv` is `write_qkv` without the store: it returns k and v.
- `dot` multiplies rows by a weight matrix, with a native kernel on CPU.
- `partial_dots` is `dot` with a sum for each part of the inputs. `add_norm` adds such sums to the residual stream, and
  applies the next norm.
- `quantized_dot` multiplies rows by a `QuantizedWeight`: weights in 8 or 4 bits, made by `quantize`.
- `gated_dot` is the gate and up projections of a feed-forward network, with the activation.
- `grouped_dot` multiplies blocks of rows, each by its own matrix: the matmuls of a mixture of experts.
- `grouped_lora` adds each row's own low-rank adapter to the result of a matmul; `lora_expand` is its second half.
- `lora_dot` is `dot` and `grouped_lora` in one native kernel on CPU.
- `quantized_grouped_dot` is `grouped_dot` with quantised matrices.
- `gated_delta`, `mamba2` and `causal_conv` are layers that keep a state of fixed size for each row.
- `self_check` compares the implementations chosen for a device with the reference.
- `rms_norm_rows`, `silu_and_mul`, `argmax_rows` and `gather_rows` work on single rows, with native kernels on CPU.
- `rms_norm`, `apply_rope` and `norm_and_rope` are the arithmetic of `write_qkv` in plain jnp.
"""

from pallas_kernels.add_norm import add_norm
from pallas_kernels.causal_conv import causal_conv
from pallas_kernels.dot import dot, partial_dots
from pallas_kernels.gated_delta import gated_delta
from pallas_kernels.gated_dot import gated_dot
from pallas_kernels.gated_dot.activation import activate
from pallas_kernels.grouped_dot import grouped_dot
from pallas_kernels.grouped_lora import grouped_lora, lora_dot, lora_expand
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.mamba2 import mamba2
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.quantized_dot import QuantizedWeight, quantize, quantized_dot
from pallas_kernels.quantized_grouped_dot import quantized_grouped_dot
from pallas_kernels.row_ops import argmax_rows, gather_rows, rms_norm_rows, silu_and_mul
from pallas_kernels.self_check import KernelCheckError, self_check
from pallas_kernels.write_kv import write_kv
from pallas_kernels.write_qkv import finish_qkv, write_qkv
from pallas_kernels.write_qkv.reference import apply_rope, norm_and_rope, rms_norm

__all__ = [
    "KVPages",
    "KernelCheckError",
    "QuantizedWeight",
    "activate",
    "add_norm",
    "apply_rope",
    "argmax_rows",
    "causal_conv",
    "dot",
    "finish_qkv",
    "gated_delta",
    "gated_dot",
    "gather_rows",
    "grouped_dot",
    "grouped_lora",
    "lora_dot",
    "lora_expand",
    "mamba2",
    "norm_and_rope",
    "paged_attention",
    "partial_dots",
    "quantize",
    "quantized_dot",
    "quantized_grouped_dot",
    "rms_norm",
    "rms_norm_rows",
    "self_check",
    "silu_and_mul",
    "write_kv",
    "write_qkv",
]
