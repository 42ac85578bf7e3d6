"""Mixtral: Mistral with a mixture of experts in every layer."""

import dataclasses

from jpaged.models.families import llama
from jpaged.models.families.base import Family, Part, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, Experts

_MOE = "model.layers.{layer}.block_sparse_moe."

RULES = (
    *(rule for rule in llama.RULES if rule.leaf not in ("gate_up", "up_bias", "down", "down_bias")),
    TensorRule(_MOE + "gate.weight", "router"),
    TensorRule(_MOE + "experts.{expert}.w1.weight", "expert_gate_up", (Part.GATE,)),
    TensorRule(_MOE + "experts.{expert}.w3.weight", "expert_gate_up", (Part.UP,)),
    TensorRule(_MOE + "experts.{expert}.w2.weight", "expert_down"),
)


def _mixtral(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("attention_bias", False)
    config.refuse("mlp_bias", False)
    config = config.with_defaults(
        num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=131072
    )
    base = llama.spec(config, theta=1e6)
    num, per_token = config.experts("num_local_experts", num=8, per_token=2)
    experts = Experts(num, per_token, base.intermediate_size, (True,) * base.num_layers, renormalise=True)
    return dataclasses.replace(base, experts=experts, sliding_window=config.window_everywhere(base.num_layers))


MIXTRAL = Family("mixtral", ("MixtralForCausalLM", "MixtralModel"), _mixtral, RULES, llama.PREFIX, llama.IGNORED)
