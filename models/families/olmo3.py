"""OLMo 3: OLMo 2 with a sliding window in three layers of four, and scaled rope in the fourth only."""

import dataclasses

from jpaged.models.families import llama, olmo2
from jpaged.models.families.base import Family
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, Rope

_THETA = 500000.0


def _olmo3(config: CheckpointConfig) -> DecoderSpec:
    local = config.of_layers("sliding_attention")
    base = olmo2.spec(config.of_layers("full_attention"), theta=_THETA)
    window = config.with_defaults(sliding_window=4096).window()
    return dataclasses.replace(
        base,
        window_rope=Rope(theta=_THETA) if local is config else local.rope(theta=_THETA),
        sliding_window=config.layer_windows(window, [(layer + 1) % 4 != 0 for layer in range(base.num_layers)]),
    )


OLMO3 = Family("olmo3", ("Olmo3ForCausalLM", "Olmo3Model"), _olmo3, olmo2.RULES, llama.PREFIX, llama.IGNORED)
