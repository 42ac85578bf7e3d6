"""Mamba-2 layers in checkpoints, for the families that have them: Granite 4, Nemotron-H and Falcon-H1."""

import math

from jpaged.errors import ModelLoadError
from jpaged.models.families.base import Part, TensorRule, with_bias
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.recurrent_spec import Mamba2


def rules(at: str) -> tuple[TensorRule, ...]:
    """Rules for the tensors of a Mamba-2 layer. at: beginning of their names."""
    return (
        *with_bias(at + "in_proj", "mamba_in"),
        TensorRule(at + "conv1d.weight", "mamba_conv", (Part.CONV,)),
        TensorRule(at + "conv1d.bias", "mamba_conv_bias"),
        TensorRule(at + "A_log", "mamba_a_log"),
        TensorRule(at + "D", "mamba_d"),
        TensorRule(at + "dt_bias", "mamba_dt_bias"),
        TensorRule(at + "norm.weight", "mamba_norm"),
        *with_bias(at + "out_proj", "mamba_o"),
    )


def mamba2(config: CheckpointConfig, layers: tuple[bool, ...], width: int | None = None) -> Mamba2:
    """The Mamba-2 layers of a config with the keys of Granite 4 and Falcon-H1.

    width: of all heads together; None: whatever the config has.
    """
    # Transformers applies such limits to the tokens of prompts, but not to those of answers
    config.refuse("time_step_limit", [0.0, math.inf])
    config.refuse("quantization_config")
    config.refuse("hidden_act", "silu")  # a Mamba-2 layer has it too, after its convolution
    heads, groups = config.integer("mamba_n_heads", default=128), config.integer("mamba_n_groups", default=1)
    named = config.get("mamba_d_head", default="auto")
    head_dim = width // heads if width and named == "auto" else config.integer("mamba_d_head")
    if width and heads * head_dim != width:
        raise ModelLoadError(f"config.json: mamba_n_heads={heads} times mamba_d_head={named!r} must be {width}")
    if heads % groups:
        raise ModelLoadError(f"config.json: mamba_n_heads={heads} is not a multiple of mamba_n_groups={groups}")
    bias = config.flag("mamba_proj_bias")
    return Mamba2(
        layers, heads, head_dim, groups, config.integer("mamba_d_state", default=256),
        config.integer("mamba_d_conv", default=4, minimum=2), conv_bias=config.flag("mamba_conv_bias", default=True),
        in_bias=bias, out_bias=bias,
    )  # fmt: skip


def layer_kinds(names: list[str]) -> list[str]:
    """Transformers' newer names of the kinds of layers."""
    newer = {"mamba": "linear_attention", "attention": "full_attention"}
    return [newer.get(name, name) for name in names]
