"""ModernBERT (arXiv:2412.13663): an encoder with rope, gated feed-forward networks, and windows in two layers of three.

Its layers are like a decoder's, with the norms before the blocks. The first layer's attention has no norm, because the
embedding has one.
"""

import dataclasses
import re

from jpaged.models.families.base import Family, Part, TensorRule, with_bias
from jpaged.models.families.config import CheckpointConfig, head_share
from jpaged.models.spec import DecoderSpec, Encoder, Norm, Rope, TextPooling

_LAYER = "model.layers.{layer}."
_QKV = (Part.Q, Part.K, Part.V)
_THETAS = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}

RULES = (
    TensorRule("model.embeddings.tok_embeddings.weight", "embed"),
    *with_bias("model.embeddings.norm", "embed_norm"),
    *(dataclasses.replace(rule, first_layer=1) for rule in with_bias(_LAYER + "attn_norm", "attn_norm")),
    *with_bias(_LAYER + "attn.Wqkv", "qkv", _QKV),
    *with_bias(_LAYER + "attn.Wo", "o"),
    *with_bias(_LAYER + "mlp_norm", "mlp_norm"),
    TensorRule(_LAYER + "mlp.Wi.weight", "gate_up", (Part.GATE, Part.UP)),
    TensorRule(_LAYER + "mlp.Wi.bias", "up_bias", (Part.GATE, Part.UP)),
    *with_bias(_LAYER + "mlp.Wo", "down"),
    *with_bias("model.final_norm", "final_norm"),
    *with_bias("head.dense", "head"),
    *with_bias("head.norm", "head_norm"),
    *with_bias("classifier", "score"),
)


def _modernbert(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_common()
    hidden = config.integer("hidden_size", default=768)
    heads = config.integer("num_attention_heads", default=12)
    layers = config.integer("num_hidden_layers", default=22)
    attention, mlp = config.flag("attention_bias"), config.flag("mlp_bias")
    every = config.integer("global_attn_every_n_layers", default=3)
    window = 2 * (config.integer("local_attention", default=128) // 2) + 1
    return DecoderSpec(
        vocab_size=config.integer("vocab_size", default=50368),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", default=1152),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_share(hidden, heads),
        max_position=config.integer("max_position_embeddings", default=8192),
        norm=Norm.LAYER,
        norm_eps=config.number("norm_eps", default=1e-5),
        embed_norm=True,
        first_norm=False,
        activation=config.activation("hidden_activation", "gelu"),
        qkv_bias=attention,
        o_bias=attention,
        up_bias=mlp,
        down_bias=mlp,
        rope=_rope(config, "full_attention", "global_rope_theta"),
        window_rope=_rope(config, "sliding_attention", "local_rope_theta"),
        sliding_window=config.layer_windows(window, [layer % every != 0 for layer in range(layers)]),
        pools=True,
        encoder=_encoder(config),
    )


def _rope(config: CheckpointConfig, kind: str, old_key: str) -> Rope:
    """Rope of one kind of layers: in new files from `rope_parameters`, in old ones from a key of its own."""
    theta = config.positive(old_key, _THETAS[kind])
    rope = config.of_layers(kind).rope(theta=theta)
    if rope.scaling != "default":
        config.refuse("rope_parameters")
        config.refuse("rope_scaling")
    return rope


def _encoder(config: CheckpointConfig) -> Encoder:
    if config.num_labels() is None:
        return Encoder()
    named = config.get("classifier_pooling", default="cls")
    if named not in ("cls", "mean"):
        config.refuse("classifier_pooling", "cls", "mean")
    return Encoder(
        pooling=TextPooling(named),
        head=config.activation("classifier_activation", "gelu"),
        head_bias=config.flag("classifier_bias"),
        head_norm=True,
        score_bias=True,
    )


def _constants(config: CheckpointConfig) -> dict[str, float]:
    """Biases 0 for norms without a bias, which have no such tensors."""
    norms = () if config.flag("norm_bias") else ("embed_norm", "attn_norm", "mlp_norm", "final_norm", "head_norm")
    return {f"{name}_bias": 0.0 for name in norms}


MODERNBERT = Family(
    "modernbert",
    ("ModernBertForMaskedLM", "ModernBertModel"),
    _modernbert,
    RULES,
    "model.",
    re.compile(r"head\..*|decoder\..*"),
    _constants,
)
