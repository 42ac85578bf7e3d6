"""Granite 3: Llama with factors for embeddings, attention scores and residual sums, and a divisor of the logits."""

import dataclasses

from jpaged.models.families import llama
from jpaged.models.families.base import Family
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec


def _granite(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_layers_but("full_attention")
    return dataclasses.replace(
        llama.spec(config),
        embed_scale=config.positive("embedding_multiplier", default=1.0),
        attention_scale=config.positive("attention_multiplier", default=1.0),
        residual_scale=config.positive("residual_multiplier", default=1.0),
        logit_divisor=config.positive("logits_scaling", default=1.0),
    )


GRANITE = Family("granite", ("GraniteForCausalLM", "GraniteModel"), _granite, llama.RULES, llama.PREFIX, llama.IGNORED)
