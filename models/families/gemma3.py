"""Gemma 3 (text): Gemma 2 with normalised queries and keys instead of soft caps, and another rope in window layers."""

import dataclasses

from jpaged.models.families import gemma, llama
from jpaged.models.families.base import Family
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, NormPosition, QKNorm


def _gemma3(config: CheckpointConfig) -> DecoderSpec:
    local = gemma.window_rope(config)
    config.refuse("attn_logit_softcapping")  # Transformers reads it, but does not apply it
    activation = config.get("hidden_activation", default="gelu_pytorch_tanh")
    defaults = {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 4}
    config = CheckpointConfig({**config.of_layers("full_attention").values, "hidden_act": activation})
    base = gemma.spec(config.with_defaults(**defaults), theta=1e6)
    pattern = config.integer("sliding_window_pattern", default=6)
    sliding = [(layer + 1) % pattern != 0 for layer in range(base.num_layers)]
    return dataclasses.replace(
        base,
        max_position=config.integer("max_position_embeddings", default=131072),  # already includes the rope's scaling
        norm_position=NormPosition.SANDWICH,
        qk_norm=QKNorm.HEAD,
        window_rope=local,
        attention_scale=config.positive("query_pre_attn_scalar", default=256.0) ** -0.5,
        final_softcap=config.optional_positive("final_logit_softcapping"),
        sliding_window=config.layer_windows(config.with_defaults(**defaults).window(), sliding),
    )


GEMMA3 = Family(
    "gemma3_text", ("Gemma3ForCausalLM", "Gemma3TextModel"), _gemma3, gemma.GEMMA2_RULES, llama.PREFIX, llama.IGNORED
)
