"""New weights for a running engine, checked before the first leaf of the old ones is replaced.

1. `prepare` checks the caller's weights against the model, and lists their leaves in the engine's tree.
2. `ModelRunner.update_params` calls `NewLeaf.make` for one leaf after another.

A leaf of a live tree goes into the engine by reference if it fits: shape, dtype, devices, memory and layout. Otherwise
`placed` copies it.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.loading.live import check_live
from jpaged.models.new_leaves import LeafSlot, NewLeaf
from jpaged.models.quantization import LeafPlacer
from jpaged.models.spec import DecoderSpec, Params, WeightLayout
from jpaged.models.stages import PerStage, StagedPlacer


@dataclasses.dataclass(frozen=True)
class EngineWeights:
    """Form and place of an engine's weights, for `prepare`."""

    spec: DecoderSpec        # of the whole model, before `split_spec`
    layout: WeightLayout     # of the engine's tree
    dtype: np.dtype          # of the engine's dense leaves
    placer: LeafPlacer       # as at the start
    device: jax.Device       # the engine's first
    slots: Sequence[Params]  # `LeafSlot`s, a tree for each pipeline stage


def prepare(weights: Any, engine: EngineWeights, layout: WeightLayout | None = None) -> list[NewLeaf]:
    """Check new weights, and list their leaves. Changes nothing.

    weights: a tree of live arrays, as for `LLM(config, params=...)`. layout: of the tree; None: detected.
    Raises ModelLoadError that names the leaf, and RequestError for a bad layout.
    """
    live = check_live(engine.spec, weights, layout)
    if live.layout != engine.layout:
        raise ModelLoadError(f"the weights have the layout {live.layout}, and the engine's have {engine.layout}")
    leaves = [(None, name, leaf) for name, leaf in live.params.items() if name != "layers"]
    for index, layer in enumerate(live.params["layers"]):
        leaves += [(index, name, leaf) for name, leaf in layer.items()]
    return [_from_array(layer, name, leaf, engine) for layer, name, leaf in leaves]


def _from_array(layer: int | None, name: str, leaf: jax.Array, engine: EngineWeights) -> NewLeaf:
    slot = _slot(layer, name, engine)
    by_reference = isinstance(slot, LeafSlot) and slot.fits(leaf)
    make = functools.partial(_same if by_reference else _placed, layer, name, leaf, engine)
    return NewLeaf(layer, name, make, by_reference=by_reference)


def _same(layer: int | None, name: str, leaf: jax.Array, engine: EngineWeights) -> jax.Array:
    """The caller's array itself."""
    _check_live(layer, name, leaf)
    return leaf


def _placed(layer: int | None, name: str, leaf: jax.Array, engine: EngineWeights) -> Any:
    """A leaf on the engine's devices, as its programs take it."""
    _check_live(layer, name, leaf)
    placer = engine.placer
    with jax.default_device(engine.device):
        if layer is not None or not isinstance(placer, StagedPlacer):
            return placed(name, leaf, _slot(layer, name, engine), placer.of_layer(layer))
        parts = zip(placer.parts_of(name, leaf), engine.slots, placer.placers, strict=True)
        return PerStage(tuple(
            None if part is None else placed(name, part, tree[name], of_stage) for part, tree, of_stage in parts
        ))  # fmt: skip


def placed(name: str, leaf: jax.Array, slot: Any, placer: LeafPlacer) -> Any:
    """Copy a live array to where the programs of a stage expect it, and wait until it is there.

    slot: the `LeafSlot` of an array, or a weight whose arrays are `LeafSlot`s. placer: splits and quantises the leaf.
    """
    if not isinstance(slot, LeafSlot) or slot.shape != leaf.shape:
        return placer(name, leaf)
    cast = leaf if leaf.dtype == slot.dtype else leaf.astype(slot.dtype)
    return jax.block_until_ready(slot.moved(cast))


def _slot(layer: int | None, name: str, engine: EngineWeights) -> Any:
    """The slot of a leaf. None: it is split over pipeline stages."""
    if layer is None:
        return engine.slots[0].get(name) if len(engine.slots) == 1 else None
    for tree in engine.slots:
        if layer < len(tree["layers"]):
            return tree["layers"][layer][name]
        layer -= len(tree["layers"])
    raise ModelLoadError(f"layer {layer} is not in the model")


def _check_live(layer: int | None, name: str, leaf: jax.Array) -> None:
    """Raise ModelLoadError if the caller has deleted an array since it was checked."""
    if leaf.is_deleted():
        where = name if layer is None else f"layers[{layer}].{name}"
        raise ModelLoadError(f"params.{where} was deleted during the update")


def copies(trees: Sequence[Params], slots: Sequence[Params]) -> list[NewLeaf]:
    """The leaves of another engine, whose weights have just been replaced. trees, slots: one for each pipeline stage.

    Engines on the same devices share the arrays.
    """

    def leaf_of(layer: int | None, name: str, each: Sequence[Any], wanted: Sequence[Any]) -> NewLeaf:
        """each, wanted: the leaf and its slots, by stage."""
        pairs = list(zip(each, wanted, strict=True))
        shared = all(
            slot.fits(array)
            for leaf, slots in pairs
            for slot, array in zip(jax.tree.leaves(slots), jax.tree.leaves(leaf), strict=True)
        )

        def make() -> Any:
            made = [jax.tree.map(LeafSlot.moved, slots, leaf) for leaf, slots in pairs]
            jax.block_until_ready(made)
            return made[0] if layer is not None else PerStage(tuple(made))

        return NewLeaf(layer, name, make, by_reference=shared)

    first = 0
    leaves = [
        leaf_of(None, name, [tree.get(name) for tree in trees], [tree.get(name) for tree in slots])
        for name in sorted({name for tree in slots for name in tree} - {"layers"})
    ]
    for tree, of_stage in zip(trees, slots, strict=True):
        for index, layer in enumerate(tree["layers"]):
            leaves += [
                leaf_of(first + index, name, [leaf], [of_stage["layers"][index][name]]) for name, leaf in layer.items()
            ]
        first += len(tree["layers"])
    return leaves
