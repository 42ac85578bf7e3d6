"""OPT: GPT-2's shape with ReLU and positions from row 2; opt-350m norms after the sums, embeds in fewer dimensions."""

import re
from collections.abc import Mapping

from jpaged.models.families.base import Family, Part, TensorRule
from jpaged.models.families.config import CheckpointConfig, head_share
from jpaged.models.spec import DecoderSpec, Norm, NormPlace

_DECODER = "model.decoder."
_LAYER = _DECODER + "layers.{layer}."

RULES = (
    TensorRule(_DECODER + "embed_tokens.weight", "embed"),
    TensorRule(_DECODER + "embed_positions.weight", "pos_embed"),
    TensorRule(_DECODER + "project_in.weight", "project_in"),
    TensorRule(_DECODER + "project_out.weight", "project_out"),
    TensorRule(_LAYER + "self_attn_layer_norm.weight", "attn_norm"),
    TensorRule(_LAYER + "self_attn_layer_norm.bias", "attn_norm_bias"),
    TensorRule(_LAYER + "self_attn.q_proj.weight", "qkv", (Part.Q,)),
    TensorRule(_LAYER + "self_attn.k_proj.weight", "qkv", (Part.K,)),
    TensorRule(_LAYER + "self_attn.v_proj.weight", "qkv", (Part.V,)),
    TensorRule(_LAYER + "self_attn.q_proj.bias", "qkv_bias", (Part.Q,)),
    TensorRule(_LAYER + "self_attn.k_proj.bias", "qkv_bias", (Part.K,)),
    TensorRule(_LAYER + "self_attn.v_proj.bias", "qkv_bias", (Part.V,)),
    TensorRule(_LAYER + "self_attn.out_proj.weight", "o"),
    TensorRule(_LAYER + "self_attn.out_proj.bias", "o_bias"),
    TensorRule(_LAYER + "final_layer_norm.weight", "mlp_norm"),
    TensorRule(_LAYER + "final_layer_norm.bias", "mlp_norm_bias"),
    TensorRule(_LAYER + "fc1.weight", "up"),
    TensorRule(_LAYER + "fc1.bias", "up_bias"),
    TensorRule(_LAYER + "fc2.weight", "down"),
    TensorRule(_LAYER + "fc2.bias", "down_bias"),
    TensorRule(_DECODER + "final_layer_norm.weight", "final_norm"),
    TensorRule(_DECODER + "final_layer_norm.bias", "final_norm_bias"),
    TensorRule("lm_head.weight", "lm_head"),
)


def _opt(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_common()
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    embed = config.integer("word_embed_proj_dim", default=hidden)
    norm_first, bias = config.flag("do_layer_norm_before", True), config.flag("enable_bias", True)
    return DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("ffn_dim"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_share(hidden, heads),
        max_position=config.integer("max_position_embeddings"),
        norm=Norm.LAYER,
        norm_eps=1e-5,
        norm_place=NormPlace.PRE if norm_first else NormPlace.POST,
        final_norm=norm_first and not config.flag("_remove_final_layer_norm"),
        activation=config.activation("activation_function", "relu"),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        up_bias=bias,
        down_bias=bias,
        position_offset=2,
        embed_size=embed if embed != hidden else None,
        tie_embeddings=config.flag("tie_word_embeddings", True),
    )


def _constants(config: CheckpointConfig) -> Mapping[str, float]:
    """Norms without learned gains have no tensors: gains of 1, biases of 0."""
    if config.flag("layer_norm_elementwise_affine", True):
        return {}
    return {
        "attn_norm": 1.0, "mlp_norm": 1.0, "final_norm": 1.0,
        "attn_norm_bias": 0.0, "mlp_norm_bias": 0.0, "final_norm_bias": 0.0,
    }  # fmt: skip


OPT = Family(
    "opt", ("OPTForCausalLM", "OPTModel"), _opt, RULES, "model.", re.compile(r".*decoder\.version"), _constants
)
