"""Names and shapes of the tensors in releases of families with Mamba-2 layers."""

from typing import Any

Shapes = dict[str, tuple[int, ...]]


def granite_mixer(c: dict[str, Any], layer: int) -> Shapes | None:
    """Shapes of a Mamba-2 layer of Granite 4; None if the layer has attention."""
    if c["layer_types"][layer] not in ("mamba", "linear_attention"):
        return None
    hidden, heads, width = c["hidden_size"], c["mamba_n_heads"], c["mamba_expand"] * c["hidden_size"]
    channels = width + 2 * c["mamba_n_groups"] * c["mamba_d_state"]
    return mamba2(
        f"model.layers.{layer}.mamba.", hidden, width, channels, heads, c["mamba_d_conv"],
        conv_bias=c.get("mamba_conv_bias", True), in_bias=c.get("mamba_proj_bias", False),
        out_bias=c.get("mamba_proj_bias", False), norm=True,
    )  # fmt: skip


def falcon_h1(c: dict[str, Any]) -> Shapes:
    """Shapes of a Falcon-H1."""
    hidden, inter, dim, width = c["hidden_size"], c["intermediate_size"], c["head_dim"], c["mamba_d_ssm"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    channels = width + 2 * c["mamba_n_groups"] * c["mamba_d_state"]
    shapes: Shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= mamba2(
            f"{at}mamba.", hidden, width, channels, c["mamba_n_heads"], c["mamba_d_conv"],
            conv_bias=c.get("mamba_conv_bias", True), in_bias=c.get("mamba_proj_bias", False),
            out_bias=c.get("projectors_bias", False), norm=c.get("mamba_rms_norm", False),
        )  # fmt: skip
        rows = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        shapes |= {f"{at}self_attn.{name}.weight": shape for name, shape in rows.items()}
        rows = {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}
        for name, shape in rows.items():
            shapes[f"{at}feed_forward.{name}.weight"] = shape
        shapes |= {f"{at}{norm}.weight": (hidden,) for norm in ("input_layernorm", "pre_ff_layernorm")}
    shapes["model.final_layernorm.weight"] = (hidden,)
    return shapes if c.get("tie_word_embeddings") else shapes | {"lm_head.weight": (c["vocab_size"], hidden)}


def nemotron_h(c: dict[str, Any]) -> Shapes:
    """Shapes of a Nemotron-H."""
    hidden, dim, heads = c["hidden_size"], c["head_dim"], c["mamba_num_heads"]
    q, kv, width = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim, heads * c["mamba_head_dim"]
    channels = width + 2 * c["n_groups"] * c["ssm_state_size"]
    kinds = c.get("layers_block_type") or list(c["hybrid_override_pattern"])
    shapes: Shapes = {"backbone.embeddings.weight": (c["vocab_size"], hidden)}
    for i, kind in enumerate(kinds):
        at = f"backbone.layers.{i}.mixer."
        shapes[f"backbone.layers.{i}.norm.weight"] = (hidden,)
        if kind in ("M", "mamba", "linear_attention"):
            shapes |= mamba2(
                at, hidden, width, channels, heads, c["conv_kernel"], conv_bias=c.get("use_conv_bias", True),
                in_bias=c.get("use_bias", False), out_bias=c.get("use_bias", False), norm=True,
            )  # fmt: skip
        elif kind in ("*", "attention", "full_attention"):
            rows = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
            shapes |= {f"{at}{name}.weight": shape for name, shape in rows.items()}
        elif kind in ("-", "mlp"):
            shapes |= _plain(at, hidden, c["intermediate_size"])
        else:
            num, latent = c["n_routed_experts"], c.get("moe_latent_size")
            shapes |= {f"{at}gate.weight": (num, hidden), f"{at}gate.e_score_correction_bias": (num,)}
            for e in range(num):
                shapes |= _plain(f"{at}experts.{e}.", latent or hidden, c["moe_intermediate_size"])
            shapes |= _plain(f"{at}shared_experts.", hidden, c["moe_shared_expert_intermediate_size"])
            if latent:
                shapes |= {f"{at}fc1_latent_proj.weight": (latent, hidden)}
                shapes |= {f"{at}fc2_latent_proj.weight": (hidden, latent)}
    shapes["backbone.norm_f.weight"] = (hidden,)
    return shapes | {"lm_head.weight": (c["vocab_size"], hidden)}


def mamba2(
    at: str, hidden: int, width: int, channels: int, heads: int, conv_width: int, *, conv_bias: bool, in_bias: bool,
    out_bias: bool, norm: bool,
) -> Shapes:  # fmt: skip
    """Shapes of a Mamba-2 layer. at: beginning of the names. width: of all heads. channels: of the convolution."""
    shapes: Shapes = {
        f"{at}in_proj.weight": (width + channels + heads, hidden), f"{at}conv1d.weight": (channels, 1, conv_width),
        f"{at}A_log": (heads,), f"{at}D": (heads,), f"{at}dt_bias": (heads,), f"{at}out_proj.weight": (hidden, width),
    }  # fmt: skip
    given = {"in_proj.bias": (in_bias, width + channels + heads), "conv1d.bias": (conv_bias, channels),
             "out_proj.bias": (out_bias, hidden), "norm.weight": (norm, width)}  # fmt: skip
    return shapes | {f"{at}{name}": (size,) for name, (is_there, size) in given.items() if is_there}


def _plain(at: str, hidden: int, inter: int) -> Shapes:
    return {f"{at}up_proj.weight": (inter, hidden), f"{at}down_proj.weight": (hidden, inter)}
