"""Bloom: layer norms, also after the embedding, ALiBi in place of positions, and an ungated feed-forward network."""

import re

from jpaged.models.families.base import Family, Part, TensorRule, with_bias
from jpaged.models.families.config import CheckpointConfig, head_share
from jpaged.models.spec import Activation, DecoderSpec, Norm

_LAYER = "transformer.h.{layer}."

RULES = (
    TensorRule("transformer.word_embeddings.weight", "embed"),
    *with_bias("transformer.word_embeddings_layernorm", "embed_norm"),
    *with_bias(_LAYER + "input_layernorm", "attn_norm"),
    *with_bias(_LAYER + "self_attention.query_key_value", "qkv", (Part.QKV,)),
    *with_bias(_LAYER + "self_attention.dense", "o"),
    *with_bias(_LAYER + "post_attention_layernorm", "mlp_norm"),
    *with_bias(_LAYER + "mlp.dense_h_to_4h", "up"),
    *with_bias(_LAYER + "mlp.dense_4h_to_h", "down"),
    *with_bias("transformer.ln_f", "final_norm"),
    TensorRule("lm_head.weight", "lm_head"),
)


def _bloom(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_common()
    config.refuse("apply_residual_connection_post_layernorm", False)
    if config.get("pretraining_tp", default=1) != 1:
        config.refuse("slow_but_exact", False)
    hidden = config.integer("n_embed", "hidden_size")
    heads = config.integer("n_head", "num_attention_heads")
    return DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=config.integer("n_layer", "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_share(hidden, heads),
        max_position=config.integer("seq_length", "max_position_embeddings", default=2048),
        norm=Norm.LAYER,
        norm_eps=config.number("layer_norm_epsilon", default=1e-5),
        embed_norm=True,
        activation=Activation.GELU_TANH,
        gated=False,
        qkv_bias=True,
        o_bias=True,
        up_bias=True,
        down_bias=True,
        alibi=1.0,
        tie_embeddings=config.flag("tie_word_embeddings", True),
    )


BLOOM = Family("bloom", ("BloomForCausalLM", "BloomModel"), _bloom, RULES, "transformer.", re.compile(r"(?!)"))
