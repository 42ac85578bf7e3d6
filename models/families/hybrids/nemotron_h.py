"""Nemotron-H and Nemotron 3: each layer is one block: Mamba-2, attention without rope, or a feed-forward network.

Feed-forward networks have no gate: down(relu(up(x))^2). Nemotron 3 has experts like DeepSeek-V3's, with such networks.
Those of the largest model work on a compressed hidden state.
"""

import dataclasses
import re

from jpaged.errors import ModelLoadError
from jpaged.models.families import llama
from jpaged.models.families.base import Family, Part, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.families.hybrids import mamba
from jpaged.models.spec import Activation, DecoderSpec, Experts, Scoring

_LAYER = "backbone.layers.{layer}."
_MIXER = _LAYER + "mixer."
_OLDER = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # in hybrid_override_pattern
_KINDS = tuple(_OLDER.values())


def _rule(name: str, leaf: str, part: Part = Part.WHOLE) -> TensorRule:
    """A rule for the names of the releases. Transformers' own begin with `model.`"""
    return TensorRule(name, leaf, (part,), aliases=(name.replace("backbone.", "model."),))


RULES = (
    _rule("backbone.embeddings.weight", "embed"),
    _rule(_LAYER + "norm.weight", "attn_norm"),
    _rule(_MIXER + "q_proj.weight", "qkv", Part.Q),
    _rule(_MIXER + "k_proj.weight", "qkv", Part.K),
    _rule(_MIXER + "v_proj.weight", "qkv", Part.V),
    _rule(_MIXER + "o_proj.weight", "o"),
    _rule(_MIXER + "up_proj.weight", "up"),
    _rule(_MIXER + "down_proj.weight", "down"),
    _rule(_MIXER + "gate.weight", "router"),
    _rule(_MIXER + "gate.e_score_correction_bias", "router_correction"),
    _rule(_MIXER + "experts.{expert}.up_proj.weight", "expert_gate_up", Part.GATE),
    _rule(_MIXER + "experts.{expert}.down_proj.weight", "expert_down"),
    _rule(_MIXER + "shared_experts.up_proj.weight", "shared_gate_up", Part.GATE),
    _rule(_MIXER + "shared_experts.down_proj.weight", "shared_down"),
    _rule(_MIXER + "fc1_latent_proj.weight", "latent_in"),
    _rule(_MIXER + "fc2_latent_proj.weight", "latent_out"),
    *(_rule(rule.name, rule.leaf, rule.parts[0]) for rule in mamba.rules(_MIXER)),
    _rule("backbone.norm_f.weight", "final_norm"),
    TensorRule("lm_head.weight", "lm_head"),
)
# The layers that predict a second token (mtp) are for speculation
_IGNORED = re.compile(rf"{llama.IGNORED.pattern}|mtp\..*")


def _nemotron_h(config: CheckpointConfig) -> DecoderSpec:
    for name in ("attention_bias", "mlp_bias", "residual_in_fp32"):
        config.refuse(name, False)
    config.refuse("sliding_window")
    config.refuse("mlp_hidden_act", "relu2")
    config.refuse("mamba_hidden_act", "silu")
    kinds = _kinds(config)
    config = CheckpointConfig({
        "hidden_size": 4096, "vocab_size": 131_072, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 4096, "intermediate_size": 21_504, **config.values,
        "num_hidden_layers": len(kinds), "hidden_act": "silu", "rope_scaling": None, "rope_parameters": None,
        "partial_rotary_factor": None, "rms_norm_eps": config.number("layer_norm_epsilon", default=1e-5),
        "mamba_n_heads": config.integer("mamba_num_heads", default=128),
        "mamba_d_head": config.integer("mamba_head_dim", default=64),
        "mamba_n_groups": config.integer("mamba_n_groups", "n_groups", default=8),
        "mamba_d_state": config.integer("ssm_state_size", default=128),
        "mamba_d_conv": config.integer("mamba_d_conv", "conv_kernel", default=4),
        "mamba_conv_bias": config.get("mamba_conv_bias", "use_conv_bias", default=True),
        "mamba_proj_bias": config.flag("use_bias"),
    })  # fmt: skip
    return dataclasses.replace(
        llama.spec(config), activation=Activation.RELU2, gated=False, rope_layers=(False,) * len(kinds),
        recurrence=mamba.mamba2(config, tuple(kind == "linear_attention" for kind in kinds)),
        attention_layers=tuple(kind == "full_attention" for kind in kinds),
        lone_feed_forward=tuple(kind in ("mlp", "moe") for kind in kinds),
        experts=_experts(config, tuple(kind == "moe" for kind in kinds)) if "moe" in kinds else None,
    )  # fmt: skip


def _kinds(config: CheckpointConfig) -> list[str]:
    """Kind of each layer. Transformers ignores `num_hidden_layers`, too."""
    pattern = config.get("hybrid_override_pattern", default="ME*-")
    kinds = config.get("layers_block_type", "layer_types", default=[_OLDER.get(name, name) for name in pattern])
    kinds = mamba.layer_kinds(kinds)
    if set(kinds) - set(_KINDS) or not {"linear_attention", "full_attention"} <= set(kinds):
        raise ModelLoadError(
            f"config.json: layers_block_type={kinds!r} must have one of {', '.join(_KINDS)} for each layer, and at "
            "least one each of the first two"
        )
    return kinds


def _experts(config: CheckpointConfig, layers: tuple[bool, ...]) -> Experts:
    num, per_token = config.experts("n_routed_experts", "num_local_experts", num=8, per_token=2)
    groups = config.integer("n_group", default=1)
    return Experts(
        num, per_token, config.integer("moe_intermediate_size", default=7688), layers, scoring=Scoring.SIGMOID,
        renormalise=config.flag("norm_topk_prob", default=True),
        scale=config.positive("routed_scaling_factor", default=1.0), correction=True, expert_groups=groups,
        expert_groups_per_token=config.integer("topk_group", default=1) if groups > 1 else 0, expert_group_top=2,
        shared_size=config.integer("moe_shared_expert_intermediate_size", default=7688),
        latent_size=config.integer("moe_latent_size") if config.get("moe_latent_size") else None,
    )  # fmt: skip


NEMOTRON_H = Family(
    "nemotron_h", ("NemotronHForCausalLM", "NemotronHModel"), _nemotron_h, RULES, "backbone.", _IGNORED,
    has_classifier=False,
)  # fmt: skip
