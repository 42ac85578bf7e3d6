"""GPT-2: layer norms, learned positions, an ungated feed-forward network. Matrices are [in, out]; q, k, v are fused."""

import re

from jpaged.models.families.base import Family, Part, TensorRule, with_bias
from jpaged.models.families.config import CheckpointConfig, head_share
from jpaged.models.spec import DecoderSpec, Norm

_LAYER = "transformer.h.{layer}."
_QKV = (Part.Q, Part.K, Part.V)

RULES = (
    TensorRule("transformer.wte.weight", "embed"),
    TensorRule("transformer.wpe.weight", "pos_embed"),
    *with_bias(_LAYER + "ln_1", "attn_norm"),
    *with_bias(_LAYER + "attn.c_attn", "qkv", _QKV, transposed=True),
    *with_bias(_LAYER + "attn.c_proj", "o", transposed=True),
    *with_bias(_LAYER + "ln_2", "mlp_norm"),
    *with_bias(_LAYER + "mlp.c_fc", "up", transposed=True),
    *with_bias(_LAYER + "mlp.c_proj", "down", transposed=True),
    *with_bias("transformer.ln_f", "final_norm"),
    TensorRule("lm_head.weight", "lm_head"),
)


def _gpt2(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_common()
    config.refuse("scale_attn_by_inverse_layer_idx", False)
    hidden = config.integer("n_embd", "hidden_size", default=768)
    heads = config.integer("n_head", "num_attention_heads", default=12)
    return DecoderSpec(
        vocab_size=config.integer("vocab_size", default=50257),
        hidden_size=hidden,
        intermediate_size=config.integer("n_inner", default=4 * hidden),
        num_layers=config.integer("n_layer", "num_hidden_layers", default=12),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_share(hidden, heads),
        max_position=config.integer("n_positions", "max_position_embeddings", default=1024),
        norm=Norm.LAYER,
        norm_eps=config.number("layer_norm_epsilon", default=1e-5),
        activation=config.activation("activation_function", "gelu_new"),
        gated=False,
        qkv_bias=True,
        o_bias=True,
        up_bias=True,
        down_bias=True,
        attention_scale=None if config.flag("scale_attn_weights", True) else 1.0,
        tie_embeddings=config.flag("tie_word_embeddings", True),
    )


GPT2 = Family(
    "gpt2",
    ("GPT2LMHeadModel", "GPT2Model"),
    _gpt2,
    RULES,
    "transformer.",
    re.compile(r".*h\.\d+\.attn\.(bias|masked_bias)"),
)
