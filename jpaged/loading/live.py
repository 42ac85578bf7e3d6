"""Checks live arrays against the spec of a model. The engine then uses them without a copy."""

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from jpaged.errors import ModelLoadError, RequestError
from jpaged.loading.dtypes import BY_NAME
from jpaged.models.families.wrappers import text_config
from jpaged.models.spec import FLOAT32_LEAVES, HASHED, DecoderSpec, WeightLayout, param_shapes

SPLITS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}  # fused leaves, and the leaves that may replace them
_LAYER_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
_HEAD_MATRICES = ("q", "k", "v", "o")  # may have an axis of heads and one of head_dim
EXPERT_GATE_UP = "expert_gate_up"  # may have one axis for gate and up: [experts, 2 * intermediate, in]
_TOP_MATRICES = ("lm_head", "project_in", "project_out")
_PASS_LAYOUT = "pass layout=jpaged.models.spec.WeightLayout(split_qkv=…, split_gate_up=…, transposed=frozenset({…}))"


@dataclasses.dataclass(frozen=True)
class LiveParams:
    """Live arrays after their checks: the caller's own arrays, their layout and their dtype."""

    params: dict[str, Any]
    layout: WeightLayout
    dtype: np.dtype


def config_values(model_config: Any) -> dict[str, Any]:
    """Return a Hugging Face config as a dictionary. It may be a dictionary, or an object with `to_dict()`.

    Of a wrapper of a text model: the text model's.
    """
    if isinstance(model_config, Mapping):
        return text_config(model_config)
    if hasattr(model_config, "to_dict"):
        return text_config(model_config.to_dict())
    raise ModelLoadError(
        f"the config of live arrays must be a DecoderSpec, a Hugging Face config or its dictionary, "
        f"not a {type(model_config).__name__}"
    )


def check_live(spec: DecoderSpec, params: Any, layout: WeightLayout | None = None) -> LiveParams:
    """Check a tree of JAX arrays against the spec. Returns the caller's arrays, not copies.

    params: the tree of `param_shapes(spec, dtype)`. q, k, v ("q" [heads * head_dim, in], …) and gate, up
        ([intermediate, in]) may be separate leaves. Matrices may be stored [out, in] or [in, out]. All layers have one
        layout, also where their heads and widths differ.
    layout: None: detected. Shapes show the orientation. A square matrix has that of its layer's other matrices. If the
        shapes do not determine the orientation, the caller must pass `layout`.
    Raises ModelLoadError that names the leaf, and RequestError for a layout that transposes leaves other than matrices.
    """
    if layout is not None:
        _check_layout(layout)
    if not isinstance(params, Mapping):
        raise ModelLoadError(f"live params must be a dictionary of arrays, not a {type(params).__name__}")
    layers = params.get("layers")
    if isinstance(layers, Mapping) or hasattr(layers, "shape"):
        raise ModelLoadError(
            "params['layers'] is stacked over layers: pass a tuple with one dictionary of arrays per layer. A stacked "
            "tree cannot be used without copying each layer's matrices: slice it first, for example "
            "tuple(jax.tree.map(lambda a: a[i], stacked) for i in range(num_layers))"
        )
    if not isinstance(layers, Sequence) or not all(isinstance(layer, Mapping) for layer in layers):
        raise ModelLoadError(
            "params['layers'] must be a tuple with one dictionary of arrays per layer; docs/live_arrays.md lists the "
            "names of the leaves next to Hugging Face's names"
        )
    if len(layers) != spec.num_layers:
        raise ModelLoadError(f"params['layers'] has {len(layers)} layers, the config calls for {spec.num_layers}")

    dtype = _dtype(params, layers)
    found = _detect_layout(spec, params, layers) if layout is None else layout
    expected = layout_shapes(spec, dtype, found)
    for i, (layer, shapes) in enumerate(zip(layers, expected["layers"], strict=True)):
        _check_leaves(f"layers[{i}]", layer, shapes, dtype, spec.of_layer(i))
    # A pooling model needs no lm_head, but may have one.
    _check_leaves("", params, expected, dtype, spec, unused={"layers", "lm_head"} if spec.pools else {"layers"})
    checked = {name: params[name] for name in expected} | {"layers": tuple(dict(layer) for layer in layers)}
    return LiveParams(checked, found, dtype)


