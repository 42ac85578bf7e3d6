"""Cohere Command R (1) and Command A (2): layer norms without biases, one for attention and feed-forward side by side.

Cohere 2 has rope in the layers with a window only.
"""

import dataclasses
from collections.abc import Mapping

from jpaged.models.families import llama
from jpaged.models.families.base import Family, with_pairs
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, Norm

RULES = with_pairs(tuple(rule for rule in llama.RULES if rule.leaf != "mlp_norm"))


def _constants(_: CheckpointConfig) -> Mapping[str, float]:
    """The norms have no biases."""
    return {"attn_norm_bias": 0.0, "final_norm_bias": 0.0}


def _spec(config: CheckpointConfig, *, theta: float) -> DecoderSpec:
    config.refuse("mlp_bias", False)
    config.refuse("use_qk_norm", False)
    config.refuse("use_parallel_block", True)
    config.refuse("rotary_pct", 1, 1.0)
    config = config.with_defaults(tie_word_embeddings=True, max_position_embeddings=8192)
    return dataclasses.replace(
        llama.spec(config, theta=theta),
        norm=Norm.LAYER,
        norm_eps=config.number("layer_norm_eps", default=1e-5),
        parallel_residual=True,
        shared_norm=True,
        logit_divisor=1 / config.positive("logit_scale", 0.0625),
    )


def _cohere(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_layers_but("full_attention")
    return _spec(config, theta=500_000.0)


def _cohere2(config: CheckpointConfig) -> DecoderSpec:
    config = config.with_defaults(sliding_window=4096)
    base = _spec(config, theta=10_000.0)
    pattern = config.integer("sliding_window_pattern", default=4)
    windows = config.layer_windows(config.window(), [(layer + 1) % pattern != 0 for layer in range(base.num_layers)])
    slides = tuple(window is not None for window in windows) or (False,) * base.num_layers
    return dataclasses.replace(base, sliding_window=windows, rope_layers=slides)


COHERE = Family(
    "cohere", ("CohereForCausalLM", "CohereModel"), _cohere, RULES, llama.PREFIX, llama.IGNORED, _constants,
    has_classifier=False,
)  # fmt: skip
COHERE2 = Family(
    "cohere2", ("Cohere2ForCausalLM", "Cohere2Model"), _cohere2, RULES, llama.PREFIX, llama.IGNORED, _constants,
    has_classifier=False,
)  # fmt: skip
