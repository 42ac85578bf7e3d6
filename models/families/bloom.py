"""Bloom: layer norms, one of them behind the embedding, ALiBi instead of positions, a plain feed-forward layer."""

import re

from jpaged.models.families.base import Family, Part, TensorRule
from jpaged.models.families.config import CheckpointConfig, head_share
from jpaged.models.spec import Activation, DecoderSpec, Norm

_LAYER = "transformer.h.{layer}."

RULES = (
    TensorRule("transformer.word_embeddings.weight", "embed"),
    TensorRule("transformer.word_embeddings_layernorm.weight", "embed_norm"),
    TensorRule("transformer.word_embeddings_layernorm.bias", "embed_norm_bias"),
    TensorRule(_LAYER + "input_layernorm.weight", "attn_norm"),
    TensorRule(_LAYER + "input_layernorm.bias", "attn_norm_bias"),
    TensorRule(_LAYER + "self_attention.query_key_value.weight", "qkv", (Part.QKV,)),
    TensorRule(_LAYER + "self_attention.query_key_value.bias", "qkv_bias", (Part.QKV,)),
    TensorRule(_LAYER + "self_attention.dense.weight", "o"),
    TensorRule(_LAYER + "self_attention.dense.bias", "o_bias"),
    TensorRule(_LAYER + "post_attention_layernorm.weight", "mlp_norm"),
    TensorRule(_LAYER + "post_attention_layernorm.bias", "mlp_norm_bias"),
    TensorRule(_LAYER + "mlp.dense_h_to_4h.weight", "up"),
    TensorRule(_LAYER + "mlp.dense_h_to_4h.bias", "up_bias"),
    TensorRule(_LAYER + "mlp.dense_4h_to_h.weight", "down"),
    TensorRule(_LAYER + "mlp.dense_4h_to_h.bias", "down_bias"),
    TensorRule("transformer.ln_f.weight", "final_norm"),
    TensorRule("transformer.ln_f.bias", "final_norm_bias"),
    TensorRule("lm_head.weight", "lm_head"),
)


def _bloom(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_common()
    config.refuse("apply_residual_connection_post_layernorm", False)
    hidden = config.integer("hidden_size", "n_embed")
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
