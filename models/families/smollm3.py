"""SmolLM3: Llama with rotary embedding left out of every fourth layer, which may have a window instead."""

import dataclasses

from jpaged.errors import ModelLoadError
from jpaged.models.families import llama
from jpaged.models.families.base import Family
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec


def _smollm3(config: CheckpointConfig) -> DecoderSpec:
    config = config.with_defaults(num_key_value_heads=4, tie_word_embeddings=True)
    base = llama.spec(config, theta=2_000_000.0)
    interval = config.integer("no_rope_layer_interval", default=4)
    turned = config.get("no_rope_layers")  # which layers have it, whatever the name says
    if turned is None:
        turned = [int((layer + 1) % interval != 0) for layer in range(base.num_layers)]
    if not isinstance(turned, list) or len(turned) != base.num_layers or any(flag not in (0, 1) for flag in turned):
        raise ModelLoadError(f"config.json: no_rope_layers={turned!r} must be {base.num_layers} times 0 or 1")
    window = None
    if config.flag("use_sliding_window") and config.get("sliding_window") is not None:
        window = config.integer("sliding_window")
    sliding = [window is not None and not flag for flag in turned]
    # layer_types may name windows that use_sliding_window switches off
    windows = () if window is None else config.layer_windows(window, sliding)
    return dataclasses.replace(base, rope_layers=tuple(bool(flag) for flag in turned), sliding_window=windows)


SMOLLM3 = Family("smollm3", ("SmolLM3ForCausalLM", "SmolLM3Model"), _smollm3, llama.RULES, llama.PREFIX, llama.IGNORED)
