"""Bytes of parameter trees, by purpose."""

import math
from typing import Any

import jax

from jpaged.models.sharding import local_shape
from jpaged.models.spec import Params
from pallas_kernels import QuantizedWeight


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays (or ShapeDtypeStructs) in a tree, on one device."""
    return sum(math.prod(local_shape(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


_PARTS = {
    "embedding": ("embed", "pos_embed", "type_embed", "project_in"),
    "output matrix": ("lm_head", "lm_head_bias", "project_out", "score", "score_bias", "head", "head_bias"),
    "attention": (
        "qkv", "qkv_bias", "o", "o_bias", "q_a", "q_a_bias", "q_b", "kv_a", "kv_a_bias", "kv_b", "sinks", "output_gate",
        "kv", "o_a", "entry_kv", "entry_gate", "entry_bias",
    ),
    "indexers": ("index_q", "index_k", "index_weights", "index_kv", "index_gate", "index_bias"),
    "gated DeltaNet": (),  # by prefix of the name
    "Mamba-2": (),  # by prefix of the name
    "short convolutions": ("conv_in", "conv_in_bias", "conv_kernel", "conv_kernel_bias", "conv_out", "conv_out_bias"),
    "feed-forward": ("gate_up", "up", "down", "up_bias", "down_bias", "xielu", "layer_scalar"),
    "per-layer embeddings": ("layer_embed", "layer_embed_in", "layer_in", "layer_out"),
    "hyper-connections": (),
    "AltUp and LAuReL": (),  # by prefix of the name: see `_part_of`
    "experts": (),  # by prefix of the name, with routers and shared experts: see `_part_of`
    "norms": (),  # every name that contains "norm"
}


def weight_parts(params: Params) -> dict[str, int]:
    """Bytes of a parameter tree (arrays or ShapeDtypeStructs) by part, without empty parts."""
    return {part: sum(kinds.values()) for part, kinds in weight_kinds(params).items()}


def weight_kinds(params: Params) -> dict[str, dict[str, int]]:
    """Bytes of a parameter tree by part, then by kind, without empty parts.

    A kind is a dtype. Quantised weights have two: the kind of their codes, and "scales" for scales and zero points.
    """
    sizes: dict[str, dict[str, int]] = {part: {} for part in _PARTS}
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))
    for path, leaf in leaves:
        name = next(key.key for key in reversed(path) if isinstance(key, jax.tree_util.DictKey))
        kinds, size = sizes[_part_of(name)], tree_bytes(leaf)
        codes, kind = 0, leaf.dtype.name
        if isinstance(leaf, QuantizedWeight):
            codes, kind = tree_bytes(leaf.codes), "scales"
            kinds[leaf.kind] = kinds.get(leaf.kind, 0) + codes
        if size > codes:
            kinds[kind] = kinds.get(kind, 0) + size - codes
    return {part: kinds for part, kinds in sizes.items() if kinds}


def _part_of(name: str) -> str:
    """Part that a leaf of `param_shapes` belongs to. q, k, v and gate, up may be fused or separate."""
    if "norm" in name:
        return "norms"
    if name.startswith(("expert_", "router", "shared_", "latent_")):
        return "experts"
    kinds = {
        "delta": "gated DeltaNet", "mamba": "Mamba-2", "altup": "AltUp and LAuReL", "laurel": "AltUp and LAuReL",
        "hc": "hyper-connections",
    }  # fmt: skip
    if (kind := kinds.get(name.split("_")[0])) is not None:
        return kind
    apart = {"q": "attention", "k": "attention", "v": "attention", "gate": "feed-forward"}
    part = apart.get(name) or next((part for part, names in _PARTS.items() if name in names), None)
    if part is None:
        raise ValueError(f"the leaf {name!r} is in no part of the memory plan: add it to `_PARTS` in this file")
    return part
