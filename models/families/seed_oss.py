"""Seed-OSS: Llama with biases of queries, keys and values, and without one of the output projection."""

import dataclasses

from jpaged.models.families import llama
from jpaged.models.families.base import Family
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec


def _seed_oss(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_layers_but("full_attention")
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, attention_bias=True, max_position_embeddings=524_288
    )
    return dataclasses.replace(llama.spec(config), o_bias=config.flag("attention_out_bias"))


SEED_OSS = Family(
    "seed_oss", ("SeedOssForCausalLM", "SeedOssModel"), _seed_oss, llama.RULES, llama.PREFIX, llama.IGNORED
)
