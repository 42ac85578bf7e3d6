"""An update with a tree of live arrays.

A leaf goes into the engine by reference if it fits: shape, dtype, devices, memory and layout. Otherwise `placed` copies
it. A tree may have another `WeightLayout` than the engine's: `LayoutChange` joins or divides its leaves.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jpaged.errors import ModelLoadError
from jpaged.loading.live import EXPERT_GATE_UP, SPLITS, LiveParams, check_live, layout_shapes
from jpaged.loading.updates.engine_weights import EngineWeights
from jpaged.models.new_leaves import LeafSlot, NewLeaf
from jpaged.models.quantization import LeafPlacer
from jpaged.models.resharding import on_auto_mesh
from jpaged.models.sharding import SplitWeight
from jpaged.models.spec import DecoderSpec, WeightLayout
from jpaged.models.stages import PerStage, StagedPlacer

_MERGED = ("o", EXPERT_GATE_UP)  # live arrays of these may have other axes, and are no parts of a fused leaf
_WHOLE = {part: leaf for leaf, parts in SPLITS.items() for part in parts}


def prepare_tree(weights: Any, engine: EngineWeights, layout: WeightLayout | None = None) -> list[NewLeaf]:
    """Check a tree, and list its leaves. Arguments and errors as in `prepare`."""
    live = check_live(engine.spec, weights, layout)
    tree = layout_shapes(engine.spec, live.dtype, engine.layout)
    leaves = [_new_leaf(None, name, live, engine) for name in tree if name != "layers"]
    for index, layer in enumerate(tree["layers"]):
        leaves += [_new_leaf(index, name, live, engine) for name in layer]
    return leaves


def _new_leaf(layer: int | None, name: str, live: LiveParams, engine: EngineWeights) -> NewLeaf:
    given = live.params if layer is None else live.params["layers"][layer]
    sources = _sources(name, given)
    turned = name in live.layout.transposed, name in engine.layout.transposed
    same = name in given and turned[0] == turned[1]
    if same and engine.fits(layer, name, given[name]):
        return NewLeaf(layer, name, functools.partial(_same, layer, sources), by_reference=True)
    change = None if same else LayoutChange.of(engine.spec, layer, name, live.layout, engine.layout)
    return engine.on_device(NewLeaf(layer, name, functools.partial(_made, layer, name, sources, change, engine)))


def _sources(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The caller's leaves that a leaf of the engine is made of."""
    names = (name,) if name in given else SPLITS[name] if name in SPLITS else (_WHOLE[name],)
    return {each: given[each] for each in names}


def _same(layer: int | None, sources: Mapping[str, jax.Array]) -> jax.Array:
    """The caller's array itself."""
    check_sources(layer, sources)
    return next(iter(sources.values()))


def _made(
    layer: int | None, name: str, sources: Mapping[str, jax.Array], change: "LayoutChange | None",
    engine: EngineWeights,
) -> Any:  # fmt: skip
    """A leaf on the engine's devices, as its programs take it."""
    check_sources(layer, sources)
    leaf = next(iter(sources.values()))
    if change is not None:
        leaf = _changed({name: on_auto_mesh(source) for name, source in sources.items()}, change=change)
    return on_devices(layer, name, leaf, engine)


def on_devices(layer: int | None, name: str, leaf: jax.Array, engine: EngineWeights) -> Any:
    """A dense leaf of the engine's layout, on its devices: an array, a quantised weight, or a part for each stage."""
    placer = engine.placer
    if layer is not None and engine.config.devices_per_engine > 1:
        shape = layout_shapes(engine.spec, leaf.dtype, engine.layout)["layers"][layer][name].shape
        leaf = leaf.reshape(shape)  # an axis of heads is not divided
    if layer is not None or not isinstance(placer, StagedPlacer):
        return placed(name, leaf, engine.slot(layer, name), placer.of_layer(layer))
    parts = zip(placer.parts_of(name, leaf), engine.slots, placer.placers, strict=True)
    return PerStage(tuple(
        None if part is None else placed(name, part, tree[name], of_stage) for part, tree, of_stage in parts
    ))  # fmt: skip


def placed(name: str, leaf: jax.Array, slot: Any, placer: LeafPlacer) -> Any:
    """Copy a live array to where the programs of a stage expect it, and wait until it is there.

    slot: the `LeafSlot` of an array, or a weight whose arrays are `LeafSlot`s. placer: splits and quantises the leaf.
    """
    if isinstance(slot, (LeafSlot, SplitWeight)):
        dtype = slot.parts[0].dtype if isinstance(slot, SplitWeight) else slot.dtype
        leaf = leaf if leaf.dtype == dtype else leaf.astype(dtype)
    if isinstance(slot, LeafSlot) and slot.shape != leaf.shape and math.prod(slot.shape) == leaf.size:
        leaf = leaf.reshape(slot.shape)  # an axis of heads, or none
    if not isinstance(slot, LeafSlot) or slot.shape != leaf.shape or not slot.sharding.is_fully_addressable:
        return placer(name, leaf)
    return jax.block_until_ready(slot.moved(leaf))


