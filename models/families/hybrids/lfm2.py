"""LFM2 and LFM2 MoE: gated short convolutions in most layers, attention in the others, all with normalised q and k."""

import dataclasses
from typing import Any

from jpaged.errors import ModelLoadError
from jpaged.models.families import llama
from jpaged.models.families.base import Family, Part, TensorRule, with_bias
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.recurrent_spec import ShortConv
from jpaged.models.spec import DecoderSpec, Experts, QKNorm, Scoring

_LAYER = "model.layers.{layer}."
_MLP = _LAYER + "feed_forward."
_RULES = (
    *(rule for rule in llama.RULES if rule.leaf in ("embed", "qkv", "lm_head")),
    TensorRule(_LAYER + "operator_norm.weight", "attn_norm"),
    TensorRule(_LAYER + "self_attn.q_layernorm.weight", "q_norm"),
    TensorRule(_LAYER + "self_attn.k_layernorm.weight", "k_norm"),
    TensorRule(_LAYER + "self_attn.out_proj.weight", "o"),
    *with_bias(_LAYER + "conv.in_proj", "conv_in"),
    TensorRule(_LAYER + "conv.conv.weight", "conv_kernel", (Part.CONV,)),
    TensorRule(_LAYER + "conv.conv.bias", "conv_kernel_bias"),
    *with_bias(_LAYER + "conv.out_proj", "conv_out"),
    TensorRule(_LAYER + "ffn_norm.weight", "mlp_norm"),
    TensorRule(_MLP + "w1.weight", "gate_up", (Part.GATE,)),
    TensorRule(_MLP + "w3.weight", "gate_up", (Part.UP,)),
    TensorRule(_MLP + "w2.weight", "down"),
    TensorRule(_MLP + "gate.weight", "router"),
    TensorRule(_MLP + "expert_bias", "router_correction"),
    TensorRule(_MLP + "experts.{expert}.w1.weight", "expert_gate_up", (Part.GATE,)),
    TensorRule(_MLP + "experts.{expert}.w3.weight", "expert_gate_up", (Part.UP,)),
    TensorRule(_MLP + "experts.{expert}.w2.weight", "expert_down"),
    TensorRule("model.embedding_norm.weight", "final_norm"),
)


def _spec(config: CheckpointConfig, types: list[str], **sizes: Any) -> DecoderSpec:
    """All but the feed-forward networks. types: kinds of the layers. sizes: defaults of the model type."""
    for name, harmless in {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}.items():
        config.refuse(name, harmless)
    config = config.with_defaults(
        num_attention_heads=32, num_key_value_heads=8, vocab_size=65536, max_position_embeddings=128_000, norm_eps=1e-5,
        num_hidden_layers=32, **sizes,
    )  # fmt: skip
    tied = config.flag("tie_embedding", config.flag("tie_word_embeddings", True))
    base = llama.spec(config, theta=1_000_000.0)
    if len(types) != base.num_layers or set(types) - {"full_attention", "conv"} or "full_attention" not in types:
        raise ModelLoadError(
            f"config.json: layer_types={types!r} must have full_attention or conv for each of {base.num_layers} "
            "layers, and full_attention for at least one"
        )
    width, bias = config.integer("conv_L_cache", default=3, minimum=2), config.flag("conv_bias")
    conv = ShortConv(tuple(kind == "conv" for kind in types), base.hidden_size, width, bias)
    return dataclasses.replace(
        base, norm_eps=config.positive("norm_eps", 1e-5), qk_norm=QKNorm.HEAD, tie_embeddings=tied,
        recurrence=conv if any(conv.layers) else None,
    )  # fmt: skip


def _lfm2(config: CheckpointConfig) -> DecoderSpec:
    layers = config.integer("num_hidden_layers", default=32)
    inter = config.integer("block_ff_dim", "intermediate_size", default=12288)
    attention = config.get("full_attn_idxs", default=list(range(layers)))
    if not isinstance(attention, list):
        raise ModelLoadError(f"config.json: full_attn_idxs={attention!r} must be a list of layer numbers")
    types = config.layer_types() or ["full_attention" if i in attention else "conv" for i in range(layers)]
    if config.flag("block_auto_adjust_ff_dim", True):
        inter, multiple = int(2 * inter / 3), config.integer("block_multiple_of", default=256)
        inter = -(-int(config.positive("block_ffn_dim_multiplier", 1.0) * inter) // multiple) * multiple
    return dataclasses.replace(_spec(config, types, hidden_size=2560, intermediate_size=1), intermediate_size=inter)


def _lfm2_moe(config: CheckpointConfig) -> DecoderSpec:
    config = config.with_defaults(num_hidden_layers=32, num_dense_layers=2)
    base = _spec(config, config.layer_types(), hidden_size=2048, intermediate_size=7168)
    num, per_token = config.experts("num_experts", num=32, per_token=4)
    dense = config.integer("num_dense_layers", minimum=0)
    experts = Experts(
        num, per_token, config.integer("moe_intermediate_size", default=1792),
        tuple(layer >= dense for layer in range(base.num_layers)), scoring=Scoring.SIGMOID,
        correction=config.flag("use_expert_bias", True), renormalise=config.flag("norm_topk_prob", True),
        scale=config.positive("routed_scaling_factor", 1.0), weight_offset=1e-6,
    )  # fmt: skip
    return dataclasses.replace(base, experts=experts if any(experts.layers) else None)


LFM2 = Family(
    "lfm2", ("Lfm2ForCausalLM", "Lfm2Model"), _lfm2, _RULES, llama.PREFIX, llama.IGNORED, has_classifier=False
)
LFM2_MOE = Family(
    "lfm2_moe", ("Lfm2MoeForCausalLM", "Lfm2MoeModel"), _lfm2_moe, _RULES, llama.PREFIX, llama.IGNORED,
    has_classifier=False,
)  # fmt: skip
