"""EXAONE 4: norms after the blocks as in OLMo 2, normalised heads, and no rope in the layers without a window."""

import dataclasses

from jpaged.models.families import llama, olmo2
from jpaged.models.families.base import Family
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, QKNorm


def _exaone4(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("attention_bias", False)
    config = config.with_defaults(sliding_window=4096, num_key_value_heads=32)
    base = olmo2.spec(config)
    window = config.window()
    every = 4 if config.get("layer_types") is not None else config.integer("sliding_window_pattern", default=4)
    windows = config.layer_windows(
        window, [window is not None and (layer + 1) % every != 0 for layer in range(base.num_layers)]
    )
    has_rope = tuple(size is not None for size in windows) or (False,) * base.num_layers
    return dataclasses.replace(
        base, qk_norm=QKNorm.HEAD, sliding_window=windows, rope_layers=() if window is None else has_rope
    )


EXAONE4 = Family(
    "exaone4", ("Exaone4ForCausalLM", "Exaone4Model"), _exaone4, olmo2.RULES, llama.PREFIX, llama.IGNORED
)
