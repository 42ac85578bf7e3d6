"""StarCoder2: Llama's attention with layer norms, biases, an ungated feed-forward network and a sliding window."""

import dataclasses

from jpaged.models.families import llama
from jpaged.models.families.base import Family, TensorRule, with_bias
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, Norm

_LAYER = "model.layers.{layer}."

RULES = (
    *(rule for rule in llama.RULES if rule.leaf not in ("gate_up", "up_bias", "down", "down_bias")),
    TensorRule(_LAYER + "input_layernorm.bias", "attn_norm_bias"),
    TensorRule(_LAYER + "post_attention_layernorm.bias", "mlp_norm_bias"),
    *with_bias(_LAYER + "mlp.c_fc", "up"),
    *with_bias(_LAYER + "mlp.c_proj", "down"),
    TensorRule("model.norm.bias", "final_norm_bias"),
)


def _starcoder2(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("attention_bias")
    config.refuse("mlp_bias")
    config = config.with_defaults(hidden_act="gelu_pytorch_tanh", num_key_value_heads=2, tie_word_embeddings=True)
    base = llama.spec(config)
    bias = config.flag("use_bias", True)
    window = config.window()
    return dataclasses.replace(
        base,
        norm=Norm.LAYER,
        norm_eps=config.number("norm_epsilon", default=1e-5),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        up_bias=bias,
        down_bias=bias,
        sliding_window=() if window is None else (window,) * base.num_layers,
    )


STARCODER2 = Family(
    "starcoder2", ("Starcoder2ForCausalLM", "Starcoder2Model"), _starcoder2, RULES, llama.PREFIX, llama.IGNORED
)
