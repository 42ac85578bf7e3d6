"""Phi-3 and Phi-4: Llama with fused projections, where asked for a window on every layer and partial rotary embedding.

Without longrope yet, which Phi-3's and Phi-4-mini's long versions use: refused by its name.
"""

import dataclasses

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
    config = config.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=4096)
    base = llama.spec(config, partial_rope=True)
    if base.rope is None or base.rope.scaling != "default":  # Transformers takes "yarn" here for longrope
        raise ModelLoadError("config.json: rope_scaling is not supported by jpaged for Phi-3: use a checkpoint without")
    window = config.window()
    return dataclasses.replace(base, sliding_window=() if window is None else (window,) * base.num_layers)


PHI3 = Family("phi3", ("Phi3ForCausalLM", "Phi3Model"), _phi3, RULES, llama.PREFIX, llama.IGNORED)
