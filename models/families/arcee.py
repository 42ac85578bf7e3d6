"""Arcee (AFM): Llama with a feed-forward network without a gate, with squared ReLU."""

import dataclasses

from jpaged.models.families import llama
from jpaged.models.families.base import Family, with_bias
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec

RULES = (
    *(rule for rule in llama.RULES if rule.leaf not in ("gate_up", "up_bias")),
    *with_bias("model.layers.{layer}.mlp.up_proj", "up"),
)


def _arcee(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_layers_but("full_attention")
    config = config.with_defaults(hidden_act="relu2", rms_norm_eps=1e-5, max_position_embeddings=4096)
    return dataclasses.replace(llama.spec(config), gated=False)


ARCEE = Family("arcee", ("ArceeForCausalLM", "ArceeModel"), _arcee, RULES, llama.PREFIX, llama.IGNORED)
