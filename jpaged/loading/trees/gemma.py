"""Gemma's own names, in flax linen (google-deepmind/gemma), and what they share with tunix's Gemmas.

q_einsum and kv_einsum are [heads, in, head_dim], so they are copied. gating_einsum [2, intermediate, in] is the
engine's own gate and up; with `transpose_gating_einsum=False` it is [2, in, intermediate], and is copied.
"""

from jpaged.loading.trees.table import Kind, Row, row
from jpaged.models.spec import DecoderSpec


def attention_rows(layer: str, spec: DecoderSpec) -> tuple[Row, ...]:
    """Rows of attention and norms. layer: the beginning of a layer's names."""
    qkv = spec.num_heads == spec.num_kv_heads
    return (
        row("final_norm.scale", "final_norm"),
        row(f"{layer}pre_attention_norm.scale", "attn_norm"),
        row(f"{layer}post_attention_norm.scale", "attn_out_norm"),
        row(f"{layer}post_attn_norm.scale", "attn_out_norm"),
        row(f"{layer}pre_ffw_norm.scale", "mlp_norm"),
        row(f"{layer}post_ffw_norm.scale", "mlp_out_norm"),
        *([row(f"{layer}attn.qkv_einsum.w", "q,k,v", "c n d h")] if qkv else []),
        row(f"{layer}attn.q_einsum.w", "q", "n d h"),
        row(f"{layer}attn.kv_einsum.w", "k,v", "c k d h"),
        row(f"{layer}attn.attn_vec_einsum.w", "o", "n h d"),
        row(f"{layer}attn._query_norm.scale", "q_norm"),
        row(f"{layer}attn._key_norm.scale", "k_norm"),
    )


def _rows(spec: DecoderSpec) -> tuple[Row, ...]:
    layer = "layer_{i}."
    gating = [row(f"{layer}mlp.gating_einsum{end}", "gate,up", axes) for end in ("", ".w") for axes in _GATING]
    return (
        row("embedder.input_embedding", "embed", "v d"),
        *attention_rows(layer, spec),
        *gating,
        *(row(f"{layer}mlp.linear{end}", "down", "f d") for end in ("", ".w")),
    )


_GATING = ("c f d", "c d f")
GEMMA = Kind("Gemma (linen)", _rows, prefixes=("params.", "transformer.", "params.transformer."))
