"""Phi-3.5-MoE: layer norms, biases of attention and of the output matrix, longrope, and a router of its own.

Transformers 5.24 keeps longrope's short factors for sequences of any length. jpaged uses the long factors beyond
`original_max_position_embeddings`, as the code published with the model does.
"""

import dataclasses

from jpaged.errors import ModelLoadError
from jpaged.models.families import llama, mixtral
from jpaged.models.families.base import Family, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, Experts, Norm, Scoring

_LAYER = "model.layers.{layer}."

RULES = (
    *mixtral.RULES,
    TensorRule(_LAYER + "input_layernorm.bias", "attn_norm_bias"),
    TensorRule(_LAYER + "post_attention_layernorm.bias", "mlp_norm_bias"),
    TensorRule("model.norm.bias", "final_norm_bias"),
    TensorRule("lm_head.bias", "lm_head_bias"),
)


def _phimoe(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_layers_but("full_attention")
    config.refuse("mlp_bias", False)
    config = config.with_defaults(num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=131_072)
    config, scales = config.without_rope_keys("short_mscale", "long_mscale")
    base = llama.spec(config, theta=1_000_000.0)
    if base.rope is not None and base.rope.scaling == "longrope":
        short, long = (CheckpointConfig(scales).optional_positive(name) for name in ("short_mscale", "long_mscale"))
        if short is None or short != long:
            raise ModelLoadError(
                f"config.json: short_mscale={short}, long_mscale={long} of rope_scaling must be given and equal"
            )
        base = dataclasses.replace(base, rope=dataclasses.replace(base.rope, attention_factor=short))
    elif base.rope is not None and base.rope.scaling != "default":
        raise ModelLoadError("config.json: rope_scaling of a Phi-3.5-MoE must be longrope: use a published checkpoint")
    num, per_token = config.experts("num_local_experts", "num_experts", num=16, per_token=2)
    if per_token != 2:
        raise ModelLoadError(f"config.json: num_experts_per_tok={per_token} is not supported for phimoe (only 2)")
    window = config.window()
    return dataclasses.replace(
        base,
        norm=Norm.LAYER,
        lm_head_bias=config.flag("lm_head_bias"),
        sliding_window=() if window is None or window >= base.max_position else (window,) * base.num_layers,
        experts=Experts(
            num, per_token, base.intermediate_size, (True,) * base.num_layers, scoring=Scoring.SPARSE_MIXER,
            jitter=config.number("router_jitter_noise", default=0.01),
        ),
    )  # fmt: skip


PHIMOE = Family("phimoe", ("PhimoeForCausalLM", "PhimoeModel"), _phimoe, RULES, llama.PREFIX, llama.IGNORED)
