"""Qwen3: Qwen2 without biases, with an RMS norm over every query and key head, and with head_dim 128 by default."""

import dataclasses

from jpaged.models.families import llama
from jpaged.models.families.base import Family
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.families.qwen2 import windows
from jpaged.models.spec import DecoderSpec, QKNorm


def _qwen3(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("mlp_bias", False)
    base = llama.spec(config.with_defaults(head_dim=128))
    return dataclasses.replace(base, qk_norm=QKNorm.HEAD, sliding_window=windows(config, base.num_layers))


QWEN3 = Family("qwen3", ("Qwen3ForCausalLM", "Qwen3Model"), _qwen3, llama.RULES, llama.PREFIX, llama.IGNORED)
