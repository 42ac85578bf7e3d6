"""Ministral 3: Mistral whose queries grow with their position (`spec.QueryScaling`). Devstral 2 has the same class."""

import dataclasses

from jpaged.errors import ModelLoadError
from jpaged.models.families import llama
from jpaged.models.families.base import Family
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, QueryScaling

DEFAULT_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def query_scaling(config: CheckpointConfig) -> tuple[CheckpointConfig, QueryScaling]:
    """The config without the keys of the queries' scaling, and the scaling. Also for Mistral 4."""
    rope = config.get("rope_parameters", "rope_scaling", default={})
    length = {"original_max_position_embeddings": rope.get("original_max_position_embeddings")}
    is_plain = rope.get("rope_type", rope.get("type")) in (None, "default")  # such a rope does not use the length
    config, found = config.without_rope_keys(
        "llama_4_scaling_beta", "max_position_embeddings", *(length if is_plain else ())
    )
    values = CheckpointConfig(found | length)
    if values.get("llama_4_scaling_beta") is None:
        raise ModelLoadError("config.json: llama_4_scaling_beta is missing: rope_parameters of this model must have it")
    beta = values.number("llama_4_scaling_beta", default=0.0)
    return config, QueryScaling(beta, values.integer("original_max_position_embeddings"))


def _ministral3(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("attention_bias", False)
    config.refuse("mlp_bias", False)
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, max_position_embeddings=262_144
    )
    if config.get("rope_parameters", "rope_scaling") is None:
        config = CheckpointConfig({**config.values, "rope_parameters": DEFAULT_ROPE})
    config, growth = query_scaling(config)
    base = llama.spec(config)
    return dataclasses.replace(
        base, query_scaling=growth, sliding_window=config.window_everywhere(base.num_layers)
    )


MINISTRAL3 = Family(
    "ministral3", ("Ministral3ForCausalLM", "Ministral3Model"), _ministral3, llama.RULES, llama.PREFIX, llama.IGNORED
)
