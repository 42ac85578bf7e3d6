"""Llama 4 (text): chunked attention with rope in pairs, and layers without rope whose queries grow with their position.

The router weighs the experts' inputs. In layers with rope, queries and keys are normalised without learned weights. The
reference does so after rope, which keeps lengths.
"""

import dataclasses
from collections.abc import Mapping

from jpaged.errors import ModelLoadError
from jpaged.models.families import llama, smollm3
from jpaged.models.families.base import Family, Part, TensorRule, with_pairs
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, Experts, QKNorm, QueryScaling, Scoring

_MLP = "model.layers.{layer}.feed_forward."
_BOTH = (Part.GATE, Part.UP)
_NORMS = ("q_norm", "k_norm")

RULES = (
    *with_pairs(tuple(rule for rule in llama.RULES if ".mlp." not in rule.name and rule.leaf not in _NORMS)),
    TensorRule(_MLP + "gate_proj.weight", "gate_up", (Part.GATE,)),
    TensorRule(_MLP + "up_proj.weight", "gate_up", (Part.UP,)),
    TensorRule(_MLP + "down_proj.weight", "down"),
    TensorRule(_MLP + "router.weight", "router"),
    TensorRule(_MLP + "experts.gate_up_proj", "expert_gate_up", _BOTH, transposed=True, all_experts=True),
    TensorRule(_MLP + "experts.down_proj", "expert_down", transposed=True, all_experts=True),
    TensorRule(_MLP + "shared_expert.gate_proj.weight", "shared_gate_up", (Part.GATE,)),
    TensorRule(_MLP + "shared_expert.up_proj.weight", "shared_gate_up", (Part.UP,)),
    TensorRule(_MLP + "shared_expert.down_proj.weight", "shared_down"),
)


def _constants(_: CheckpointConfig) -> Mapping[str, float]:
    return dict.fromkeys(_NORMS, 1.0)


def _llama4(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("mlp_bias", False)
    config.refuse("attention_bias", False)
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, max_position_embeddings=131_072,
        attention_chunk_size=8192, intermediate_size_mlp=16_384,
    )  # fmt: skip
    chunk = None if config.get("attention_chunk_size") is None else config.integer("attention_chunk_size")
    base = llama.spec(CheckpointConfig({**config.values, "attention_chunk_size": None}), theta=500_000.0)
    if base.rope is None or base.rope.scaling not in ("default", "llama3"):
        raise ModelLoadError("config.json: rope_scaling of a Llama 4 must be llama3: use a published checkpoint")
    has_rope = smollm3.rope_layers(config, base.num_layers)
    kinds = config.layer_types() or ["chunked_attention" if flag and chunk else "full_attention" for flag in has_rope]
    if len(kinds) != base.num_layers or set(kinds) - {"chunked_attention", "full_attention"}:
        config.refuse("layer_types")
    chunks = tuple(chunk if kind == "chunked_attention" else None for kind in kinds)
    step = config.integer("interleave_moe_layer_step", default=1)
    moe = config.get("moe_layers", default=list(range(step - 1, base.num_layers, step)))
    num, per_token = config.experts("num_local_experts", num=16, per_token=1)
    experts = Experts(
        num, per_token, base.intermediate_size, tuple(layer in moe for layer in range(base.num_layers)),
        scoring=Scoring.SIGMOID, weigh_inputs=True, shared_size=base.intermediate_size,
    )  # fmt: skip
    growth = QueryScaling(
        config.number("attn_scale", default=0.1), config.integer("floor_scale", default=8192), first=1,
        layers=tuple(not flag for flag in has_rope),
    )  # fmt: skip
    return dataclasses.replace(
        base,
        intermediate_size=config.integer("intermediate_size_mlp"),
        rope_layers=has_rope,
        attention_chunks=chunks if any(chunks) else (),
        qk_norm=QKNorm.HEAD if config.flag("use_qk_norm", True) else None,
        qk_norm_layers=has_rope if config.flag("use_qk_norm", True) else (),
        query_scaling=growth if config.get("attn_temperature_tuning", default=True) else None,
        experts=experts if any(experts.layers) else None,
    )


LLAMA4 = Family(
    "llama4_text", ("Llama4ForCausalLM", "Llama4TextModel"), _llama4, RULES, llama.PREFIX, llama.IGNORED, _constants,
    has_classifier=False,
)  # fmt: skip
