"""Names and shapes of the tensors in releases of Kimi Linear."""

from typing import Any

Shapes = dict[str, tuple[int, ...]]


def kimi_linear(c: dict[str, Any]) -> Shapes:
    """Shapes of a Kimi Linear."""
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    full = c.get("linear_attn_config", {}).get("full_attn_layers")  # counted from 1
    kinds = c.get("layer_types") or ["full_attention" if i + 1 in full else "linear_attention" for i in range(layers)]
    sparse = c.get("mlp_layer_types") or ["dense"] * c["first_k_dense_replace"] + ["sparse"] * layers
    shapes: Shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        mixer = _delta(c, f"{at}self_attn.") if kinds[i] == "linear_attention" else _latent(c, f"{at}self_attn.")
        experts = _experts(c, f"{at}block_sparse_moe.")
        dense = _feed_forward(f"{at}mlp.", hidden, c["intermediate_size"])
        shapes |= mixer | (experts if sparse[i] == "sparse" else dense)
        shapes |= {f"{at}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
    return shapes | {"lm_head.weight": (c["vocab_size"], hidden)}


def _delta(c: dict[str, Any], at: str) -> Shapes:
    own = c.get("linear_attn_config", {})
    heads, dim = own.get("num_heads", c.get("linear_num_heads")), own.get("head_dim", c.get("linear_head_dim"))
    width = own.get("short_conv_kernel_size", c.get("linear_conv_kernel_dim"))
    hidden, inner = c["hidden_size"], heads * dim
    shapes: Shapes = {f"{at}{name}_proj.weight": (inner, hidden) for name in "qkv"}
    shapes |= {f"{at}{name}_conv1d.weight": (inner, 1, width) for name in "qkv"}
    shapes |= {f"{at}{name}_a_proj.weight": (dim, hidden) for name in "fg"}
    shapes |= {f"{at}{name}_b_proj.weight": (inner, dim) for name in "fg"}
    return shapes | {
        f"{at}b_proj.weight": (heads, hidden), f"{at}A_log": (1, 1, heads, 1), f"{at}dt_bias": (inner,),
        f"{at}o_norm.weight": (dim,), f"{at}o_proj.weight": (hidden, inner),
    }  # fmt: skip


def _latent(c: dict[str, Any], at: str) -> Shapes:
    hidden, heads, rank, q_rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c["q_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    shapes: Shapes = {
        f"{at}kv_a_proj_with_mqa.weight": (rank + rope, hidden), f"{at}kv_a_layernorm.weight": (rank,),
        f"{at}kv_b_proj.weight": (heads * (nope + value), rank), f"{at}o_proj.weight": (hidden, heads * value),
    }  # fmt: skip
    if q_rank is None:
        return shapes | {f"{at}q_proj.weight": (heads * (nope + rope), hidden)}
    return shapes | {
        f"{at}q_a_proj.weight": (q_rank, hidden), f"{at}q_a_layernorm.weight": (q_rank,),
        f"{at}q_b_proj.weight": (heads * (nope + rope), q_rank),
    }  # fmt: skip


def _experts(c: dict[str, Any], at: str) -> Shapes:
    hidden, inter, num = c["hidden_size"], c["moe_intermediate_size"], c["num_experts"]
    shapes: Shapes = {f"{at}gate.weight": (num, hidden), f"{at}gate.e_score_correction_bias": (num,)}
    for e in range(num):
        shapes |= {f"{at}experts.{e}.{name}.weight": (inter, hidden) for name in ("w1", "w3")}
        shapes[f"{at}experts.{e}.w2.weight"] = (hidden, inter)
    return shapes | _feed_forward(f"{at}shared_experts.", hidden, inter * c["num_shared_experts"])


def _feed_forward(at: str, hidden: int, inter: int) -> Shapes:
    shapes: Shapes = {f"{at}{name}_proj.weight": (inter, hidden) for name in ("gate", "up")}
    return shapes | {f"{at}down_proj.weight": (hidden, inter)}