def refuse_remote(array: Any, name: str = "an array") -> None:
    """Raise ModelLoadError for an array with parts in other processes. name: in the message."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        raise ModelLoadError(
            f"{name} {list(array.shape)} has parts in other processes: live arrays must be on this process's devices. "
            "Gather them first, for example with jax.experimental.multihost_utils.process_allgather(params, "
            "tiled=True), or save a checkpoint and pass its path"
        )


def layout_shapes(spec: DecoderSpec, dtype: Any, layout: WeightLayout) -> dict[str, Any]:
    """Return `param_shapes` in the given layout: a tree of ShapeDtypeStructs."""
    tree = param_shapes(spec, dtype)

    def turned(name: str, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape[::-1], leaf.dtype) if name in layout.transposed else leaf

    layers = []
    for i, fused in enumerate(tree["layers"]):
        layer = dict(fused)
        if layout.split_qkv and "qkv" in layer:
            qkv, own = layer.pop("qkv"), spec.of_layer(i)
            rows = {"q": own.num_heads * own.head_dim} | dict.fromkeys("kv", own.num_kv_heads * own.head_dim)
            layer |= {n: jax.ShapeDtypeStruct((rows[n], spec.hidden_size), qkv.dtype) for n in SPLITS["qkv"]}
        if layout.split_gate_up and "gate_up" in layer:
            both = layer.pop("gate_up")
            layer |= {n: jax.ShapeDtypeStruct(both.shape[1:], both.dtype) for n in SPLITS["gate_up"]}
        layers.append({name: turned(name, leaf) for name, leaf in layer.items()})
    return {name: turned(name, leaf) for name, leaf in tree.items() if name != "layers"} | {"layers": tuple(layers)}


def merged_shape(found: Sequence[int], wanted: Sequence[int], spec: DecoderSpec) -> tuple[int, ...]:
    """The shape of a matrix, with its axes of heads and head_dim as one: [heads, head_dim, in] is [out, in].

    wanted: the shape [out, in] or [in, out] that shows which of its axes has the heads.
    """
    found = tuple(found)
    if len(found) != 3:
        return found
    for axis in (0, 1):
        heads = found[axis : axis + 2]
        merged = (*found[:axis], math.prod(heads), *found[axis + 2 :])
        if heads[1] == spec.head_dim and heads[0] in (spec.num_heads, spec.num_kv_heads) and merged == tuple(wanted):
            return merged
    return found


def without_head_axes(spec: DecoderSpec, live: LiveParams) -> LiveParams:
    """Live arrays with the axes of `layout_shapes`, as engines of several devices divide them. Others are copied."""
    shapes = layout_shapes(spec, live.dtype, live.layout)["layers"]
    layers = tuple(
        {n: leaf if leaf.shape == of_layer[n].shape else leaf.reshape(of_layer[n].shape) for n, leaf in layer.items()}
        for layer, of_layer in zip(live.params["layers"], shapes, strict=True)
    )
    return dataclasses.replace(live, params=live.params | {"layers": layers})


def _check_layout(layout: WeightLayout) -> None:
    strange = sorted(map(str, set(layout.transposed) - {*_LAYER_MATRICES, *_TOP_MATRICES}))
    if strange:
        names = ", ".join((*_LAYER_MATRICES, *_TOP_MATRICES))
        raise RequestError("layout", layout, f"{strange[0]} cannot be stored [in, out]; only {names} can")


def _dtype(params: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> np.dtype:
    """Return the dtype of all leaves. Raises ModelLoadError if they differ, or if a leaf is not a live JAX array."""
    dtype, first = None, ""
    named = [(name, f"params[{name!r}]", leaf) for name, leaf in params.items() if name != "layers"]
    for i, layer in enumerate(layers):
        named += [(name, f"params['layers'][{i}][{name!r}]", leaf) for name, leaf in layer.items()]
    for short, name, leaf in named:
        if not isinstance(leaf, jax.Array):
            raise ModelLoadError(f"{name} is a {type(leaf).__name__}, not a JAX array: put it on the device first")
        if leaf.is_deleted():
            raise ModelLoadError(f"{name} has been deleted, for example by donating it to a jitted function")
        if short == HASHED:
            if leaf.dtype != np.int32:
                raise ModelLoadError(f"{name} is {leaf.dtype}: it must be int32, because it has numbers of experts")
            continue
        if np.dtype(leaf.dtype) not in BY_NAME.values():
            raise ModelLoadError(f"{name} is {leaf.dtype}; supported are {', '.join(BY_NAME)}")
        if short in FLOAT32_LEAVES:
            if leaf.dtype != np.float32:
                raise ModelLoadError(f"{name} is {leaf.dtype}: it must be float32, also in models of another dtype")
            continue
        if dtype is not None and leaf.dtype != dtype:
            raise ModelLoadError(f"{name} is {leaf.dtype}, but {first} is {dtype}: all arrays must have one dtype")
        dtype, first = np.dtype(leaf.dtype), name
    if dtype is None:
        raise ModelLoadError("params has no arrays")
    return dtype


def _detect_layout(spec: DecoderSpec, params: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> WeightLayout:
    """Detect the layout from names and shapes in the first layer. All layers must have the same layout."""
    # With unlike layers: a layer with values of its own, which has a fused leaf or three leaves
    number = next((i for i, kv in enumerate(spec.layer_kv) if kv.source is None and not kv.values_are_keys), 0)
    first = layers[number] if layers else {}
    plain = WeightLayout(split_qkv="q" in first, split_gate_up="gate" in first)
    expected = layout_shapes(spec, np.float32, plain)

    def is_turned(leaf: Any, shape: tuple[int, ...]) -> bool | None:
        """Return True if the leaf is stored [in, out], False if [out, in], None if it is square."""
        if len(shape) != 2 or shape[0] == shape[1]:
            return None
        return merged_shape(leaf.shape, shape[::-1], spec.of_layer(number)) == shape[::-1]

    wanted = expected["layers"][number] if layers else {}
    seen = {n: is_turned(first[n], wanted[n].shape) for n in _LAYER_MATRICES if n in first and n in wanted}
    known = {turned for turned in seen.values() if turned is not None}
    if not plain.split_qkv or "gate_up" in wanted:
        known.add(False)  # a fused leaf is always [.., in]
    unknown = [name for name, turned in seen.items() if turned is None]
    if unknown and len(known) > 1:
        raise ModelLoadError(
            f"params['layers'][{number}][{unknown[0]!r}] is square, and the layers' other matrices are stored in both "
            f"orientations: store them all [out, in], or all [in, out], or {_PASS_LAYOUT}"
        )
    if unknown and not known:
        raise ModelLoadError(
            f"params['layers'][{number}][{unknown[0]!r}] and all other matrices of a layer are square, so their shapes "
            f"do not distinguish [out, in] from [in, out]: {_PASS_LAYOUT}"
        )
    if known == {True}:
        seen |= dict.fromkeys(unknown, True)
    top = {n: is_turned(params[n], expected[n].shape) for n in _TOP_MATRICES if n in params and n in expected}
    unknown = [name for name, turned in top.items() if turned is None]
    if unknown and known != {False}:
        raise ModelLoadError(
            f"params[{unknown[0]!r}] is square, and the layers' matrices are not all stored [out, in], so its "
            f"orientation is unknown: {_PASS_LAYOUT}"
        )
    return dataclasses.replace(plain, transposed=frozenset(n for n, turned in (seen | top).items() if turned))


def _check_leaves(
    path: str, leaves: Mapping[str, Any], shapes: Mapping[str, Any], dtype: np.dtype, spec: DecoderSpec,
    unused: Set[str] = frozenset(),
) -> None:  # fmt: skip
    def name(leaf: str) -> str:
        return f"params.{path}.{leaf}" if path else f"params.{leaf}"

    for leaf in shapes.keys() - {"layers"}:
        if leaf not in leaves:
            raise ModelLoadError(
                f"{name(leaf)} is missing; the config calls for {dtype.name}{list(shapes[leaf].shape)}"
            )
        wanted, found = shapes[leaf].shape, tuple(leaves[leaf].shape)
        is_joined = leaf == EXPERT_GATE_UP and found == (wanted[0], wanted[1] * wanted[2], wanted[3])
        if not is_joined and (merged_shape(found, wanted, spec) if leaf in _HEAD_MATRICES else found) != wanted:
            raise ModelLoadError(
                f"{name(leaf)} has shape {list(found)}, the config calls for {list(wanted)}"
            )
    extra = sorted(leaves.keys() - shapes.keys() - unused)
    if extra:
        size = math.prod(leaves[extra[0]].shape)
        raise ModelLoadError(f"{name(extra[0])} ({size:,} elements) is not a parameter of a model with this config")
