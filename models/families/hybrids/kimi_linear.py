"""Kimi Linear (arXiv:2510.26692): Kimi Delta Attention in most layers, latent attention without rope in the others.

Experts are those of DeepSeek-V3.
"""

import dataclasses
from collections.abc import Mapping

from jpaged.errors import ModelLoadError
from jpaged.models.families import deepseek, llama
from jpaged.models.families.base import Family, Part, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.recurrent_spec import KimiDelta
from jpaged.models.spec import DecoderSpec

_LAYER = "model.layers.{layer}."
_DELTA = _LAYER + "self_attn."
_MOE = _LAYER + "block_sparse_moe."
_DELTA_KEYS = {"full_attn_layers", "kda_layers", "head_dim", "num_heads", "short_conv_kernel_size"}
_OWN_NAMES = ("router", "router_correction", "expert_gate_up", "expert_down", "shared_gate_up", "shared_down")

RULES = (
    *(rule for rule in deepseek.RULES if rule.leaf not in _OWN_NAMES),
    TensorRule(_DELTA + "q_proj.weight", "delta_qkv", (Part.Q,)),
    TensorRule(_DELTA + "k_proj.weight", "delta_qkv", (Part.K,)),
    TensorRule(_DELTA + "v_proj.weight", "delta_qkv", (Part.V,)),
    TensorRule(_DELTA + "q_conv1d.weight", "delta_conv", (Part.CONV_Q,)),
    TensorRule(_DELTA + "k_conv1d.weight", "delta_conv", (Part.CONV_K,)),
    TensorRule(_DELTA + "v_conv1d.weight", "delta_conv", (Part.CONV_V,)),
    TensorRule(_DELTA + "f_a_proj.weight", "delta_low", (Part.GATE,)),  # the first part of the leaf
    TensorRule(_DELTA + "g_a_proj.weight", "delta_low", (Part.UP,)),
    TensorRule(_DELTA + "f_b_proj.weight", "delta_forget", (Part.HEADS,)),
    TensorRule(_DELTA + "g_b_proj.weight", "delta_gate", (Part.HEADS,)),
    TensorRule(_DELTA + "b_proj.weight", "delta_beta"),
    TensorRule(_DELTA + "A_log", "delta_a_log", (Part.PER_HEAD,)),
    TensorRule(_DELTA + "dt_bias", "delta_dt_bias", (Part.HEADS,)),
    TensorRule(_DELTA + "o_norm.weight", "delta_norm"),
    TensorRule(_DELTA + "o_proj.weight", "delta_o"),
    TensorRule(_MOE + "gate.weight", "router"),
    TensorRule(_MOE + "gate.e_score_correction_bias", "router_correction"),
    TensorRule(_MOE + "experts.{expert}.w1.weight", "expert_gate_up", (Part.GATE,)),
    TensorRule(_MOE + "experts.{expert}.w3.weight", "expert_gate_up", (Part.UP,)),
    TensorRule(_MOE + "experts.{expert}.w2.weight", "expert_down"),
    TensorRule(_MOE + "shared_experts.gate_proj.weight", "shared_gate_up", (Part.GATE,)),
    TensorRule(_MOE + "shared_experts.up_proj.weight", "shared_gate_up", (Part.UP,)),
    TensorRule(_MOE + "shared_experts.down_proj.weight", "shared_down"),
)


def _kimi_linear(config: CheckpointConfig) -> DecoderSpec:
    for name in ("mla_use_nope", "use_grouped_topk"):
        config.refuse(name, True)
    config.refuse("attention_bias", False)
    config.refuse("hidden_act", "silu")  # also after the convolution
    config.refuse("moe_router_activation_func", "sigmoid")
    config.refuse("moe_layer_freq", 1)
    config.refuse("mla_use_output_gate", False)  # this and the next line: of later models with Kimi Delta Attention
    for name in ("attn_res_block_size", "routed_expert_hidden_size"):
        config.refuse(name)
    config = CheckpointConfig({
        "intermediate_size": 9216, "num_attention_heads": 32, "rms_norm_eps": 1e-5, "q_lora_rank": None,
        "moe_intermediate_size": 1024, "routed_scaling_factor": 2.446, **config.values,
        "rope_parameters": None, "rope_scaling": None, "rope_theta": None,  # of no effect
        "max_position_embeddings": config.integer("model_max_length", "max_position_embeddings", default=1_048_576),
        "n_routed_experts": config.integer("num_experts", "num_local_experts", default=256),
        "num_experts_per_tok": config.integer("num_experts_per_token", "num_experts_per_tok", default=8),
        "n_shared_experts": config.integer("num_shared_experts", "n_shared_experts", default=1, minimum=0),
        "n_group": config.integer("num_expert_group", "n_group", default=1),
        "norm_topk_prob": config.get("moe_renormalize", "norm_topk_prob", default=True),
        "scoring_func": None, "topk_method": None,
    })  # fmt: skip
    base = deepseek.latent_spec(config)
    layers, dense = base.num_layers, config.integer("first_k_dense_replace", default=1, minimum=0)
    experts = deepseek.sigmoid_experts(config, layers, num=256, per_token=8)
    return dataclasses.replace(
        base, rope_layers=(False,) * layers, recurrence=_delta(config, layers),
        experts=dataclasses.replace(experts, layers=config.sparse_layers(layers, dense=dense)),
    )  # fmt: skip


def _delta(config: CheckpointConfig, num_layers: int) -> KimiDelta:
    """The recurrent layers. `linear_attn_config` counts layers from 1."""
    own = config.get("linear_attn_config", default={})
    if not isinstance(own, Mapping) or set(own) - _DELTA_KEYS:
        raise ModelLoadError(
            f"config.json: linear_attn_config={own!r} must be an object with no other keys than "
            f"{', '.join(sorted(_DELTA_KEYS))}: others are not supported"
        )
    nested = CheckpointConfig({**config.values, **own})
    kda, full = nested.get("kda_layers"), nested.get("full_attn_layers")
    types = config.layer_types()
    if not types and kda is not None and full is not None:
        lists = isinstance(kda, list) and isinstance(full, list)
        if not lists or not all(type(layer) is int for layer in kda + full) or set(kda) & set(full):
            raise ModelLoadError(
                f"config.json: kda_layers={kda!r}, full_attn_layers={full!r} must be lists of different whole numbers"
            )
        names = dict.fromkeys(full, "full_attention") | dict.fromkeys(kda, "linear_attention")
        types = [names.get(layer, "none") for layer in range(1, num_layers + 1)]
    types = types or ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(num_layers)]
    if len(types) != num_layers or set(types) != {"full_attention", "linear_attention"}:
        raise ModelLoadError(
            f"config.json: layer_types={types!r}, from linear_attn_config if the key is absent, must have "
            f"full_attention or linear_attention for each of {num_layers} layers, and both of them"
        )
    heads = nested.integer("num_heads", "linear_num_heads", default=32)
    width = nested.integer("short_conv_kernel_size", "linear_conv_kernel_dim", default=4, minimum=2)
    head_dim = CheckpointConfig(own).integer("head_dim", default=config.integer("linear_head_dim", default=128))
    return KimiDelta(tuple(kind == "linear_attention" for kind in types), heads, heads, head_dim, width)


KIMI_LINEAR = Family(
    "kimi_linear", ("KimiLinearForCausalLM", "KimiLinearModel"), _kimi_linear, RULES, llama.PREFIX, llama.IGNORED,
    has_classifier=False,
)  # fmt: skip
