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
    return tuple(rows)


HUGGING_FACE = Kind("EasyDeL or Hugging Face", _rows)
