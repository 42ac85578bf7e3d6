"""Gemma 3n (text): AltUp, LAuReL, per-layer embeddings, KV shared between layers, and gates that are cut off."""

import dataclasses

from jpaged.errors import ModelLoadError
from jpaged.models.families import gemma, gemma3, llama
from jpaged.models.families.base import Family, Part, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import AltUp, DecoderSpec, LayerEmbedding, LayerKV, Norm, NormPosition, QKNorm

_ALTUP, _LAUREL = "model.layers.{layer}.altup.", "model.layers.{layer}.laurel."
_MOST_STREAMS = 8
_STREAMS = range(_MOST_STREAMS - 1)

RULES = (
    *gemma3.RULES_OF_LATER,
    TensorRule(_ALTUP + "correct_output_scale", "altup_scale"),
    TensorRule(_ALTUP + "correction_coefs.weight", "altup_correct"),
    TensorRule(_ALTUP + "prediction_coefs.weight", "altup_predict", (Part.HEADS,)),
    TensorRule(_ALTUP + "modality_router.weight", "altup_router"),
    TensorRule(_ALTUP + "router_norm.weight", "altup_router_norm"),
    TensorRule(_LAUREL + "linear_left.weight", "laurel_left"),
    TensorRule(_LAUREL + "linear_right.weight", "laurel_right"),
    TensorRule(_LAUREL + "post_laurel_norm.weight", "laurel_norm"),
    *(TensorRule(f"model.altup_projections.{i}.weight", f"altup_in_{i}") for i in _STREAMS),
    *(TensorRule(f"model.altup_unembed_projections.{i}.weight", f"altup_out_{i}") for i in _STREAMS),
)


def _by_layer(config: CheckpointConfig, name: str, layers: int, default: list[float]) -> list[float]:
    """A number for each layer."""
    values = config.get(name, default=default)
    values = values if isinstance(values, list) else [values] * layers
    if len(values) != layers or not all(type(value) in (int, float) and value >= 0 for value in values):
        raise ModelLoadError(f"config.json: {name}={values!r} must be a list of {layers} numbers from 0")
    return values


def _gemma3n(config: CheckpointConfig) -> DecoderSpec:
    for name in ("use_bidirectional_attention", "attention_bias"):
        config.refuse(name, False)
    config = config.with_defaults(
        num_key_value_heads=2, sliding_window=512, max_position_embeddings=32_768, final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh",
    )  # fmt: skip
    layers = config.integer("num_hidden_layers")
    kinds = gemma3.layer_kinds(config, layers, 5)
    shared = config.integer("num_kv_shared_layers", default=15, minimum=0)
    read_from = gemma3.sources(config, kinds, shared=shared)
    widths = [int(width) for width in _by_layer(config, "intermediate_size", layers, [16_384] * layers)]
    sparse = 10 if layers > 10 else 0
    sparsity = _by_layer(config, "activation_sparsity_pattern", layers, [0.95] * sparse + [0.0] * (layers - sparse))
    streams = config.integer("altup_num_inputs", default=4, minimum=2)
    altup = AltUp(
        streams, config.integer("altup_active_idx", default=0, minimum=0), config.flag("altup_correct_scale", True)
    )
    if streams > _MOST_STREAMS or altup.active >= streams or min(widths) < 1 or max(sparsity) >= 1:
        raise ModelLoadError(
            f"config.json: altup_num_inputs={streams} must be at most {_MOST_STREAMS} and above altup_active_idx="
            f"{altup.active}, intermediate_size at least 1, and activation_sparsity_pattern below 1"
        )
    plain = {"layer_types": None, "hidden_act": config.get("hidden_activation"), "intermediate_size": max(widths)}
    base = gemma.spec(CheckpointConfig({**config.values, **plain, "rope_parameters": None, "rope_scaling": None}))
    window = config.integer("sliding_window")
    return dataclasses.replace(
        base,
        norm=Norm.RMS,
        layer_kv=tuple(LayerKV(base.num_kv_heads, base.head_dim, source=source) for source in read_from),
        norm_position=NormPosition.SANDWICH,
        qk_norm=QKNorm.HEAD,
        v_norm=True,
        rope=config.of_layers("full_attention").rope(theta=1e6),
        window_rope=gemma.window_rope(config),
        sliding_window=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        attention_scale=1.0,
        final_softcap=config.optional_positive("final_logit_softcapping"),
        intermediate_sizes=tuple(widths),
        activation_sparsity=tuple(sparsity) if any(sparsity) else (),
        layer_embed=LayerEmbedding(
            config.integer("hidden_size_per_layer_input", default=256),
            config.integer("vocab_size_per_layer_input", default=262_144),
        ),
        altup=altup,
        laurel_rank=config.integer("laurel_rank", default=64),
    )


GEMMA3N = Family(
    "gemma3n_text", ("Gemma3nForCausalLM", "Gemma3nTextModel"), _gemma3n, RULES, llama.PREFIX, gemma3.IGNORED_OF_LATER,
    has_classifier=False,
)  # fmt: skip
