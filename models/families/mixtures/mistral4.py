"""Mistral Small 4: latent attention as in DeepSeek-V2, experts, and queries that grow with their position."""

import dataclasses

from jpaged.errors import ModelLoadError
from jpaged.models.families import deepseek, llama, ministral
from jpaged.models.families.base import Family, Part, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec

_EXPERTS = "model.layers.{layer}.mlp.experts."

RULES = (
    *(rule for rule in deepseek.RULES if not rule.leaf.startswith("expert_")),
    TensorRule(_EXPERTS + "gate_up_proj", "expert_gate_up", (Part.GATE, Part.UP), all_experts=True),
    TensorRule(_EXPERTS + "down_proj", "expert_down", all_experts=True),
)
_ROPE = ministral.DEFAULT_ROPE | {"rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}


def _mistral4(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_layers_but("full_attention")
    config.refuse("scoring_func", "softmax")
    config.refuse("sliding_window")
    config = config.with_defaults(
        q_lora_rank=1024, kv_lora_rank=256, qk_nope_head_dim=64, n_shared_experts=1, moe_intermediate_size=2048,
        max_position_embeddings=1_048_576,
    )  # fmt: skip
    if config.get("rope_parameters", "rope_scaling") is None:
        config = CheckpointConfig({**config.values, "rope_parameters": _ROPE})
    config, growth = ministral.query_scaling(config)
    # The share of a head that rope rotates follows from the head's two parts.
    config, _ = config.without_rope_keys("partial_rotary_factor")
    base = deepseek.latent_spec(config)
    if base.rope is None or base.rope.scaling != "yarn":
        raise ModelLoadError("config.json: rope_parameters of a Mistral 4 must be yarn: use a published checkpoint")
    experts = deepseek.routed_experts(config, base.num_layers, num=128, per_token=4, expert_group_top=2)
    experts = dataclasses.replace(experts, renormalise=config.flag("norm_topk_prob", True))
    return dataclasses.replace(base, experts=experts, query_scaling=growth)


MISTRAL4 = Family(
    "mistral4", ("Mistral4ForCausalLM", "Mistral4Model"), _mistral4, RULES, llama.PREFIX, llama.IGNORED
)
