"""Granite 3 and 4: Llama with factors for embeddings, attention scores and residual sums, and a divisor of the logits.

Granite 4 (`granitemoehybrid`) has a fused feed-forward network, and experts in some models. jpaged has no Mamba
layers: models with them are refused.
"""

import dataclasses

from jpaged.errors import ModelLoadError
from jpaged.models.families import llama
from jpaged.models.families.base import Family, Part, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, Experts

_LAYER = "model.layers.{layer}."
_MOE = _LAYER + "block_sparse_moe."
_BOTH = (Part.GATE, Part.UP)

HYBRID_RULES = (
    *(rule for rule in llama.RULES if rule.leaf not in ("gate_up", "up_bias", "down", "down_bias")),
    TensorRule(_LAYER + "shared_mlp.input_linear.weight", "gate_up", _BOTH),
    TensorRule(_LAYER + "shared_mlp.output_linear.weight", "down"),
    TensorRule(_LAYER + "shared_mlp.input_linear.weight", "shared_gate_up", _BOTH),
    TensorRule(_LAYER + "shared_mlp.output_linear.weight", "shared_down"),
    TensorRule(_MOE + "router.layer.weight", "router"),
    TensorRule(_MOE + "input_linear.weight", "expert_gate_up", _BOTH, all_experts=True),
    TensorRule(_MOE + "output_linear.weight", "expert_down", all_experts=True),
)


def _granite(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_layers_but("full_attention")
    return dataclasses.replace(
        llama.spec(config),
        embed_scale=config.positive("embedding_multiplier", default=1.0),
        attention_scale=config.positive("attention_multiplier", default=1.0),
        residual_scale=config.positive("residual_multiplier", default=1.0),
        logit_divisor=config.positive("logits_scaling", default=1.0),
    )


def _granite4(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("mlp_bias", False)
    config.refuse("position_embedding_type", "rope", "nope")
    kinds = config.get("layer_types", "layers_block_type")
    if kinds is None or set(kinds) - {"attention", "full_attention"}:
        shown = "null (Mamba in every layer)" if kinds is None else sorted(set(map(str, kinds)))
        raise ModelLoadError(
            f"config.json: layer_types={shown} is not supported by jpaged for {config.get('model_type')} "
            "(only attention): use a Granite 4 without Mamba layers, for example granite-4.0-micro"
        )
    shared = config.integer("shared_intermediate_size", default=1024)
    config = CheckpointConfig({**config.values, "layer_types": None, "max_position_embeddings": config.integer(
        "max_position_embeddings", default=2048)})
    base = _granite(config)
    has_rope = config.get("position_embedding_type") == "rope"
    base = dataclasses.replace(base, rope_layers=() if has_rope else (False,) * base.num_layers)
    if config.get("num_local_experts", default=8) == 0:
        return dataclasses.replace(base, intermediate_size=shared)
    num, per_token = config.experts("num_local_experts", num=8, per_token=2)
    experts = Experts(
        num, per_token, base.intermediate_size, (True,) * base.num_layers, renormalise=True, shared_size=shared
    )
    return dataclasses.replace(base, experts=experts)


GRANITE = Family(
    "granite", ("GraniteForCausalLM", "GraniteModel"), _granite, llama.RULES, llama.PREFIX, llama.IGNORED,
    has_classifier=False,
)  # fmt: skip
GRANITE4 = Family(
    "granitemoehybrid", ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridModel"), _granite4, HYBRID_RULES,
    llama.PREFIX, llama.IGNORED, has_classifier=False,
)  # fmt: skip
