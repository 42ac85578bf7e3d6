"""OLMo 2: Llama with norms after the blocks, and with queries and keys normalised over all heads together."""

import dataclasses

from jpaged.models.families import llama
from jpaged.models.families.base import Family, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, NormPosition, QKNorm

_LAYER = "model.layers.{layer}."

RULES = (
    *(rule for rule in llama.RULES if rule.leaf not in ("attn_norm", "mlp_norm")),
    TensorRule(_LAYER + "post_attention_layernorm.weight", "attn_out_norm"),
    TensorRule(_LAYER + "post_feedforward_layernorm.weight", "mlp_out_norm"),
)


def spec(config: CheckpointConfig, *, theta: float = 10000.0) -> DecoderSpec:
    """Spec of an OLMo 2, which OLMo 3 extends. theta: default base of the rope."""
    config.refuse("mlp_bias", False)
    config.refuse("clip_qkv")
    base = llama.spec(config.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=2048), theta=theta)
    return dataclasses.replace(base, norm_position=NormPosition.OUTPUT, qk_norm=QKNorm.PROJECTION)


def _olmo2(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_layers_but("full_attention")
    return spec(config)


OLMO2 = Family(
    "olmo2", ("Olmo2ForCausalLM", "Olmo2Model"), _olmo2, RULES, llama.PREFIX, llama.IGNORED,
    has_classifier=False,
)  # fmt: skip
