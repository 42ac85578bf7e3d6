"""OLMoE: Qwen's experts in every layer, with queries and keys normalised over all heads together as in OLMo 2."""

import dataclasses

from jpaged.models.families import llama, qwen_moe
from jpaged.models.families.base import Family
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, Experts, QKNorm


def _olmoe(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_layers_but("full_attention")
    config.refuse("mlp_bias", False)
    config.refuse("clip_qkv")
    config.refuse("sliding_window")
    base = llama.spec(config.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=4096))
    num, per_token = config.experts("num_experts", "num_local_experts", num=64, per_token=8)
    experts = Experts(
        num, per_token, base.intermediate_size, (True,) * base.num_layers, renormalise=config.flag("norm_topk_prob")
    )
    return dataclasses.replace(base, qk_norm=QKNorm.PROJECTION, experts=experts)


OLMOE = Family(
    "olmoe", ("OlmoeForCausalLM", "OlmoeModel"), _olmoe, qwen_moe.RULES, llama.PREFIX, llama.IGNORED,
    has_classifier=False,
)  # fmt: skip
