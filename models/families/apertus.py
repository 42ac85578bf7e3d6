"""Apertus: Llama with normalised queries and keys, and a feed-forward network without a gate, with xIELU."""

import dataclasses

from jpaged.models.families import llama
from jpaged.models.families.base import Family, Number, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import Activation, DecoderSpec, QKNorm

_LAYER = "model.layers.{layer}."
_THETA = 12_000_000.0
_ROPE = {  # Transformers' default
    "rope_type": "llama3", "rope_theta": _THETA, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip

RULES = (
    *(rule for rule in llama.RULES if rule.leaf not in ("attn_norm", "mlp_norm", "gate_up", "up_bias", "down_bias")),
    TensorRule(_LAYER + "attention_layernorm.weight", "attn_norm"),
    TensorRule(_LAYER + "feedforward_layernorm.weight", "mlp_norm"),
    TensorRule(_LAYER + "mlp.up_proj.weight", "up"),
    Number(_LAYER + "mlp.act_fn.alpha_p", "xielu", index=0, axes=1),
    Number(_LAYER + "mlp.act_fn.alpha_n", "xielu", index=1, axes=1),
    Number(_LAYER + "mlp.act_fn.beta", "xielu", index=2),
    Number(_LAYER + "mlp.act_fn.eps", "xielu", index=3),
)


def _apertus(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("hidden_act", "xielu")
    config.refuse("mlp_bias", False)
    config.refuse("qk_norm", True)
    config.refuse("post_norm", False)
    config.refuse_layers_but("full_attention")
    config = config.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=65_536)
    if config.get("rope_parameters", "rope_scaling") is None:
        config = CheckpointConfig({**config.values, "rope_parameters": _ROPE})
    base = llama.spec(CheckpointConfig({**config.values, "hidden_act": None}), theta=_THETA)
    return dataclasses.replace(base, activation=Activation.XIELU, gated=False, qk_norm=QKNorm.HEAD)


APERTUS = Family(
    "apertus", ("ApertusForCausalLM", "ApertusModel"), _apertus, RULES, llama.PREFIX, llama.IGNORED,
    has_classifier=False,
)  # fmt: skip
