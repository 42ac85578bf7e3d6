"""The weights of one engine for another one, with data parallelism."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from jpaged.models.new_leaves import LeafSlot, NewDrafter, NewLeaf, find_layer
from jpaged.models.spec import Params
from jpaged.models.stages import PerStage


def copies(trees: Sequence[Params], slots: Sequence[Params]) -> list[NewLeaf]:
    """The leaves of another engine, whose weights have just been replaced. trees, slots: one for each pipeline stage.

    Engines on the same devices share the arrays.
    """

    def leaf_of(layer: int | None, name: str, each: Sequence[Any], wanted: Sequence[Any]) -> NewLeaf:
        """each, wanted: the leaf and its slots, by stage."""
        pairs = list(zip(each, wanted, strict=True))
        fits = [
            slot.fits(array)
            for leaf, slots in pairs
            for slot, array in zip(jax.tree.leaves(slots), jax.tree.leaves(leaf), strict=True)
        ]

        def make() -> Any:
            made = [jax.tree.map(LeafSlot.moved, slots, leaf) for leaf, slots in pairs]
            jax.block_until_ready(made)
            return made[0] if layer is not None else PerStage(tuple(made))

        return NewLeaf(layer, name, make, by_reference=all(fits), owned=not any(fits))

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


def drafter_copy(tree: Params, slots: Params) -> NewDrafter:
    """The MTP layer of another engine, on these devices."""
    return NewDrafter(lambda: jax.block_until_ready(jax.tree.map(LeafSlot.moved, slots, tree)))


def moved(
    leaves: Iterable[NewLeaf | NewDrafter], slots: Sequence[Params], of_drafter: Params | None
) -> Iterator[NewLeaf | NewDrafter]:
    """Leaves that were made for an engine, on the devices of another. slots: a tree for each pipeline stage of it.

    of_drafter: slots of its drafter. Engines on the same devices share the arrays.
    """

    def made(leaf: NewLeaf) -> Any:
        whole = leaf.make()
        if leaf.layer is None:
            parts = whole.parts if isinstance(whole, PerStage) else (whole,) * len(slots)
            of_stages = [
                jax.tree.map(LeafSlot.moved, tree[leaf.name], part) if leaf.name in tree else None
                for tree, part in zip(slots, parts, strict=True)
            ]
            return jax.block_until_ready(of_stages[0] if len(slots) == 1 else PerStage(tuple(of_stages)))
        place = find_layer(slots, leaf.layer)
        if place is None:
            return whole  # the engine refuses it
        stage, index = place
        return jax.block_until_ready(jax.tree.map(LeafSlot.moved, slots[stage]["layers"][index][leaf.name], whole))

    for leaf in leaves:
        if isinstance(leaf, NewDrafter):
            if of_drafter is not None:
                yield drafter_copy(leaf.make(), of_drafter)
            continue
        yield dataclasses.replace(leaf, make=functools.partial(made, leaf), owned=False)
