"""Laguna: window layers with a rope and a number of query heads of their own, gated attention, many experts."""

import dataclasses

from jpaged.errors import ModelLoadError
from jpaged.models.families import llama, qwen_moe
from jpaged.models.families.base import Family, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, Experts, QKNorm, Scoring

_LAYER = "model.layers.{layer}."
_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}

RULES = (
    *qwen_moe.RULES,
    TensorRule(_LAYER + "self_attn.g_proj.weight", "output_gate"),
    TensorRule(_LAYER + "mlp.experts.e_score_correction_bias", "router_correction"),
)


def _heads(config: CheckpointConfig, layers: int) -> tuple[int, ...]:
    """Query heads of every layer."""
    heads, kv_heads = config.get("num_attention_heads_per_layer"), config.integer("num_key_value_heads")
    if heads is None:
        return (config.integer("num_attention_heads"),) * layers
    is_list = isinstance(heads, list) and len(heads) == layers
    if not is_list or not all(type(number) is int and number > 0 and number % kv_heads == 0 for number in heads):
        raise ModelLoadError(
            f"config.json: num_attention_heads_per_layer={heads!r} must be a list of {layers} multiples of "
            f"num_key_value_heads={kv_heads}"
        )
    return tuple(heads)


def _laguna(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("attention_bias", False)
    config.refuse("mlp_bias", False)
    config.refuse("moe_apply_router_weight_on_input", False)
    config.refuse("gating", True, "per-head", "per-element")
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072, sliding_window=512, gating=True
    )
    if config.get("rope_parameters") is None:
        config = CheckpointConfig({**config.values, "rope_parameters": _ROPES})
    heads = _heads(config, config.integer("num_hidden_layers"))
    full = CheckpointConfig({**config.of_layers("full_attention").values, "num_attention_heads": max(heads)})
    base = llama.spec(full, partial_rope=True)
    windows = config.layer_windows(config.window(), [False] * base.num_layers)
    local = config.of_layers("sliding_attention").rope(partial=True) if windows else None
    num, per_token = config.experts("num_experts", "num_local_experts", num=256, per_token=8)
    experts = Experts(
        num, per_token, config.integer("moe_intermediate_size", default=512),
        config.sparse_layers(base.num_layers, dense=1), scoring=Scoring.SIGMOID, correction=True, renormalise=True,
        scale=config.positive("moe_routed_scaling_factor", 1.0),
        shared_size=config.integer("shared_expert_intermediate_size", default=512),
        softcap=config.number("moe_router_logit_softcapping", default=0.0) or None,
    )  # fmt: skip
    return dataclasses.replace(
        base,
        qk_norm=QKNorm.HEAD,
        window_rope=local,
        sliding_window=windows,
        heads_by_layer=() if len(set(heads)) == 1 else heads,
        output_gates=1 if config.get("gating") in (True, "per-head") else base.head_dim,
        experts=experts if any(experts.layers) else None,
    )


LAGUNA = Family(
    "laguna", ("LagunaForCausalLM", "LagunaModel"), _laguna, RULES, llama.PREFIX, llama.IGNORED, has_classifier=False
)
