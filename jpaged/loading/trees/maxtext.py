"""MaxText's names (AI-Hypercomputer/maxtext, checkpoint_conversion/utils/param_mapping.py), scanned or not.

Its numbers differ from Hugging Face's in four places. Queries of Llama and of Gemma 1 and 2 include the scale of
attention. Llama 3.1's rope pairs neighbouring dimensions. Gemma's norms include the one that is added. Gemma's
embedding includes its factor: the engine then computes with another factor, and does not copy the embedding.

A scanned tree (`scan_layers=True`, the default) stacks layers along axis 1. Gemma 2 scans pairs of layers, a local and
a global one, and Gemma 3 blocks of six layers.
"""

import dataclasses
import math

from jpaged.loading.trees.table import Kind, Row, row
from jpaged.models.spec import DecoderSpec, Norm, NormPosition, QKNorm

_PATTERN = 6  # layers of a Gemma 3 block: five local ones and a global one
_NORMS = {"attn_norm": "pre_self_attention_layer_norm", "mlp_norm": "post_self_attention_layer_norm"}
_GEMMA_NORMS = {
    "attn_norm": "pre_self_attention_norm", "attn_out_norm": "post_self_attention_norm",
    "mlp_norm": "pre_ffw_norm", "mlp_out_norm": "post_ffw_norm",
}  # fmt: skip


def _rows(spec: DecoderSpec) -> tuple[Row, ...]:
    top = "decoder."
    gemma = spec.norm is Norm.RMS_OFFSET
    rows = [
        row("token_embedder.embedding", "embed", "v d", factor=_embed_factor(spec)),
        row(f"{top}decoder_norm.scale", "final_norm", offset=-1.0 if gemma else 0.0),
        row(f"{top}logits_dense.kernel", "lm_head", "d v"),
    ]
    if gemma and spec.qk_norm is QKNorm.HEAD:
        whole = spec.num_layers - spec.num_layers % _PATTERN
        rows += _layer_rows(spec, f"{top}layers_{{i}}.")
        for place in range(_PATTERN):
            rows += _layer_rows(spec, f"{top}layers.layers_{place}.", first=place, stride=_PATTERN)
        rows += _layer_rows(spec, f"{top}layers_remainder.layers_{{i}}.", first=whole)
    elif spec.norm_position is NormPosition.SANDWICH:
        for first, end in enumerate(("_local", "_global")):
            for layer in ("layers_{i}.", "layers."):
                rows += _layer_rows(spec, top + layer, end=end, first=first, stride=2)
    else:
        for layer in ("layers_{i}.", "layers."):
            rows += _layer_rows(spec, top + layer)
    return tuple(rows)


def _layer_rows(spec: DecoderSpec, layer: str, end: str = "", first: int = 0, stride: int = 1) -> list[Row]:
    gemma = spec.norm is Norm.RMS_OFFSET
    interleaved = spec.rope is not None and spec.rope.scaling == "llama3"
    # Qwen and Gemma 3 multiply queries by the scale, as the engine does
    factor = 1.0 if spec.qkv_bias or spec.qk_norm is QKNorm.HEAD else 1 / spec.scale
    attention, mlp = f"{layer}self_attention{end}.", f"{layer}mlp{end}."
    rows = [
        row(f"{attention}query.kernel", "q", "d n h", factor=factor, interleaved=interleaved),
        row(f"{attention}key.kernel", "k", "d k h", interleaved=interleaved),
        row(f"{attention}value.kernel", "v", "d k h"),
        row(f"{attention}out.kernel", "o", "n h d"),
        *(row(f"{attention}{name}.bias", f"{name[0]}_bias", f"{axis} h") for name, axis in _BIASES.items()),
        row(f"{mlp}wi_0.kernel", "gate", "d f"),
        row(f"{mlp}wi_1.kernel", "up", "d f"),
        row(f"{mlp}wo.kernel", "down", "f d"),
    ]
    offset = -1.0 if gemma else 0.0
    norms = _GEMMA_NORMS if gemma else _NORMS
    rows += [row(f"{layer}{name}{end}.scale", part, offset=offset) for part, name in norms.items()]
    rows += [row(f"{attention}{name}_norm.scale", f"{name[0]}_norm", offset=offset) for name in ("query", "key")]
    return [dataclasses.replace(one, first=first, stride=stride) for one in rows]


_BIASES = {"query": "n", "key": "k", "value": "k"}


def _embed_factor(spec: DecoderSpec) -> float:
    """Factor from MaxText's embedding to the spec's. 1 if the spec is `_folded`."""
    return 1 / spec.embed_scale if spec.norm is Norm.RMS_OFFSET else 1.0


def _folded(spec: DecoderSpec) -> DecoderSpec:
    """Gemma with sqrt(hidden) in its embedding: MaxText does not multiply by it, and divides the logits by it."""
    if spec.norm is not Norm.RMS_OFFSET or not spec.tie_embeddings:
        return spec
    return dataclasses.replace(spec, embed_scale=1.0, logit_divisor=math.sqrt(spec.hidden_size))


MAXTEXT = Kind("MaxText", _rows, _folded, stack_axis=1)
