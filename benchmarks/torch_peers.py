"""Attention of other engines through torch, for the table of kernels.py. Each runs in a CUDA graph, as ours does.

- torch's scaled_dot_product_attention over contiguous KV. The mask of a chunk at the end of its context is
  `causal_lower_right`, which flash kernels take without a dense mask.
- vLLM's Triton unified attention over pages, from a copy that the user names: triton_unified_attention.py of vLLM 0.9
  and later. Without vLLM, stand-ins replace the few names that the file imports from it.
"""

import importlib
import importlib.util
import inspect
import pathlib
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np

SEGMENTS = 16      # vLLM splits a row of a small batch of decodes into this many segments
SMALL_GRID = 128   # a batch of decodes with at most 128 programs is small


def graph_seconds(call: Callable[[], Any], calls: int, repeats: int) -> list[float]:
    """Seconds per attention call, for each repeat. `call` makes `calls` of them, in one CUDA graph."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # kernels are compiled and chosen before the capture
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls)
    return times[1:]


def sdpa_seconds(
    rows: int, chunk: int, longest: int, heads: int, kv_heads: int, head_dim: int, layers: int, repeats: int
) -> list[float]:
    """Seconds of scaled_dot_product_attention: `rows` rows of equal length, their last `chunk` tokens as queries."""
    import torch
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    size = (2, rows, kv_heads, longest, head_dim)
    kv = [torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    q = torch.randn(rows, heads, chunk, head_dim, dtype=torch.bfloat16, device="cuda")
    mask = causal_lower_right(chunk, longest) if chunk > 1 else None

    def call() -> None:
        x = q
        for k, v in kv:
            x = scaled_dot_product_attention(x, k, v, attn_mask=mask, enable_gqa=True)

    return graph_seconds(call, layers, repeats)


def load_unified_attention(file: pathlib.Path) -> Callable[..., Any]:
    """The function `unified_attention` of the user's copy."""
    for name, module in ({} if importlib.util.find_spec("vllm") else _stand_ins()).items():
        sys.modules.setdefault(name, module)
    spec = importlib.util.spec_from_file_location("users_unified_attention", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.unified_attention


def _stand_ins() -> dict[str, types.ModuleType]:
    """Modules with the names that the file imports from vLLM."""
    import logging

    import torch

    triton = importlib.import_module("triton")
    platform = types.SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn, is_rocm=lambda: False, is_xpu=lambda: False, is_cuda=lambda: True,
        is_cuda_alike=lambda: True, is_device_capability=lambda *_: False, has_device_capability=lambda *_: True,
    )  # fmt: skip
    names = {
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": importlib.import_module("triton.language")},
        "vllm.model_executor.layers.batch_invariant": {"vllm_is_batch_invariant": lambda: False},
    }
    modules = {}
    for name, values in names.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        modules[name] = module
    for name in list(modules):  # and their packages
        parts = name.split(".")
        for end in range(1, len(parts)):
            modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    return modules


def unified_seconds(
    file: pathlib.Path, counts: np.ndarray, lens: np.ndarray, tables: np.ndarray, *, heads: int, kv_heads: int,
    head_dim: int, block_size: int, layers: int, repeats: int,
) -> list[float]:  # fmt: skip
    """Seconds of vLLM's unified attention. counts, lens: int32[rows], tokens and keys. tables: int32[rows, width]."""
    import torch

    attend = load_unified_attention(file)
    put = lambda array: torch.from_numpy(np.ascontiguousarray(array)).cuda()  # noqa: E731
    rows, blocks = len(lens), int(tables.max()) + 1
    size = (2, blocks, block_size, kv_heads, head_dim)
    kv = [torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    q = torch.randn(int(counts.sum()), heads, head_dim, dtype=torch.bfloat16, device="cuda")
    out, one = torch.empty_like(q), torch.ones(rows, kv_heads, device="cuda")
    starts = put(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
    options: dict[str, Any] = {
        "cu_seqlens_q": starts, "max_seqlen_q": int(counts.max()), "seqused_k": put(lens),
        "max_seqlen_k": int(lens.max()), "softmax_scale": head_dim**-0.5, "causal": True, "window_size": (-1, -1),
        "block_table": put(tables), "softcap": 0, "q_descale": None, "k_descale": one, "v_descale": one,
    }  # fmt: skip
    if "seq_threshold_3D" in inspect.signature(attend).parameters:  # newer copies need the buffers of a split decode
        most = SMALL_GRID // kv_heads
        parts = torch.empty(most, heads, SEGMENTS, 1 << (head_dim - 1).bit_length(), device="cuda")
        options |= {
            "seq_threshold_3D": most, "num_par_softmax_segments": SEGMENTS, "softmax_segm_output": parts,
            "softmax_segm_max": torch.empty(most, heads, SEGMENTS, device="cuda"),
            "softmax_segm_expsum": torch.empty(most, heads, SEGMENTS, device="cuda"),
        }  # fmt: skip

    def call() -> None:
        for k, v in kv:
            attend(q=q, k=k, v=v, out=out, **options)

    return graph_seconds(call, layers, repeats)

