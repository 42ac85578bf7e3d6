"""Hugging Face's names in flax: EasyDeL (nnx), Transformers' former Flax classes (linen), and trees like them.

EasyDeL calls a norm's weights `kernel`, Transformers `weight`, others `scale`. A `kernel` is [in, out] and a `weight`
[out, in]. Layers may be stacked, without a number in their names (`nn.scan`).
"""

from jpaged.loading.trees.table import Kind, Row, row
from jpaged.models.spec import DecoderSpec, NormPosition

_MATRICES = {
    "q": ("self_attn.q_proj", "d nh"), "k": ("self_attn.k_proj", "d kh"), "v": ("self_attn.v_proj", "d kh"),
    "o": ("self_attn.o_proj", "nh d"), "gate": ("mlp.gate_proj", "d f"), "up": ("mlp.up_proj", "d f"),
    "down": ("mlp.down_proj", "f d"),
}  # fmt: skip
_PRE = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_SANDWICH = {
    "attn_norm": "input_layernorm", "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm", "mlp_out_norm": "post_feedforward_layernorm",
}  # fmt: skip


_UNLIKE = {
    "layer_in": "per_layer_input_gate.weight", "layer_out": "per_layer_projection.weight",
    "layer_out_norm": "post_per_layer_input_norm.weight", "layer_scalar": "layer_scalar",
    "router": "router.proj.weight", "router_norm": "router.scale", "router_scale": "router.per_expert_scale",
    "expert_gate_up": "experts.gate_up_proj", "expert_down": "experts.down_proj",
    "dense_out_norm": "post_feedforward_layernorm_1.weight", "sparse_norm": "pre_feedforward_layernorm_2.weight",
    "sparse_out_norm": "post_feedforward_layernorm_2.weight", "altup_scale": "altup.correct_output_scale",
    "altup_correct": "altup.correction_coefs.weight", "altup_predict": "altup.prediction_coefs.weight",
    "altup_router": "altup.modality_router.weight", "altup_router_norm": "altup.router_norm.weight",
    "laurel_left": "laurel.linear_left.weight", "laurel_right": "laurel.linear_right.weight",
    "laurel_norm": "laurel.post_laurel_norm.weight",
}  # fmt: skip
_UNLIKE_TOP = {
    "layer_embed": "embed_tokens_per_layer.weight", "layer_embed_in": "per_layer_model_projection.weight",
    "layer_embed_norm": "per_layer_projection_norm.weight",
    **{f"altup_in_{i}": f"altup_projections.{i}.weight" for i in range(7)},
    **{f"altup_out_{i}": f"altup_unembed_projections.{i}.weight" for i in range(7)},
}  # fmt: skip


def _rows(spec: DecoderSpec) -> tuple[Row, ...]:
    norms = _SANDWICH if spec.norm_position is NormPosition.SANDWICH else _PRE
    norms = norms | {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    rows = [row(f"embed_tokens.{leaf}", "embed", "v d") for leaf in ("embedding", "weight")]
    rows += [row("lm_head.kernel", "lm_head", "d v"), row("lm_head.weight", "lm_head", "v d")]
    rows += [row(f"norm.{leaf}", "final_norm") for leaf in ("kernel", "weight", "scale")]
    for layer in ("layers.{i}.", "layers."):
        for part, (name, axes) in _MATRICES.items():
            inputs, outputs = axes.split()
            rows.append(row(f"{layer}{name}.kernel", part, axes))
            rows.append(row(f"{layer}{name}.weight", part, f"{outputs} {inputs}"))
        rows += [row(f"{layer}self_attn.{part}_proj.bias", f"{part}_bias") for part in "qkv"]
        rows += [row(f"{layer}{n}.{leaf}", p) for p, n in norms.items() for leaf in ("kernel", "weight", "scale")]
        if spec.layer_kv:
            rows += [one for part, name in _UNLIKE.items() for one in _unlike_rows(f"{layer}{name}", part)]
    if spec.layer_kv:
        rows += [one for part, name in _UNLIKE_TOP.items() for one in _unlike_rows(name, part)]
    return tuple(rows)


def _unlike_rows(name: str, part: str) -> list[Row]:
    """Rows of a leaf that only models with unlike layers have. name: Transformers'."""
    found, module = [row(name, part)], name.removesuffix(".weight")
    axes = found[0].axes
    if module == name:
        return found
    if " " not in axes:
        return found + [row(f"{module}.{leaf}", part) for leaf in ("kernel", "scale")]
    if part == "layer_embed":
        return [*found, row(f"{module}.embedding", part)]
    return [*found, row(f"{module}.kernel", part, " ".join(reversed(axes.split())))]


HUGGING_FACE = Kind("EasyDeL or Hugging Face", _rows)
