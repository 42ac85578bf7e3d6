"""Falcon-H1: attention and Mamba-2 in each layer, with the same input; their outputs are added. Many fixed factors."""

import dataclasses
from typing import Any

from jpaged.errors import ModelLoadError
from jpaged.models.families import llama
from jpaged.models.families.base import Family, Part, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.families.hybrids import mamba
from jpaged.models.recurrent_spec import GateNorm
from jpaged.models.spec import DecoderSpec

_LAYER = "model.layers.{layer}."
RULES = (
    *(rule for rule in llama.RULES if rule.leaf not in ("gate_up", "down", "mlp_norm", "final_norm")),
    TensorRule(_LAYER + "pre_ff_layernorm.weight", "mlp_norm"),
    TensorRule(_LAYER + "feed_forward.gate_proj.weight", "gate_up", (Part.GATE,)),
    TensorRule(_LAYER + "feed_forward.up_proj.weight", "gate_up", (Part.UP,)),
    TensorRule(_LAYER + "feed_forward.down_proj.weight", "down"),
    TensorRule("model.final_layernorm.weight", "final_norm"),
    *mamba.rules(_LAYER + "mamba."),
)


def _falcon_h1(config: CheckpointConfig) -> DecoderSpec:
    config = config.with_defaults(
        num_attention_heads=32, num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=8192,
        mamba_d_ssm=1024,
    )  # fmt: skip
    for name in ("attention_bias", "mlp_bias"):  # the multiplier of attention's input does not apply to a bias
        config.refuse(name, False)
    base = llama.spec(config)

    def factor(name: str) -> float:
        return config.positive(f"{name}_multiplier", default=1.0)

    width = config.get("mamba_d_ssm", default=config.integer("mamba_expand", default=2) * base.hidden_size)
    has_norm, is_first = config.flag("mamba_rms_norm"), config.flag("mamba_norm_before_gate", default=True)
    layers = dataclasses.replace(
        mamba.mamba2(config, (True,) * base.num_layers, width), out_bias=config.flag("projectors_bias"),
        gate_norm=GateNorm.NONE if not has_norm else GateNorm.BEFORE if is_first else GateNorm.AFTER,
        in_scale=factor("ssm_in"), part_scales=_factors(config, "ssm_multipliers", 5), out_scale=factor("ssm_out"),
    )  # fmt: skip
    gate, down = _factors(config, "mlp_multipliers", 2)
    # Queries, keys and values are linear in attention's input, so its factor is one of the scores and of the output
    at_input = factor("attention_in")
    return dataclasses.replace(
        base, recurrence=layers, attention_layers=layers.layers, embed_scale=factor("embedding"),
        logit_divisor=1 / factor("lm_head"), gate_scale=gate, feed_forward_scale=down,
        attention_scale=base.scale * at_input**2 * factor("key"),
        attention_out_scale=at_input * factor("attention_out"),
    )  # fmt: skip


def _factors(config: CheckpointConfig, name: str, count: int) -> Any:
    """The numbers of this key; ones if it is absent."""
    values = config.get(name, default=[1.0] * count)
    is_list = isinstance(values, list) and all(type(value) in (int, float) and value > 0 for value in values)
    if not is_list or len(values) != count:
        raise ModelLoadError(f"config.json: {name}={values!r} must be a list of {count} numbers above 0")
    return tuple(map(float, values))


FALCON_H1 = Family(
    "falcon_h1", ("FalconH1ForCausalLM", "FalconH1Model"), _falcon_h1, RULES, llama.PREFIX, llama.IGNORED,
    has_classifier=False,
)  # fmt: skip
