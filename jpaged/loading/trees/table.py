"""Rows of a table of names: which leaf of a trainer's tree is which part of the model, and the order of its axes.

Letters of axes: d hidden size, n query heads, k KV heads, h head size, f intermediate size, v vocabulary, c parts that
share one array. Letters without a space between them are one axis: "d nh" has two axes, "d n h" has three.

Models with unlike layers (Gemma 3n, Gemma 4) have more letters. Per-layer embeddings: p size, y size of all layers, w
vocabulary. Experts: e their number, b gate and up, i intermediate size. AltUp and LAuReL: s, t, u streams, r rank, x
hidden size as an output. A single number: o.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping

import numpy as np

from jpaged.loading.live import SPLITS
from jpaged.models.spec import DecoderSpec, param_shapes

# Parts of a model, with their output axes and input axes. The engine's own order is outputs, then inputs.
MATRICES: Mapping[str, tuple[str, str]] = {
    "q": ("nh", "d"), "k": ("kh", "d"), "v": ("kh", "d"), "o": ("d", "nh"),
    "gate": ("f", "d"), "up": ("f", "d"), "down": ("d", "f"), "lm_head": ("v", "d"),
}  # fmt: skip
LAYER_NORMS = ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")
_MORE_NORMS = (
    "layer_out_norm", "router_norm", "dense_out_norm", "sparse_norm", "sparse_out_norm", "altup_scale",
    "altup_router_norm", "laurel_norm",
)  # fmt: skip
STACKED = (*LAYER_NORMS, *_MORE_NORMS, "layer_scalar")  # the engine's leaf has an axis of layers
# Leaves of unlike layers, and of their models, with the engine's own axes
UNLIKE: Mapping[str, str] = {
    "layer_in": "p d", "layer_out": "d p", "router": "e d", "router_scale": "e", "expert_gate_up": "e bi d",
    "expert_down": "e d i", "altup_router": "s d", "altup_predict": "st u", "altup_correct": "s t",
    "laurel_left": "r d", "laurel_right": "d r",
}  # fmt: skip
_STREAMS = tuple(f"altup_{kind}_{i}" for kind in ("in", "out") for i in range(7))
UNLIKE_TOP: Mapping[str, str] = {
    "layer_embed": "w y", "layer_embed_in": "y d", "layer_embed_norm": "p", **dict.fromkeys(_STREAMS, "x d"),
}  # fmt: skip
VECTORS: Mapping[str, str] = {
    **dict.fromkeys((*LAYER_NORMS, *_MORE_NORMS, "final_norm"), "d"), "q_norm": "h", "k_norm": "h",
    "q_bias": "nh", "k_bias": "kh", "v_bias": "kh", "layer_scalar": "o",
}  # fmt: skip
_OWN_AXES = {**VECTORS, **UNLIKE, **UNLIKE_TOP}
EMBED = "embed"
TOP = (EMBED, "final_norm", "lm_head", *UNLIKE_TOP)  # parts that belong to no layer
_WHOLE = "vd"
_FUSED = SPLITS | {"qkv_bias": ("q_bias", "k_bias", "v_bias")}


@dataclasses.dataclass(frozen=True)
class Row:
    """One name of a trainer's tree.

    `name` has dots between its keys, and `{i}` for a layer's number. A part of a layer whose name has no `{i}` is
    stacked over layers.
    """

    name: str
    parts: tuple[str, ...]   # several: they share one array, along the axis "c"
    axes: str                # without the axis of stacked layers
    first: int = 0           # layer 0 of the name is this layer of the model
    stride: int = 1          # step of the model's layers from one layer of the name to the next
    factor: float = 1.0      # the engine's number is the trainer's, times `factor`, plus `offset`
    offset: float = 0.0
    interleaved: bool = False  # rope pairs dimensions 2i and 2i + 1 of a head; the engine pairs i and i + h/2

    @property
    def is_stacked(self) -> bool:
        """True if the array has an axis of layers."""
        return "{i}" not in self.name and self.parts[0] not in TOP

    @property
    def letters(self) -> str:
        """The letters of all axes, in order."""
        return self.axes.replace(" ", "")

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches a name; group 1 is the layer's number."""
        return re.compile(re.escape(self.name).replace(r"\{i\}", r"(\d+)"))


@dataclasses.dataclass(frozen=True)
class Kind:
    """The names that one trainer gives to the parameters of its models."""

    name: str
    rows: Callable[[DecoderSpec], tuple[Row, ...]]
    # The spec of a model that computes with the trainer's own numbers, where these differ from Hugging Face's
    folded: Callable[[DecoderSpec], DecoderSpec] = lambda spec: spec
    stack_axis: int = 0  # axis of stacked layers, where shapes allow several
    prefixes: tuple[str, ...] = ("params.", "model.", "params.model.")  # of all names; they have no meaning


def row(name: str, part: str, axes: str = "", **more: float | bool | int) -> Row:
    """A row. part: one, or several with commas. axes: default those of a vector, or of a leaf of unlike layers."""
    parts = tuple(part.split(","))
    return Row(name, parts, axes or _OWN_AXES[parts[0]], **more)  # ty: ignore[invalid-argument-type]


@functools.lru_cache(maxsize=16)
def axis_sizes(spec: DecoderSpec) -> tuple[Mapping[str, int], ...]:
    """Size of each letter's axis, for every layer. They differ in models with unlike layers."""
    more = {"x": spec.hidden_size, "b": 2, "o": 1, "r": spec.laurel_rank}
    if spec.layer_embed is not None:
        size = spec.layer_embed.size
        more |= {"p": size, "y": spec.num_layers * size, "w": spec.layer_embed.vocab_size}
    if spec.experts is not None:
        more |= {"e": spec.experts.num, "i": spec.experts.intermediate_size}
    if spec.altup is not None:
        more |= dict.fromkeys("stu", spec.altup.streams)
    return tuple(
        more | {
            "d": own.hidden_size, "n": own.num_heads, "k": own.num_kv_heads, "h": own.head_dim,
            "f": own.intermediate_size, "v": own.vocab_size,
        }
        for own in map(spec.of_layer, range(max(1, spec.num_layers)))
    )  # fmt: skip


def row_shape(row: Row, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of the row's array, without the axis of stacked layers. sizes: of the layer's axes."""
    sizes = {**sizes, "c": len(row.parts)}
    return tuple(math.prod(sizes[letter] for letter in axis) for axis in row.axes.split())


def order_of(part: str) -> str:
    """Letters of a part in the engine's own order."""
    if part == EMBED:
        return _WHOLE
    if part in MATRICES:
        return "".join(MATRICES[part])
    return _OWN_AXES[part].replace(" ", "")


@functools.lru_cache(maxsize=16)
def parts_of(spec: DecoderSpec) -> tuple[tuple[frozenset[str], ...], frozenset[str]]:
    """The parts that a model has: of each layer, and outside of the layers."""
    tree = param_shapes(spec, np.float32)
    stacked = tree.keys() & set(STACKED)
    layers = tuple(
        frozenset(stacked.union(*(_FUSED.get(name, (name,)) for name in layer))) for layer in tree["layers"]
    )
    return layers, frozenset(tree.keys() - stacked - {"layers"})
