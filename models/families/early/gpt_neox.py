"""GPT-NeoX and Pythia: layer norms, parallel attention and feed-forward network, rope on a quarter of each head."""

import re

from jpaged.models.families.base import Family, Part, TensorRule, with_bias
from jpaged.models.families.config import CheckpointConfig, head_share
from jpaged.models.families.llama import check_rope
from jpaged.models.spec import DecoderSpec, Norm

_LAYER = "gpt_neox.layers.{layer}."

RULES = (
    TensorRule("gpt_neox.embed_in.weight", "embed"),
    *with_bias(_LAYER + "input_layernorm", "attn_norm"),
    *with_bias(_LAYER + "attention.query_key_value", "qkv", (Part.QKV,)),
    *with_bias(_LAYER + "attention.dense", "o"),
    *with_bias(_LAYER + "post_attention_layernorm", "mlp_norm"),
    *with_bias(_LAYER + "mlp.dense_h_to_4h", "up"),
    *with_bias(_LAYER + "mlp.dense_4h_to_h", "down"),
    *with_bias("gpt_neox.final_layer_norm", "final_norm"),
    TensorRule("lm_head.weight", "lm_head", aliases=("embed_out.weight",)),  # alias: old checkpoints
)


def _gpt_neox(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_common()
    config.refuse_layers_but("full_attention")
    config = config.with_defaults(
        rope_theta=config.get("rotary_emb_base"), partial_rotary_factor=config.get("rotary_pct")
    )
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    bias = config.flag("attention_bias", True)
    rope = config.rope(partial=True, share=0.25)
    check_rope(rope, head_share(hidden, heads))
    return DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_share(hidden, heads),
        max_position=config.max_position(rope),
        norm=Norm.LAYER,
        norm_eps=config.number("layer_norm_eps", default=1e-5),
        parallel_residual=config.flag("use_parallel_residual", True),
        activation=config.activation("hidden_act", "gelu"),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        up_bias=True,
        down_bias=True,
        rope=rope,
        tie_embeddings=config.flag("tie_word_embeddings"),
    )


GPT_NEOX = Family(
    "gpt_neox",
    ("GPTNeoXForCausalLM", "GPTNeoXModel"),
    _gpt_neox,
    RULES,
    "gpt_neox.",
    re.compile(r".*layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
)
