"""DeepSeek-V2 and V3 (and R1): latent attention, experts after a few dense layers, and a shared expert."""

import dataclasses
import math
import re

from jpaged.errors import ModelLoadError
from jpaged.models.families import llama
from jpaged.models.families.base import Family, Part, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.families.qwen_moe import RULES as QWEN_MOE_RULES
from jpaged.models.spec import DecoderSpec, Experts, Latent, Scoring

_ATTENTION = "model.layers.{layer}.self_attn."
_MLP = "model.layers.{layer}.mlp."

RULES = (
    *(rule for rule in QWEN_MOE_RULES if rule.leaf not in ("qkv", "qkv_bias") and "shared_expert" not in rule.name),
    TensorRule(_ATTENTION + "q_a_proj.weight", "q_a"),
    TensorRule(_ATTENTION + "q_a_proj.bias", "q_a_bias"),
    TensorRule(_ATTENTION + "q_a_layernorm.weight", "q_a_norm"),
    # The alias is for models without compressed queries (q_lora_rank is null).
    TensorRule(_ATTENTION + "q_b_proj.weight", "q_b", (Part.HEADS,), aliases=(_ATTENTION + "q_proj.weight",)),
    TensorRule(_ATTENTION + "kv_a_proj_with_mqa.weight", "kv_a"),
    TensorRule(_ATTENTION + "kv_a_proj_with_mqa.bias", "kv_a_bias"),
    TensorRule(_ATTENTION + "kv_a_layernorm.weight", "kv_a_norm"),
    TensorRule(_ATTENTION + "kv_b_proj.weight", "kv_b", (Part.HEADS,)),
    TensorRule(_MLP + "gate.e_score_correction_bias", "router_correction"),
    TensorRule(_MLP + "shared_experts.gate_proj.weight", "shared_gate_up", (Part.GATE,)),
    TensorRule(_MLP + "shared_experts.up_proj.weight", "shared_gate_up", (Part.UP,)),
    TensorRule(_MLP + "shared_experts.down_proj.weight", "shared_down"),
)
# V3's checkpoint has an extra layer 61, which predicts a second token. Transformers ignores it too.
IGNORED = re.compile(llama.IGNORED.pattern + r"|model\.layers\.61\..*")


def latent_spec(config: CheckpointConfig) -> DecoderSpec:
    """Spec of V2 or V3 without experts. Other families with latent attention extend it."""
    config.refuse("mlp_bias", False)
    config.refuse("moe_layer_freq", 1)
    latent = Latent(
        q_rank=None if config.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        kv_rank=config.integer("kv_lora_rank", default=512),
        nope_dim=config.integer("qk_nope_head_dim", default=128),
        rope_dim=config.integer("qk_rope_head_dim", default=64),
        v_dim=config.integer("v_head_dim", default=128),
        interleaved=config.flag("rope_interleave", True),
    )
    if latent.rope_dim % 2:
        raise ModelLoadError(f"config.json: qk_rope_head_dim={latent.rope_dim} must be even: rope rotates pairs")
    heads = config.integer("num_attention_heads")
    base = llama.spec(
        CheckpointConfig({**config.values, "head_dim": latent.rope_dim, "num_key_value_heads": heads})
    )
    scale = (latent.nope_dim + latent.rope_dim) ** -0.5
    rope = base.rope
    if rope is not None and rope.scaling != "default" and rope.mscale_all_dim:  # section 4.1.4 of V2's report
        scale *= (0.1 * rope.mscale_all_dim * math.log(max(rope.factor, 1.0)) + 1.0) ** 2
    return dataclasses.replace(
        base, latent=latent, num_kv_heads=1, head_dim=latent.kv_rank + latent.rope_dim, attention_scale=scale
    )


def routed_experts(
    config: CheckpointConfig, num_layers: int, *, num: int, per_token: int, expert_group_top: int = 1
) -> Experts:
    num, per_token = config.experts("n_routed_experts", "num_local_experts", num=num, per_token=per_token)
    groups, kept = config.integer("n_group", default=1), config.integer("topk_group", default=1)
    size = config.integer("moe_intermediate_size")
    if num % groups or kept > groups or per_token > kept * (num // groups) or expert_group_top > num // groups:
        raise ModelLoadError(
            f"config.json: n_group={groups}, topk_group={kept} do not fit {num} experts with {per_token} per token: "
            f"n_group must divide the experts into groups of at least {expert_group_top}, and topk_group groups must "
            "hold a token's experts"
        )
    dense = config.integer("first_k_dense_replace", default=0, minimum=0)
    return Experts(
        num, per_token, size, tuple(layer >= dense for layer in range(num_layers)),
        scale=config.positive("routed_scaling_factor", 1.0), expert_groups=groups, expert_groups_per_token=kept,
        expert_group_top=expert_group_top,
        shared_size=size * (config.integer("n_shared_experts", minimum=0) if config.get("n_shared_experts") else 0),
    )  # fmt: skip


def _deepseek_v2(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("scoring_func", "softmax")
    config.refuse("norm_topk_prob", False)  # Transformers reads it, but does not apply it
    config.refuse("topk_method", "greedy", "group_limited_greedy")
    config.refuse("rope_interleave", True)
    base = latent_spec(config)
    experts = routed_experts(config.with_defaults(n_shared_experts=2), base.num_layers, num=64, per_token=6)
    if config.get("topk_method", default="greedy") == "greedy":
        experts = dataclasses.replace(experts, expert_groups=1, expert_groups_per_token=0)
    return dataclasses.replace(base, experts=experts)


def sigmoid_experts(config: CheckpointConfig, num_layers: int, *, num: int, per_token: int) -> Experts:
    """Experts of a V3, which other families have too. num, per_token: defaults."""
    config.refuse("scoring_func", "sigmoid")
    config.refuse("topk_method", "noaux_tc")
    return dataclasses.replace(
        routed_experts(config, num_layers, num=num, per_token=per_token, expert_group_top=2),
        scoring=Scoring.SIGMOID, correction=True, renormalise=config.flag("norm_topk_prob", True),
    )  # fmt: skip


def _deepseek_v3(config: CheckpointConfig) -> DecoderSpec:
    config = config.with_defaults(
        n_shared_experts=1, moe_intermediate_size=2048, n_group=8, topk_group=4, first_k_dense_replace=3,
        routed_scaling_factor=2.5, q_lora_rank=1536,
    )  # fmt: skip
    base = latent_spec(config)
    return dataclasses.replace(base, experts=sigmoid_experts(config, base.num_layers, num=256, per_token=8))


DEEPSEEK_V2 = Family(
    "deepseek_v2", ("DeepseekV2ForCausalLM", "DeepseekV2Model"), _deepseek_v2, RULES, llama.PREFIX, llama.IGNORED
)
DEEPSEEK_V3 = Family(
    "deepseek_v3", ("DeepseekV3ForCausalLM", "DeepseekV3Model"), _deepseek_v3, RULES, llama.PREFIX, IGNORED
)
