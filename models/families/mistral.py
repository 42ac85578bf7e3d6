"""Mistral 7B and its relatives: Llama with a sliding window in every layer."""

import dataclasses

from jpaged.models.families import llama
from jpaged.models.families.base import Family
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec


def _mistral(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("attention_bias", False)
    config.refuse("mlp_bias", False)
    config = config.with_defaults(num_key_value_heads=8, sliding_window=4096)
    base = llama.spec(config)
    return dataclasses.replace(base, sliding_window=config.window_everywhere(base.num_layers))


MISTRAL = Family("mistral", ("MistralForCausalLM", "MistralModel"), _mistral, llama.RULES, llama.PREFIX, llama.IGNORED)
