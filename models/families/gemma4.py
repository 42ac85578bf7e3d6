"""Gemma 4 (text): unlike KV heads, KV shared between layers, per-layer embeddings, experts next to a dense network.

Layers with a window and layers with full attention have heads of unlike sizes. In some models the last layers read the
keys and values of an earlier layer of their kind. Full attention rotates a quarter of the pairs of a head.
"""

import dataclasses
import math
from collections.abc import Mapping

from jpaged.errors import ModelLoadError
from jpaged.models.families import gemma3, llama
from jpaged.models.families.base import Family, Part, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.families.gemma3 import FULL, SLIDING
from jpaged.models.families.gemma3 import IGNORED_OF_LATER as IGNORED
from jpaged.models.spec import DecoderSpec, Experts, LayerEmbedding, LayerKV, NormPosition, QKNorm, Rope

_LAYER = "model.layers.{layer}."
_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}

RULES = (
    *gemma3.RULES_OF_LATER,
    TensorRule(_LAYER + "self_attn.k_proj.weight", "k"),
    TensorRule(_LAYER + "layer_scalar", "layer_scalar"),
    TensorRule(_LAYER + "router.proj.weight", "router"),
    TensorRule(_LAYER + "router.scale", "router_norm"),
    TensorRule(_LAYER + "router.per_expert_scale", "router_scale"),
    TensorRule(_LAYER + "experts.gate_up_proj", "expert_gate_up", (Part.GATE, Part.UP), all_experts=True),
    TensorRule(_LAYER + "experts.down_proj", "expert_down", all_experts=True),
    TensorRule(_LAYER + "post_feedforward_layernorm_1.weight", "dense_out_norm"),
    TensorRule(_LAYER + "pre_feedforward_layernorm_2.weight", "sparse_norm"),
    TensorRule(_LAYER + "post_feedforward_layernorm_2.weight", "sparse_out_norm"),
)


def _kv(config: CheckpointConfig, kinds: list[str]) -> tuple[LayerKV, ...]:
    """Keys and values of every layer."""
    same = config.flag("attention_k_eq_v")
    heads, dim = config.integer("num_key_value_heads"), config.integer("head_dim")
    full = {"head_dim": config.integer("global_head_dim", default=512)}
    if same and config.get("num_global_key_value_heads") is not None:
        full["num_key_value_heads"] = config.integer("num_global_key_value_heads")
    by_layer = config.get("per_layer_config", default={str(i): full for i, kind in enumerate(kinds) if kind == FULL})
    is_table = isinstance(by_layer, Mapping) and all(isinstance(values, Mapping) for values in by_layer.values())
    if not is_table or not all(str(layer).isdecimal() for layer in by_layer):
        config.refuse("per_layer_config")
    by_layer = {int(layer): values for layer, values in by_layer.items()}  # Transformers writes "05"
    found = []
    shared = config.integer("num_kv_shared_layers", default=0, minimum=0)
    read_from = gemma3.sources(config, kinds, shared=shared)
    for index, (kind, source) in enumerate(zip(kinds, read_from, strict=True)):
        own = CheckpointConfig({"num_key_value_heads": heads, "head_dim": dim, **by_layer.get(index, {})})
        if own.values.keys() - {"num_key_value_heads", "head_dim"}:
            config.refuse("per_layer_config")
        found.append(
            LayerKV(own.integer("num_key_value_heads"), own.integer("head_dim"), same and kind == FULL, source)
        )
    return tuple(found)


def _rope(config: CheckpointConfig, kind: str) -> Rope:
    """Rope of one kind of layers. Without scaling, Transformers ignores a share of the head: it is refused."""
    of_kind = config.of_layers(kind)
    found = of_kind.rope(partial=True)
    if found.scaling not in ("default", "linear", "proportional"):
        of_kind.refuse("rope_parameters")
    return found if found.scaling == "proportional" else of_kind.rope()


def _experts(config: CheckpointConfig, layers: int) -> Experts | None:
    if not config.flag("enable_moe_block"):
        return None
    num, per_token = config.integer("num_experts"), config.integer("top_k_experts")
    if per_token > num:
        raise ModelLoadError(f"config.json: top_k_experts={per_token} is more than num_experts={num}")
    width = config.integer("moe_intermediate_size")
    return Experts(num, per_token, width, (True,) * layers, renormalise=True, beside_dense=True)


def _gemma4(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("attention_bias", False)
    config.refuse("use_bidirectional_attention", "vision")  # between tokens of an image
    config = config.with_defaults(
        num_key_value_heads=4, head_dim=256, sliding_window=512, max_position_embeddings=131_072,
        tie_word_embeddings=True, hidden_size_per_layer_input=256, hidden_activation="gelu_pytorch_tanh",
    )  # fmt: skip
    if config.get("rope_parameters") is None:
        config = CheckpointConfig({**config.values, "rope_parameters": _ROPES})
    layers = config.integer("num_hidden_layers")
    kinds = gemma3.layer_kinds(config, layers, 6)
    kinds[-1] = FULL  # as in Transformers, whatever the config says
    kv = _kv(config, kinds)
    plain = {"rope_parameters": None, "hidden_act": config.get("hidden_activation"), "layer_types": None}
    base = llama.spec(CheckpointConfig({**config.values, **plain}))
    largest = max(kv, key=lambda one: one.heads * one.head_dim)
    for one in kv:
        if largest.heads * largest.head_dim % (one.heads * one.head_dim) or base.num_heads % one.heads:
            raise ModelLoadError(
                f"config.json: layers with {one.heads} KV heads of {one.head_dim} and with {largest.heads} of "
                f"{largest.head_dim}, and {base.num_heads} query heads: sizes must be multiples of each other"
            )
    width = base.intermediate_size * (2 if config.flag("use_double_wide_mlp") else 1)
    window = config.integer("sliding_window")
    size = config.integer("hidden_size_per_layer_input", default=0, minimum=0)
    vocab = config.integer("vocab_size_per_layer_input", default=262_144)
    return dataclasses.replace(
        base,
        num_kv_heads=largest.heads,
        head_dim=largest.head_dim,
        layer_kv=kv,
        norm_position=NormPosition.SANDWICH,
        qk_norm=QKNorm.HEAD,
        v_norm=True,
        rope=_rope(config, FULL),
        window_rope=_rope(config, SLIDING),
        sliding_window=tuple(window if kind == SLIDING else None for kind in kinds),
        attention_scale=1.0,
        embed_scale=math.sqrt(base.hidden_size),
        final_softcap=config.optional_positive("final_logit_softcapping"),
        intermediate_sizes=tuple(base.intermediate_size if one.source is None else width for one in kv),
        layer_embed=LayerEmbedding(size, vocab) if size else None,
        layer_scalars=True,
        experts=_experts(config, layers),
    )


def _unified(config: CheckpointConfig) -> DecoderSpec:
    """The text model of a Gemma 4 without towers: it has no per-layer embeddings."""
    defaults = config.with_defaults(sliding_window=1024, max_position_embeddings=262_144)
    return _gemma4(CheckpointConfig({**defaults.values, "hidden_size_per_layer_input": 0, "enable_moe_block": False}))


GEMMA4 = Family(
    "gemma4_text", ("Gemma4ForCausalLM", "Gemma4TextModel"), _gemma4, RULES, llama.PREFIX, IGNORED, has_classifier=False
)
GEMMA4_UNIFIED = Family(
    "gemma4_unified_text", ("Gemma4UnifiedForCausalLM", "Gemma4UnifiedTextModel"), _unified, RULES, llama.PREFIX,
    IGNORED, has_classifier=False,
)  # fmt: skip
