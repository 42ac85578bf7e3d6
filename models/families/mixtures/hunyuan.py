"""Hunyuan dense (V1), which normalises heads after rope; and Hunyuan 3, with experts as in DeepSeek-V3."""

import dataclasses
import re

from jpaged.models.families import deepseek, llama
from jpaged.models.families.base import Family, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, Experts, QKNorm, Scoring

_LAYER = "model.layers.{layer}."
_NAMES = {
    "mlp.gate.weight": "mlp.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
    "mlp.shared_experts.": "mlp.shared_mlp.",
}

DENSE_RULES = (
    *(rule for rule in llama.RULES if rule.leaf not in ("q_norm", "k_norm")),
    TensorRule(_LAYER + "self_attn.query_layernorm.weight", "q_norm"),
    TensorRule(_LAYER + "self_attn.key_layernorm.weight", "k_norm"),
)


def _renamed(rule: TensorRule) -> TensorRule:
    name = rule.name
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return dataclasses.replace(rule, name=name)


V3_RULES = (
    *llama.RULES,
    *(_renamed(rule) for rule in deepseek.RULES if rule.leaf.startswith(("router", "expert_", "shared_"))),
)
# Layer 80 predicts a second token. Transformers ignores it too.
V3_IGNORED = re.compile(llama.IGNORED.pattern + r"|model\.layers\.80\..*")


def _hunyuan(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_layers_but("full_attention")
    config.refuse("mlp_bias", False)
    config.refuse("use_cla", False)
    config.refuse("use_qk_norm", True)
    config = config.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=2048)
    rope = config.get("rope_parameters", "rope_scaling", default={})
    is_stretched = rope.get("rope_type", rope.get("type")) == "dynamic" and bool(rope.get("alpha"))
    ntk = ("alpha", "rope_type", "type", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    config, found = config.without_rope_keys(*(ntk if is_stretched else ntk[:1]))
    base = llama.spec(config)
    if is_stretched and base.rope is not None:  # the base grows as for a sequence `alpha` times as long
        alpha = CheckpointConfig(found).positive("alpha", 1.0)
        theta = base.rope.theta * alpha ** (base.head_dim / (base.head_dim - 2))
        base = dataclasses.replace(base, rope=dataclasses.replace(base.rope, theta=theta))
    return dataclasses.replace(base, qk_norm=QKNorm.ROTATED)


def _hunyuan3(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_layers_but("full_attention")
    config.refuse("mlp_bias", False)
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, max_position_embeddings=131_072
    )
    base = llama.spec(config, theta=11_158_840.0)
    num, per_token = config.experts("num_experts", "num_local_experts", num=192, per_token=8)
    size = config.integer("moe_intermediate_size", default=1536)
    experts = Experts(
        num, per_token, size, config.sparse_layers(base.num_layers, dense=1), scoring=Scoring.SIGMOID,
        correction=True, renormalise=True, scale=config.positive("router_scaling_factor", 2.826),
        shared_size=size * config.integer("num_shared_experts", default=1),
    )  # fmt: skip
    return dataclasses.replace(base, qk_norm=QKNorm.HEAD, experts=experts)


HUNYUAN = Family(
    "hunyuan_v1_dense", ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Model"), _hunyuan, DENSE_RULES, llama.PREFIX,
    llama.IGNORED,
)  # fmt: skip
HUNYUAN3 = Family(
    "hy_v3", ("HYV3ForCausalLM", "HYV3Model"), _hunyuan3, V3_RULES, llama.PREFIX, V3_IGNORED,
    has_classifier=False,
)  # fmt: skip
