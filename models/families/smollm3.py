"""SmolLM3: Llama without rope in every fourth layer, which may have a sliding window instead."""

import dataclasses

from jpaged.errors import ModelLoadError
from jpaged.models.families import llama
from jpaged.models.families.base import Family
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec


def rope_layers(config: CheckpointConfig, layers: int) -> tuple[bool, ...]:
    """Per layer: True if it has rope. Llama 4 has the same keys."""
    interval = config.integer("no_rope_layer_interval", default=4)
    has_rope = config.get("no_rope_layers")  # despite the key's name, 1 means that the layer has rope
    if has_rope is None or has_rope == []:
        has_rope = [int((layer + 1) % interval != 0) for layer in range(layers)]
    is_list = isinstance(has_rope, list) and len(has_rope) == layers
    if not is_list or any(flag not in (0, 1) for flag in has_rope):
        raise ModelLoadError(
            f"config.json: no_rope_layers={has_rope!r} must be a list of {layers} numbers, each 0 or 1"
        )
    return tuple(bool(flag) for flag in has_rope)


def _smollm3(config: CheckpointConfig) -> DecoderSpec:
    config = config.with_defaults(num_key_value_heads=4, tie_word_embeddings=True)
    base = llama.spec(config, theta=2_000_000.0)
    has_rope = rope_layers(config, base.num_layers)
    window = None
    if config.flag("use_sliding_window") and config.get("sliding_window") is not None:
        window = config.integer("sliding_window")
    sliding = [window is not None and not flag for flag in has_rope]
    # Without a window, layer_types is ignored: it may list sliding_attention though use_sliding_window is false.
    windows = () if window is None else config.layer_windows(window, sliding)
    return dataclasses.replace(base, rope_layers=has_rope, sliding_window=windows)


SMOLLM3 = Family("smollm3", ("SmolLM3ForCausalLM", "SmolLM3Model"), _smollm3, llama.RULES, llama.PREFIX, llama.IGNORED)
