"""Qwen3-Next and Qwen3.5: gated DeltaNet in three layers of four, attention with output gates in the fourth.

All norms add one to their weights, except the norm inside a gated DeltaNet. Qwen3-Next has experts. Qwen3.5 has dense
and sparse models, other tensor names in its DeltaNet, and mostly comes inside a vision model (`wrappers`).
"""

import dataclasses
import re
from collections.abc import Mapping

from jpaged.errors import ModelLoadError
from jpaged.models.families import llama, qwen_moe
from jpaged.models.families.base import Family, Part, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.recurrent_spec import GatedDelta
from jpaged.models.spec import DecoderSpec, Experts, Norm, QKNorm

_LAYER = "model.layers.{layer}."
_DELTA = _LAYER + "linear_attn."
_EXPERTS = _LAYER + "mlp.experts."

_ATTENTION = (
    *(rule for rule in qwen_moe.RULES if not rule.name.endswith(("q_proj.weight", "q_proj.bias"))),
    TensorRule(_LAYER + "self_attn.q_proj.weight", "qkv", (Part.GATED_Q,)),
    TensorRule(_DELTA + "conv1d.weight", "delta_conv", (Part.CONV_Q, Part.CONV_K, Part.CONV_V)),
    TensorRule(_DELTA + "A_log", "delta_a_log"),
    TensorRule(_DELTA + "dt_bias", "delta_dt_bias"),
    TensorRule(_DELTA + "norm.weight", "delta_norm"),
    TensorRule(_DELTA + "out_proj.weight", "delta_o"),
)
_NEXT_RULES = (
    *_ATTENTION,
    TensorRule(_DELTA + "in_proj_qkvz.weight", "delta_qkvz", (Part.QKV,)),
    TensorRule(_DELTA + "in_proj_ba.weight", "delta_ba", (Part.QKV,)),
)
_DENSE_RULES = (
    *_ATTENTION,
    TensorRule(_DELTA + "in_proj_qkv.weight", "delta_qkvz", (Part.DELTA_Q, Part.DELTA_K, Part.DELTA_V)),
    TensorRule(_DELTA + "in_proj_z.weight", "delta_qkvz", (Part.DELTA_Z,)),
    TensorRule(_DELTA + "in_proj_b.weight", "delta_ba", (Part.DELTA_Q,)),
    TensorRule(_DELTA + "in_proj_a.weight", "delta_ba", (Part.DELTA_K,)),
)
# Qwen3.5 has one tensor for all experts of a layer
_MOE_RULES = (
    *(rule for rule in _DENSE_RULES if not rule.leaf.startswith("expert_")),
    TensorRule(_EXPERTS + "gate_up_proj", "expert_gate_up", (Part.GATE, Part.UP), all_experts=True),
    TensorRule(_EXPERTS + "down_proj", "expert_down", all_experts=True),
)
# The layers that predict a second token (mtp) are for speculation
_IGNORED = re.compile(rf"{llama.IGNORED.pattern}|(model\.)?mtp\..*")


def _spec(config: CheckpointConfig) -> DecoderSpec:
    """All but the experts."""
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        config.refuse(name, False)
    config.refuse("hidden_act", "silu")  # a DeltaNet has it too, after its convolution
    config.refuse("attn_output_gate", True)
    rope = config.get("rope_parameters", default={})
    if isinstance(rope, Mapping):  # text has the same position in each section of images
        rope = {name: value for name, value in rope.items() if name not in ("mrope_section", "mrope_interleaved")}
    config = CheckpointConfig({**config.values, "rope_parameters": rope}).with_defaults(
        head_dim=256, max_position_embeddings=32768, linear_conv_kernel_dim=4, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
    )  # fmt: skip
    base = llama.spec(config, partial_rope=True)
    share = config.rope(partial=True, share=0.25)
    llama.check_rope(share, base.head_dim)
    return dataclasses.replace(
        base, norm=Norm.RMS_OFFSET, qk_norm=QKNorm.HEAD, rope=share, attention_gate=True,
        recurrence=_delta(config, base.num_layers),
    )  # fmt: skip


def _delta(config: CheckpointConfig, num_layers: int) -> GatedDelta:
    every = config.integer("full_attention_interval", default=4)
    types = config.layer_types() or ["full_attention" if i % every == every - 1 else "linear_attention"
                                     for i in range(num_layers)]  # fmt: skip
    if len(types) != num_layers or set(types) - {"full_attention", "linear_attention"} or len(set(types)) < 2:
        raise ModelLoadError(
            f"config.json: layer_types={types!r} must have full_attention or linear_attention for each of {num_layers} "
            "layers, and both of them"
        )
    k_heads, v_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    head_dim, width = config.integer("linear_key_head_dim"), config.integer("linear_conv_kernel_dim", minimum=2)
    config.refuse("linear_value_head_dim", head_dim)
    if v_heads % k_heads:
        raise ModelLoadError(
            f"config.json: linear_num_value_heads={v_heads} is not a multiple of linear_num_key_heads={k_heads}"
        )
    return GatedDelta(tuple(kind == "linear_attention" for kind in types), k_heads, v_heads, head_dim, width)


def _qwen3_next(config: CheckpointConfig) -> DecoderSpec:
    config = config.with_defaults(
        num_key_value_heads=2, intermediate_size=5632, moe_intermediate_size=512, norm_topk_prob=True,
        shared_expert_intermediate_size=512,
    )  # fmt: skip
    base, shared = _spec(config), config.integer("shared_expert_intermediate_size")
    return dataclasses.replace(base, experts=qwen_moe.experts(config, base.num_layers, shared, num=512, per_token=10))


def _qwen3_5(config: CheckpointConfig) -> DecoderSpec:
    return _spec(config.with_defaults(num_key_value_heads=4))


def _qwen3_5_moe(config: CheckpointConfig) -> DecoderSpec:
    config.refuse("mlp_only_layers", [])
    config = config.with_defaults(
        num_key_value_heads=2, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        intermediate_size=512,  # of no layer
    )  # fmt: skip
    base, (num, per_token) = _spec(config), config.experts("num_experts", num=256, per_token=8)
    experts = Experts(
        num, per_token, config.integer("moe_intermediate_size"), (True,) * base.num_layers, renormalise=True,
        shared_size=config.integer("shared_expert_intermediate_size"), shared_gate=True,
    )  # fmt: skip
    return dataclasses.replace(base, experts=experts)


QWEN3_NEXT = Family(
    "qwen3_next", ("Qwen3NextForCausalLM", "Qwen3NextModel"), _qwen3_next, _NEXT_RULES, llama.PREFIX, _IGNORED
)
QWEN3_5 = Family(
    "qwen3_5_text", ("Qwen3_5ForCausalLM", "Qwen3_5TextModel"), _qwen3_5, _DENSE_RULES, llama.PREFIX, _IGNORED
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text", ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"), _qwen3_5_moe, _MOE_RULES, llama.PREFIX,
    _IGNORED, has_classifier=False,
)  # fmt: skip
