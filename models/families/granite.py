"""Granite 3 and 4: Llama with factors for embeddings, attention scores and residual sums, and a divisor of the logits.

Granite 4 (`granitemoehybrid`) has a fused feed-forward network, experts in some models, and Mamba-2 in place of
attention in most layers of some.
"""

import dataclasses

from jpaged.errors import ModelLoadError
from jpaged.models.families import llama
from jpaged.models.families.base import Family, Part, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.families.hybrids import mamba
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
    *mamba.rules(_LAYER + "mamba."),
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
    shared = config.integer("shared_intermediate_size", default=1024)
    kinds = mamba.layer_kinds(config.get("layer_types", "layers_block_type", default=[]))
    config = CheckpointConfig({**config.values, "layer_types": None, "max_position_embeddings": config.integer(
        "max_position_embeddings", default=2048)})
    base = _with_mamba(config, _granite(config), kinds)
    has_rope = config.get("position_embedding_type") == "rope"
    base = dataclasses.replace(base, rope_layers=() if has_rope else (False,) * base.num_layers)
    if config.get("num_local_experts", default=8) == 0:
        return dataclasses.replace(base, intermediate_size=shared)
    num, per_token = config.experts("num_local_experts", num=8, per_token=2)
    experts = Experts(
        num, per_token, base.intermediate_size, (True,) * base.num_layers, renormalise=True, shared_size=shared
    )
    return dataclasses.replace(base, experts=experts)


def _with_mamba(config: CheckpointConfig, base: DecoderSpec, kinds: list[str]) -> DecoderSpec:
    """The spec with the layers that have Mamba-2. kinds: of each layer."""
    known = {"linear_attention", "full_attention"}
    if len(kinds) != base.num_layers or set(kinds) - known or "full_attention" not in kinds:
        raise ModelLoadError(
            f"config.json: layer_types={kinds!r} must have mamba or attention for each of {base.num_layers} layers, "
            "and attention for at least one"
        )
    if "linear_attention" not in kinds:
        return base
    config.refuse("attention_bias", False)
    layers, width = tuple(kind == "linear_attention" for kind in kinds), config.integer("mamba_expand", default=2)
    return dataclasses.replace(base, recurrence=mamba.mamba2(config, layers, width * base.hidden_size))


GRANITE = Family(
    "granite", ("GraniteForCausalLM", "GraniteModel"), _granite, llama.RULES, llama.PREFIX, llama.IGNORED,
    has_classifier=False,
)  # fmt: skip
GRANITE4 = Family(
    "granitemoehybrid", ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridModel"), _granite4, HYBRID_RULES,
    llama.PREFIX, llama.IGNORED, has_classifier=False,
)  # fmt: skip
