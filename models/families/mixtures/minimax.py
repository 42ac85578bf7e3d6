"""MiniMax M2: Mixtral with queries and keys normalised over all heads, partial rope, and a router as in DeepSeek-V3."""

import dataclasses
import re

from jpaged.models.families import llama, mixtral
from jpaged.models.families.base import Family, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, Experts, QKNorm, Scoring

RULES = (
    *mixtral.RULES,
    TensorRule("model.layers.{layer}.block_sparse_moe.e_score_correction_bias", "router_correction"),
)
# Tensors of modules that predict further tokens
IGNORED = re.compile(llama.IGNORED.pattern + r"|.*mtp.*")


def _minimax_m2(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("attention_bias", False)
    config.refuse("mlp_bias", False)
    config.refuse("scoring_func", "sigmoid")
    config.refuse("use_qk_norm", True)
    config.refuse("qk_norm_type", "per_layer")
    config.refuse("use_routing_bias", True)
    config.refuse("shared_intermediate_size", 0)
    config.refuse("sliding_window")
    if any(kind != 1 for kind in config.get("attn_type_list", default=[])):  # 0 is linear attention
        config.refuse("attn_type_list")
    config = config.with_defaults(num_key_value_heads=8, head_dim=128, max_position_embeddings=196_608)
    if config.get("rotary_dim") is not None:
        share = config.integer("rotary_dim") / config.integer("head_dim")
        config = config.with_defaults(partial_rotary_factor=share)
    base = llama.spec(config, partial_rope=True, theta=5_000_000.0)
    num, per_token = config.experts("num_local_experts", "num_experts", num=256, per_token=8)
    experts = Experts(
        num, per_token, base.intermediate_size, (True,) * base.num_layers, scoring=Scoring.SIGMOID, correction=True,
        renormalise=True,
    )  # fmt: skip
    return dataclasses.replace(base, qk_norm=QKNorm.PROJECTION, experts=experts)


MINIMAX_M2 = Family(
    "minimax_m2", ("MiniMaxM2ForCausalLM", "MiniMaxM2Model"), _minimax_m2, RULES, llama.PREFIX, IGNORED,
    has_classifier=False,
)  # fmt: skip
