"""Gemma 1 and 2: norms with an offset of one, and scaled embeddings.

Gemma 2 adds soft caps, a sliding window in every other layer, and norms before and after each block.
"""

import dataclasses
import math

from jpaged.models.families import llama
from jpaged.models.families.base import Family, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, Norm, NormPosition, Rope

_LAYER = "model.layers.{layer}."
_NORMS = ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")

GEMMA2_RULES = (
    *(rule for rule in llama.RULES if rule.leaf != "mlp_norm"),
    *(
        TensorRule(f"{_LAYER}{name}.weight", leaf)
        for name, leaf in zip(_NORMS, ("attn_out_norm", "mlp_norm", "mlp_out_norm"), strict=True)
    ),
)


def spec(config: CheckpointConfig, *, theta: float = 10000.0) -> DecoderSpec:
    """Spec of a Gemma 1, which the other Gemmas extend. theta: default base of the rope."""
    config.refuse("use_bidirectional_attention", False)
    config.refuse("mlp_bias", False)
    config = config.with_defaults(head_dim=256, tie_word_embeddings=True, max_position_embeddings=8192)
    base = llama.spec(config, theta=theta)
    return dataclasses.replace(base, norm=Norm.RMS_OFFSET, embed_scale=math.sqrt(base.hidden_size))


def window_rope(config: CheckpointConfig) -> Rope:
    """Rope of the layers with a window (Gemma 3, Gemma 3n). Old configs have its base as rope_local_base_freq."""
    local = config.of_layers("sliding_attention")
    if local is config:
        theta = config.positive("rope_local_base_freq", 10000.0)
        local = CheckpointConfig({**config.values, "rope_scaling": None, "rope_parameters": None, "rope_theta": theta})
    return local.rope()


def _gemma(config: CheckpointConfig) -> DecoderSpec:
    config = config.with_defaults(hidden_act="gelu_pytorch_tanh")
    if config.get("hidden_act") == "gelu":  # the first releases say gelu, but compute the tanh approximation
        config = CheckpointConfig({**config.values, "hidden_act": "gelu_pytorch_tanh"})
    config.refuse("hidden_activation", "gelu_pytorch_tanh")
    config.refuse_layers_but("full_attention")
    return spec(config)


def _gemma2(config: CheckpointConfig) -> DecoderSpec:
    config = config.with_defaults(
        sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, num_key_value_heads=4
    )
    # Configs also have hidden_act, which the model ignores.
    activation = config.get("hidden_activation", default="gelu_pytorch_tanh")
    base = spec(CheckpointConfig({**config.values, "hidden_act": activation}))
    window = config.window()
    sliding = [window is not None and layer % 2 == 0 for layer in range(base.num_layers)]
    return dataclasses.replace(
        base,
        norm_position=NormPosition.SANDWICH,
        attention_scale=config.positive("query_pre_attn_scalar", default=256.0) ** -0.5,
        attention_softcap=config.optional_positive("attn_logit_softcapping"),
        final_softcap=config.optional_positive("final_logit_softcapping"),
        sliding_window=config.layer_windows(window, sliding),
    )


GEMMA = Family("gemma", ("GemmaForCausalLM", "GemmaModel"), _gemma, llama.RULES, llama.PREFIX, llama.IGNORED)
GEMMA2 = Family("gemma2", ("Gemma2ForCausalLM", "Gemma2Model"), _gemma2, GEMMA2_RULES, llama.PREFIX, llama.IGNORED)
