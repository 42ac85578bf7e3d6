"""Qwen1.5, Qwen2 and Qwen2.5: Llama with q, k and v biases, and optionally a sliding window in the upper layers."""

import dataclasses

from jpaged.models.families import llama
from jpaged.models.families.base import Family
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec


def windows(config: CheckpointConfig, layers: int) -> tuple[int | None, ...]:
    """Sliding windows of Qwen2 and Qwen3: in layers from `max_window_layers`, if `use_sliding_window` is set."""
    config = config.with_defaults(sliding_window=4096)
    window = None
    if config.flag("use_sliding_window") and config.get("sliding_window") is not None:
        window = config.integer("sliding_window")
    first = config.integer("max_window_layers", default=28, minimum=0)
    return config.layer_windows(window, [window is not None and i >= first for i in range(layers)])


def _qwen2(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("mlp_bias", False)
    base = llama.spec(config)
    # The architecture always has these biases and ignores attention_bias.
    return dataclasses.replace(base, qkv_bias=True, o_bias=False, sliding_window=windows(config, base.num_layers))


QWEN2 = Family("qwen2", ("Qwen2ForCausalLM", "Qwen2Model"), _qwen2, llama.RULES, llama.PREFIX, llama.IGNORED)
