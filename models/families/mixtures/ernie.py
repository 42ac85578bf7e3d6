"""Ernie 4.5: Llama with rope in pairs. Its MoE has shared experts, and chooses experts by corrected scores."""

import dataclasses
import re

from jpaged.models.families import llama
from jpaged.models.families.base import Family, Part, TensorRule, with_pairs
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.families.deepseek import RULES as DEEPSEEK_RULES
from jpaged.models.spec import DecoderSpec, Experts

_MLP = "model.layers.{layer}.mlp."
_EXPERT_LEAVES = ("router", "expert_gate_up", "expert_down", "shared_gate_up", "shared_down")

RULES = with_pairs(llama.RULES)
MOE_RULES = (
    *RULES,
    *(rule for rule in DEEPSEEK_RULES if rule.leaf in _EXPERT_LEAVES),
    TensorRule(_MLP + "moe_statics.e_score_correction_bias", "router_correction", (Part.ROW,)),
)
IGNORED = re.compile(llama.IGNORED.pattern + r"|.*mtp.*")


def _spec(config: CheckpointConfig) -> DecoderSpec:
    """Spec of an Ernie 4.5 without experts. `use_bias` is of all matrices."""
    config.refuse_layers_but("full_attention")
    bias = config.flag("use_bias")
    config = config.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=131_072, tie_word_embeddings=True)
    config = CheckpointConfig({**config.values, "attention_bias": bias, "mlp_bias": bias})
    return llama.spec(config, theta=500_000.0)


def _ernie(config: CheckpointConfig) -> DecoderSpec:
    return _spec(config.with_defaults(num_key_value_heads=2, head_dim=128))


def _ernie_moe(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("use_bias", False)  # the shared experts and the lm_head would have biases too
    base = _spec(config.with_defaults(num_key_value_heads=4))
    config = CheckpointConfig(
        {**config.values, "num_experts_per_tok": config.integer("moe_k", "num_experts_per_tok", default=6)}
    )
    num, per_token = config.experts("moe_num_experts", "num_experts", num=64, per_token=6)
    first = config.integer("moe_layer_start_index", default=1, minimum=0)
    last = config.integer("moe_layer_end_index", default=-1, minimum=-1)
    step = config.integer("moe_layer_interval", default=1)
    size = config.integer("moe_intermediate_size", default=1536)
    layers = tuple(
        (layer + 1) % step == 0 and first <= layer <= (base.num_layers - 1 if last == -1 else last)
        for layer in range(base.num_layers)
    )
    shared = size * config.integer("moe_num_shared_experts", default=2, minimum=0)
    experts = Experts(num, per_token, size, layers, renormalise=True, correction=True, shared_size=shared)
    return dataclasses.replace(base, experts=experts)


ERNIE = Family(
    "ernie4_5", ("Ernie4_5ForCausalLM", "Ernie4_5Model", "Ernie4_5_ForCausalLM"), _ernie, RULES, llama.PREFIX,
    llama.IGNORED, has_classifier=False,
)  # fmt: skip
ERNIE_MOE = Family(
    "ernie4_5_moe", ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeModel"), _ernie_moe, MOE_RULES, llama.PREFIX, IGNORED,
    has_classifier=False,
)  # fmt: skip