def check_sources(layer: int | None, sources: Mapping[str, jax.Array]) -> None:
    """Raise ModelLoadError if the caller has deleted an array since it was checked."""
    for name, array in sources.items():
        if array.is_deleted():
            where = name if layer is None else f"layers[{layer}].{name}"
            raise ModelLoadError(f"params.{where} was deleted during the update")


def in_layout(leaf: NewLeaf, engine: EngineWeights) -> list[NewLeaf]:
    """The leaves of the engine's layout, from a dense leaf of the default layout. A part makes the whole leaf first."""
    if leaf.name in _MERGED:
        leaf = _with_axes_of_slot(leaf, engine)
    if engine.layout == WeightLayout():
        return [leaf]
    splits = {"qkv": engine.layout.split_qkv, "gate_up": engine.layout.split_gate_up}
    names = SPLITS[leaf.name] if splits.get(leaf.name) else (leaf.name,)
    if names == (leaf.name,) and leaf.name not in engine.layout.transposed:
        return [leaf]

    def part_of(name: str) -> NewLeaf:
        change = LayoutChange.of(engine.spec, leaf.layer, name, WeightLayout(), engine.layout)
        slot, placer = engine.slot(leaf.layer, name), engine.placer.of_layer(leaf.layer)
        make = lambda: placed(name, _changed({leaf.name: leaf.make()}, change=change), slot, placer)  # noqa: E731
        return dataclasses.replace(leaf, name=name, make=make)

    return [part_of(name) for name in names]


def _with_axes_of_slot(leaf: NewLeaf, engine: EngineWeights) -> NewLeaf:
    """The same leaf, with the axes that the engine's array has."""
    slot, placer = engine.slot(leaf.layer, leaf.name), engine.placer.of_layer(leaf.layer)

    def make() -> Any:
        made = leaf.make()
        if not (isinstance(made, jax.Array) and isinstance(slot, LeafSlot)) or made.ndim == len(slot.shape):
            return made
        return placed(leaf.name, made, slot, placer)

    return dataclasses.replace(leaf, make=make)


@dataclasses.dataclass(frozen=True)
class LayoutChange:
    """Makes one leaf of a tree from the leaves of a tree with another layout. Static: an argument of a program."""

    spec: DecoderSpec
    layer: int  # the first layer with the leaf's sizes, so that equal layers share a program
    name: str
    given: WeightLayout
    wanted: WeightLayout

    @classmethod
    def of(
        cls, spec: DecoderSpec, layer: int | None, name: str, given: WeightLayout, wanted: WeightLayout
    ) -> "LayoutChange":
        """The change of a layer's leaf. layer: None for a leaf outside of `layers`."""
        same = 0
        if spec.layer_kv and layer is not None:
            kinds = [(kv, spec.width(i)) for i, kv in enumerate(spec.layer_kv)]
            same = kinds.index(kinds[layer])
        return cls(spec, same, name, given, wanted)

    def __call__(self, sources: dict[str, Shaped[Array, "..."]]) -> Shaped[Array, "..."]:
        """The leaf. sources: by name, one matrix or the parts of a fused one."""
        shapes = layout_shapes(self.spec, jnp.float32, self.given)
        of_layer = shapes["layers"][self.layer] if shapes["layers"] else {}
        # A matrix of the caller may have an axis of heads and one of head_dim
        flat = {n: leaf.reshape(of_layer[n].shape) if n in _WHOLE or n == "o" else leaf for n, leaf in sources.items()}
        upright = {n: leaf.T if n in self.given.transposed else leaf for n, leaf in flat.items()}
        if self.name in upright:
            leaf = upright[self.name]
        elif self.name in SPLITS:
            leaf = self._joined([upright[part] for part in SPLITS[self.name]])
        else:
            leaf = self._part(upright[_WHOLE[self.name]])
        return leaf.T if self.name in self.wanted.transposed else leaf

    def _joined(self, parts: list[Shaped[Array, "rows in"]]) -> Shaped[Array, "..."]:
        if self.name == "gate_up":
            return jnp.stack(parts)
        of_layer = self.spec.of_layer(self.layer)
        heads, dim = of_layer.num_kv_heads, of_layer.head_dim
        return jnp.concatenate([part.reshape(heads, -1, dim, part.shape[-1]) for part in parts], axis=1)

    def _part(self, whole: Shaped[Array, "..."]) -> Shaped[Array, "rows in"]:
        if self.name in SPLITS["gate_up"]:
            return whole[SPLITS["gate_up"].index(self.name)]
        part = {"q": whole[:, :-2], "k": whole[:, -2], "v": whole[:, -1]}[self.name]
        return part.reshape(-1, whole.shape[-1])


@functools.partial(jax.jit, static_argnames="change")
def _changed(sources: dict[str, Shaped[Array, "..."]], *, change: LayoutChange) -> Shaped[Array, "..."]:
    return change(sources)
