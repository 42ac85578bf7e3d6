"""Rows of a table of names: which leaf of a trainer's tree is which part of the model, and the order of its axes.

Letters of axes: d hidden size, n query heads, k KV heads, h head size, f intermediate size, v vocabulary, c parts that
share one array. Letters without a space between them are one axis: "d nh" has two axes, "d n h" has three.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping

from jpaged.models.spec import DecoderSpec, QKNorm

# Parts of a model, with their output axes and input axes. The engine's own order is outputs, then inputs.
MATRICES: Mapping[str, tuple[str, str]] = {
    "q": ("nh", "d"), "k": ("kh", "d"), "v": ("kh", "d"), "o": ("d", "nh"),
    "gate": ("f", "d"), "up": ("f", "d"), "down": ("d", "f"), "lm_head": ("v", "d"),
}  # fmt: skip
LAYER_NORMS = ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")
VECTORS: Mapping[str, str] = {
    **dict.fromkeys((*LAYER_NORMS, "final_norm"), "d"), "q_norm": "h", "k_norm": "h",
    "q_bias": "nh", "k_bias": "kh", "v_bias": "kh",
}  # fmt: skip
EMBED = "embed"
TOP = (EMBED, "final_norm", "lm_head")  # parts that belong to no layer
_WHOLE = "vd"


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
    """A row. part: one, or several with commas. axes: default those of a vector."""
    parts = tuple(part.split(","))
    return Row(name, parts, axes or VECTORS[parts[0]], **more)  # ty: ignore[invalid-argument-type]


def axis_sizes(spec: DecoderSpec) -> dict[str, int]:
    """Size of each letter's axis."""
    return {
        "d": spec.hidden_size, "n": spec.num_heads, "k": spec.num_kv_heads, "h": spec.head_dim,
        "f": spec.intermediate_size, "v": spec.vocab_size,
    }  # fmt: skip


def row_shape(row: Row, spec: DecoderSpec) -> tuple[int, ...]:
    """Shape of the row's array, without the axis of stacked layers."""
    sizes = axis_sizes(spec) | {"c": len(row.parts)}
    return tuple(math.prod(sizes[letter] for letter in axis) for axis in row.axes.split())


def order_of(part: str) -> str:
    """Letters of a part in the engine's own order."""
    if part == EMBED:
        return _WHOLE
    return "".join(MATRICES[part]) if part in MATRICES else VECTORS[part]


def parts_of(spec: DecoderSpec) -> tuple[set[str], set[str]]:
    """The parts that a model has: of every layer, and outside of the layers."""
    layer = {*MATRICES, *LAYER_NORMS} - {"lm_head"}
    if spec.norm_position.value != "sandwich":
        layer -= {"attn_out_norm", "mlp_out_norm"}
    if spec.qk_norm is QKNorm.HEAD:
        layer |= {"q_norm", "k_norm"}
    if spec.qkv_bias:
        layer |= {"q_bias", "k_bias", "v_bias"}
    top = {EMBED, "final_norm"}
    if not (spec.tie_embeddings or spec.pools):
        top.add("lm_head")
    return layer, top
