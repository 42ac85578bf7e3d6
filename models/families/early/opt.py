"""OPT: GPT-2 with ReLU, and learned positions from row 2. opt-350m: norms after residual sums, narrower embeddings."""

import re
from collections.abc import Mapping

from jpaged.models.families.base import Family, Part, TensorRule, with_bias
from jpaged.models.families.config import CheckpointConfig, head_share
from jpaged.models.spec import DecoderSpec, Norm, NormPosition

_DECODER = "model.decoder."
_LAYER = _DECODER + "layers.{layer}."

RULES = (
    TensorRule(_DECODER + "embed_tokens.weight", "embed"),
    TensorRule(_DECODER + "embed_positions.weight", "pos_embed"),
    TensorRule(_DECODER + "project_in.weight", "project_in"),
    TensorRule(_DECODER + "project_out.weight", "project_out"),
    *with_bias(_LAYER + "self_attn_layer_norm", "attn_norm"),
    *with_bias(_LAYER + "self_attn.q_proj", "qkv", (Part.Q,)),
    *with_bias(_LAYER + "self_attn.k_proj", "qkv", (Part.K,)),
    *with_bias(_LAYER + "self_attn.v_proj", "qkv", (Part.V,)),
    *with_bias(_LAYER + "self_attn.out_proj", "o"),
    *with_bias(_LAYER + "final_layer_norm", "mlp_norm"),
    *with_bias(_LAYER + "fc1", "up"),
    *with_bias(_LAYER + "fc2", "down"),
    *with_bias(_DECODER + "final_layer_norm", "final_norm"),
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
        norm_position=NormPosition.PRE if norm_first else NormPosition.POST,
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
    """Weights 1 and biases 0 for norms without learned weights, which have no tensors."""
    if config.flag("layer_norm_elementwise_affine", True):
        return {}
    return {
        "attn_norm": 1.0, "mlp_norm": 1.0, "final_norm": 1.0,
        "attn_norm_bias": 0.0, "mlp_norm_bias": 0.0, "final_norm_bias": 0.0,
    }  # fmt: skip


OPT = Family(
    "opt", ("OPTForCausalLM", "OPTModel"), _opt, RULES, "model.", re.compile(r".*decoder\.version"), _constants
)
