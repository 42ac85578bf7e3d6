"""Llama 2 and 3: RMS norms, gated SiLU, rope with any scaling, grouped-query attention, optional biases."""

import re

from jpaged.errors import ModelLoadError
from jpaged.models.families.base import Family, Part, TensorRule, with_bias
from jpaged.models.families.config import CheckpointConfig, head_share
from jpaged.models.spec import DecoderSpec, Norm, Rope

_LAYER = "model.layers.{layer}."

# Mistral and Qwen have the same tensor names.
RULES = (
    TensorRule("model.embed_tokens.weight", "embed"),
    TensorRule(_LAYER + "input_layernorm.weight", "attn_norm"),
    *with_bias(_LAYER + "self_attn.q_proj", "qkv", (Part.Q,)),
    *with_bias(_LAYER + "self_attn.k_proj", "qkv", (Part.K,)),
    *with_bias(_LAYER + "self_attn.v_proj", "qkv", (Part.V,)),
    TensorRule(_LAYER + "self_attn.q_norm.weight", "q_norm"),
    TensorRule(_LAYER + "self_attn.k_norm.weight", "k_norm"),
    *with_bias(_LAYER + "self_attn.o_proj", "o"),
    TensorRule(_LAYER + "post_attention_layernorm.weight", "mlp_norm"),
    TensorRule(_LAYER + "mlp.gate_proj.weight", "gate_up", (Part.GATE,)),
    TensorRule(_LAYER + "mlp.up_proj.weight", "gate_up", (Part.UP,)),
    TensorRule(_LAYER + "mlp.gate_proj.bias", "up_bias", (Part.GATE,)),
    TensorRule(_LAYER + "mlp.up_proj.bias", "up_bias", (Part.UP,)),
    *with_bias(_LAYER + "mlp.down_proj", "down"),
    TensorRule("model.norm.weight", "final_norm"),
    TensorRule("lm_head.weight", "lm_head"),
)
PREFIX = "model."
IGNORED = re.compile(r".*rotary_emb\.(inv_freq|cos_cached|sin_cached)")


def spec(
    config: CheckpointConfig, *, partial_rope: bool = False, theta: float = 10000.0, share: float = 1.0
) -> DecoderSpec:
    """Spec of a Llama. Other families extend it.

    partial_rope: accept `partial_rotary_factor`. theta, share: defaults of the rope's base and of that factor.
    """
    config.refuse_common()
    hidden = config.integer("hidden_size")
    heads, kv_heads = config.heads()
    head_dim = config.integer("head_dim") if config.get("head_dim") else head_share(hidden, heads)
    rope = config.rope(partial=partial_rope, theta=theta, share=share)
    check_rope(rope, head_dim)
    return DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=config.max_position(rope),
        norm=Norm.RMS,
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        activation=config.activation("hidden_act", "silu"),
        qkv_bias=config.flag("attention_bias"),
        o_bias=config.flag("attention_bias"),
        up_bias=config.flag("mlp_bias"),
        down_bias=config.flag("mlp_bias"),
        rope=rope,
        tie_embeddings=config.flag("tie_word_embeddings"),
    )


def check_rope(rope: Rope, head_dim: int) -> None:
    """Raise ModelLoadError if the rotary embedding does not fit head_dim."""
    rotated = int(head_dim * rope.partial)
    if rotated % 2 or not rotated:
        part = "" if rope.partial == 1 else f"partial_rotary_factor={rope.partial} of "
        raise ModelLoadError(f"config.json: {part}head_dim={head_dim} must be even: rope rotates pairs of dimensions")
    if rope.scaling == "dynamic" and rotated == 2:
        raise ModelLoadError("config.json: head_dim=2 must be at least 4 for dynamic rope scaling")
    for name in ("short_factor", "long_factor"):
        count = len(getattr(rope, name))
        if rope.scaling == "longrope" and count != rotated // 2:
            raise ModelLoadError(f"config.json: {name} has {count} numbers, it needs {rotated // 2}")


def _llama(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_layers_but("full_attention")
    return spec(config)


LLAMA = Family("llama", ("LlamaForCausalLM", "LlamaModel"), _llama, RULES, PREFIX, IGNORED)
