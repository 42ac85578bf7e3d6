"""Falcon: 7B (one norm per layer and one KV head), the newer 40B, 180B and 11B (grouped-query attention), RW (ALiBi).

ALiBi is exact here. Transformers multiplies slopes and positions in bfloat16, which rounds positions above 256.
"""

import re

from jpaged.errors import ModelLoadError
from jpaged.models.families.base import Family, Part, TensorRule, with_bias
from jpaged.models.families.config import CheckpointConfig, head_share
from jpaged.models.families.llama import check_rope
from jpaged.models.spec import DecoderSpec, Norm

_LAYER = "transformer.h.{layer}."

RULES = (
    TensorRule("transformer.word_embeddings.weight", "embed"),
    # The aliases are for models with two parallel norms.
    *with_bias(_LAYER + "input_layernorm", "attn_norm", alias=_LAYER + "ln_attn"),
    *with_bias(_LAYER + "self_attention.query_key_value", "qkv", (Part.QKV,)),
    *with_bias(_LAYER + "self_attention.dense", "o"),
    *with_bias(_LAYER + "post_attention_layernorm", "mlp_norm", alias=_LAYER + "ln_mlp"),
    *with_bias(_LAYER + "mlp.dense_h_to_4h", "up"),
    *with_bias(_LAYER + "mlp.dense_4h_to_h", "down"),
    *with_bias("transformer.ln_f", "final_norm"),
    TensorRule("lm_head.weight", "lm_head"),
)


def _falcon(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_common()
    hidden = config.integer("n_embed", "hidden_size")
    heads = config.integer("num_attention_heads", "n_head")
    head_dim = head_share(hidden, heads)
    new, parallel = config.flag("new_decoder_architecture"), config.flag("parallel_attn", True)
    norms = config.integer("num_ln_in_parallel_attn", default=2 if new else 1)
    if norms > 2 or (norms == 2 and not new) or (new and not parallel):
        raise ModelLoadError(
            f"config.json: num_ln_in_parallel_attn={norms} and parallel_attn={parallel} with "
            f"new_decoder_architecture={new} are not supported by jpaged: no published Falcon has them"
        )
    if new:
        kv_heads = config.integer("num_kv_heads", "n_head_kv", default=heads)
    else:
        kv_heads = 1 if config.flag("multi_query", True) else heads
    if heads % kv_heads:
        raise ModelLoadError(f"config.json: num_attention_heads={heads} is not a multiple of num_kv_heads={kv_heads}")
    config = config.with_defaults(max_position_embeddings=2048)
    rope = None if config.flag("alibi") else config.rope()
    if rope is not None:
        check_rope(rope, head_dim)
    bias = config.flag("bias")
    return DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("ffn_hidden_size", default=4 * hidden),
        num_layers=config.integer("num_hidden_layers", "n_layer"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=config.integer("max_position_embeddings") if rope is None else config.max_position(rope),
        norm=Norm.LAYER,
        norm_eps=config.number("layer_norm_epsilon", default=1e-5),
        parallel_residual=parallel,
        shared_norm=parallel and norms == 1,
        activation=config.activation("activation", "gelu"),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        up_bias=bias,
        down_bias=bias,
        rope=rope,
        alibi=head_dim**-0.5 if rope is None else None,  # Falcon adds ALiBi before scaling the scores, Bloom after
        tie_embeddings=config.flag("tie_word_embeddings", True),
    )


FALCON = Family(
    "falcon", ("FalconForCausalLM", "FalconModel"), _falcon, RULES, "transformer.",
    re.compile(r".*self_attention\.rotary_emb\.inv_freq"),
)  # fmt: skip
