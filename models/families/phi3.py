"""Phi-3, 3.5 and 4: Llama with fused projections, and optionally a sliding window, partial rope and longrope."""

import dataclasses
from typing import Any

from jpaged.errors import ModelLoadError
from jpaged.models.families import llama
from jpaged.models.families.base import Family, Part, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec

_LAYER = "model.layers.{layer}."

RULES = (
    *(rule for rule in llama.RULES if rule.leaf not in ("qkv", "gate_up")),
    TensorRule(_LAYER + "self_attn.qkv_proj.weight", "qkv", (Part.Q, Part.K, Part.V)),
    TensorRule(_LAYER + "mlp.gate_up_proj.weight", "gate_up", (Part.GATE, Part.UP)),
)


def _phi3(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("attention_bias", False)
    config.refuse("mlp_bias", False)
    config = config.with_defaults(
        rms_norm_eps=1e-5, max_position_embeddings=4096, original_max_position_embeddings=4096
    )
    scaling = {name: _longrope(config.get(name)) for name in ("rope_scaling", "rope_parameters")}
    base = llama.spec(CheckpointConfig({**config.values, **scaling}), partial_rope=True)
    if base.rope is None or base.rope.scaling not in ("default", "longrope"):
        raise ModelLoadError("config.json: rope_scaling of a Phi-3 must be longrope: use a published checkpoint")
    window = config.window()
    return dataclasses.replace(base, sliding_window=() if window is None else (window,) * base.num_layers)


def _longrope(scaling: Any) -> Any:
    """The rope dictionary with longrope's current name. Old files call it "su" or "yarn"."""
    if not isinstance(scaling, dict):
        return scaling
    renamed = {key: "longrope" for key in ("type", "rope_type") if scaling.get(key) in ("su", "yarn")}
    return {**scaling, **renamed}


PHI3 = Family("phi3", ("Phi3ForCausalLM", "Phi3Model"), _phi3, RULES, llama.PREFIX, llama.IGNORED)
