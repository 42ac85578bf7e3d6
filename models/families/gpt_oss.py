"""gpt-oss: experts with biases and a clamped gate, attention sinks, a sliding window in every other layer."""

import dataclasses

from jpaged.models.families import llama
from jpaged.models.families.base import Family, Part, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, Experts

_LAYER = "model.layers.{layer}."
_EXPERTS = _LAYER + "mlp.experts."
_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip

RULES = (
    *(rule for rule in llama.RULES if rule.leaf not in ("gate_up", "up_bias", "down", "down_bias")),
    TensorRule(_LAYER + "self_attn.sinks", "sinks"),
    TensorRule(_LAYER + "mlp.router.weight", "router"),
    TensorRule(_LAYER + "mlp.router.bias", "router_bias"),
    TensorRule(_EXPERTS + "gate_up_proj", "expert_gate_up", (Part.INTERLEAVED,), transposed=True, all_experts=True),
    TensorRule(_EXPERTS + "gate_up_proj_bias", "expert_gate_up_bias", (Part.INTERLEAVED,), all_experts=True),
    TensorRule(_EXPERTS + "down_proj", "expert_down", transposed=True, all_experts=True),
    TensorRule(_EXPERTS + "down_proj_bias", "expert_down_bias", all_experts=True),
)


def _gpt_oss(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("mlp_bias", False)
    config.refuse("hidden_act", "silu")
    config = config.with_defaults(
        head_dim=64, rms_norm_eps=1e-5, sliding_window=128, attention_bias=True, max_position_embeddings=131072,
        num_key_value_heads=8,
    )  # fmt: skip
    if config.get("rope_scaling", "rope_parameters") is None:
        config = CheckpointConfig({**config.values, "rope_parameters": _ROPE})
    base = llama.spec(config.without_mxfp4(), theta=150000.0)
    num, per_token = config.experts("num_local_experts", num=128, per_token=4)
    return dataclasses.replace(
        base,
        sinks=True,
        sliding_window=config.layer_windows(config.window(), [layer % 2 == 0 for layer in range(base.num_layers)]),
        swiglu_limit=config.positive("swiglu_limit", 7.0),
        swiglu_alpha=config.positive("swiglu_alpha", 1.702),
        experts=Experts(
            num, per_token, base.intermediate_size, (True,) * base.num_layers, renormalise=True, bias=True
        ),
    )


GPT_OSS = Family("gpt_oss", ("GptOssForCausalLM", "GptOssModel"), _gpt_oss, RULES, llama.PREFIX, llama.IGNORED)
