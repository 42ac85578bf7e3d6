"""The weights of one engine for another one, with data parallelism."""

from collections.abc import Sequence
from typing import Any

import jax

from jpaged.models.new_leaves import LeafSlot, NewLeaf
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
