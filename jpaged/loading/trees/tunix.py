"""tunix's names (google/tunix, tunix/models): flax nnx, one module a layer, with a head axis in attention's arrays.

Llama 3, Qwen 2 and Qwen 3 have q_proj, k_proj and v_proj [in, heads, head_dim], which the engine uses without a copy.
Gemma's q_einsum and kv_einsum have the head axis first, [heads, in, head_dim]: they are copied.
"""

from jpaged.loading.trees.gemma import attention_rows
from jpaged.loading.trees.table import Kind, Row, row
from jpaged.models.spec import DecoderSpec, Norm

_LAYER = "layers.{i}."


def _rows(spec: DecoderSpec) -> tuple[Row, ...]:
    rows = [
        row("embedder.input_embedding", "embed", "v d"),
        row("lm_head.w", "lm_head", "d v"),
        row(f"{_LAYER}mlp.gate_proj.kernel", "gate", "d f"),
        row(f"{_LAYER}mlp.up_proj.kernel", "up", "d f"),
        row(f"{_LAYER}mlp.down_proj.kernel", "down", "f d"),
    ]
    if spec.norm is Norm.RMS_OFFSET:
        return (*rows, *attention_rows(_LAYER, spec))
    return (
        *rows,
        row("final_norm.w", "final_norm"),
        row(f"{_LAYER}input_layernorm.w", "attn_norm"),
        row(f"{_LAYER}post_attention_layernorm.w", "mlp_norm"),
        row(f"{_LAYER}attn.q_proj.w", "q", "d n h"),
        row(f"{_LAYER}attn.k_proj.w", "k", "d k h"),
        row(f"{_LAYER}attn.v_proj.w", "v", "d k h"),
        row(f"{_LAYER}attn.o_proj.w", "o", "n h d"),
        row(f"{_LAYER}attn.q_norm.w", "q_norm"),
        row(f"{_LAYER}attn.k_norm.w", "k_norm"),
        *(row(f"{_LAYER}attn.{part}_bias", f"{part}_bias") for part in "qkv"),
    )


TUNIX = Kind("tunix", _rows)
