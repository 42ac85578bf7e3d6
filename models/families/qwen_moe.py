"""Qwen1.5-MoE, Qwen2-MoE and Qwen3-MoE: Qwen with experts in some or all layers. The older two have a shared expert."""

import dataclasses

from jpaged.errors import ModelLoadError
from jpaged.models.families import llama
from jpaged.models.families.base import Family, Part, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, Experts, QKNorm

_MLP = "model.layers.{layer}.mlp."

RULES = (
    *llama.RULES,
    TensorRule(_MLP + "gate.weight", "router"),
    TensorRule(_MLP + "experts.{expert}.gate_proj.weight", "expert_gate_up", (Part.GATE,)),
    TensorRule(_MLP + "experts.{expert}.up_proj.weight", "expert_gate_up", (Part.UP,)),
    TensorRule(_MLP + "experts.{expert}.down_proj.weight", "expert_down"),
    TensorRule(_MLP + "shared_expert.gate_proj.weight", "shared_gate_up", (Part.GATE,)),
    TensorRule(_MLP + "shared_expert.up_proj.weight", "shared_gate_up", (Part.UP,)),
    TensorRule(_MLP + "shared_expert.down_proj.weight", "shared_down"),
    TensorRule(_MLP + "shared_expert_gate.weight", "shared_gate"),
)


def experts(
    config: CheckpointConfig, num_layers: int, shared_size: int, *, num: int, per_token: int
) -> Experts | None:
    """The experts of a Qwen; None if no layer has experts. num, per_token: the family's defaults."""
    step = config.integer("decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers", default=[])
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in dense):
        accepted = f"must be a list of layer numbers from 0 to {num_layers - 1}"
        raise ModelLoadError(f"config.json: mlp_only_layers={dense!r} {accepted}")
    sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
    if not any(sparse):
        return None
    num, per_token = config.experts("num_experts", "num_local_experts", num=num, per_token=per_token)
    return Experts(
        num, per_token, config.integer("moe_intermediate_size"), sparse,
        renormalise=config.flag("norm_topk_prob"), shared_size=shared_size, shared_gate=shared_size > 0,
    )  # fmt: skip


def _qwen2_moe(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("mlp_bias", False)
    config = config.with_defaults(moe_intermediate_size=1408, shared_expert_intermediate_size=5632)
    base = llama.spec(CheckpointConfig({**config.values, "attention_bias": False}))
    uses_window = config.flag("use_sliding_window")
    window = config.with_defaults(sliding_window=4096).window() if uses_window else None
    first_full = config.integer("max_window_layers", default=28, minimum=0)
    sliding = [uses_window and layer % 2 == 0 and layer < first_full for layer in range(base.num_layers)]
    return dataclasses.replace(
        base,
        qkv_bias=config.flag("qkv_bias", True),
        sliding_window=config.layer_windows(window, sliding),
        experts=experts(
            config, base.num_layers, config.integer("shared_expert_intermediate_size"), num=60, per_token=4
        ),
    )


def _qwen3_moe(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("mlp_bias", False)
    config = config.with_defaults(moe_intermediate_size=768, num_key_value_heads=4)
    base = llama.spec(config)
    window = config.with_defaults(sliding_window=4096).window() if config.flag("use_sliding_window") else None
    config.refuse_layers_but("full_attention" if window is None else "sliding_attention")
    return dataclasses.replace(
        base,
        qk_norm=QKNorm.HEAD,
        sliding_window=() if window is None else (window,) * base.num_layers,
        experts=experts(config, base.num_layers, 0, num=128, per_token=8),
    )


QWEN2_MOE = Family(
    "qwen2_moe", ("Qwen2MoeForCausalLM", "Qwen2MoeModel"), _qwen2_moe, RULES, llama.PREFIX, llama.IGNORED
)
QWEN3_MOE = Family(
    "qwen3_moe", ("Qwen3MoeForCausalLM", "Qwen3MoeModel"), _qwen3_moe, RULES, llama.PREFIX, llama.IGNORED
)
