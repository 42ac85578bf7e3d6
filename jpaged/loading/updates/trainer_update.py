"""An update with a trainer's tree, whose names `jpaged.loading.trees` knows.

Leaves come in the engine's layout. One goes into the engine by reference if it is a whole array of the trainer and
fits.
"""

import functools
from typing import Any

import jax

from jpaged.loading.trees import read_tree
from jpaged.loading.trees.leaves import TreeLeaf
from jpaged.loading.updates.engine_weights import EngineWeights
from jpaged.loading.updates.tree_update import check_sources, on_devices
from jpaged.models.new_leaves import NewLeaf


def prepare_trainer(weights: Any, engine: EngineWeights) -> list[NewLeaf]:
    """Check a trainer's tree, and list its leaves. Errors as in `prepare`.

    Numbers are converted where the engine was not started with such a tree.
    """
    tree = read_tree(engine.spec, weights, fold=False, layout=engine.layout)
    leaves = []
    for (name, layer), leaf in tree.leaves.items():
        if leaf.is_reference and engine.fits(layer, name, leaf.arrays[0]):
            leaves.append(NewLeaf(layer, name, functools.partial(_same, layer, leaf), by_reference=True))
            continue
        make = functools.partial(_made, layer, name, leaf, engine)
        leaves.append(engine.on_device(NewLeaf(layer, name, make, owned=not (leaf.is_reference or engine.shared))))
    return leaves


def _same(layer: int | None, leaf: TreeLeaf) -> jax.Array:
    """The trainer's array itself."""
    _check(layer, leaf)
    return leaf.make()


def _made(layer: int | None, name: str, leaf: TreeLeaf, engine: EngineWeights) -> Any:
    """A leaf on the engine's devices, as its programs take it."""
    _check(layer, leaf)
    return on_devices(layer, name, leaf.make(), engine)


def _check(layer: int | None, leaf: TreeLeaf) -> None:
    pairs = zip(leaf.names, leaf.arrays, strict=True)
    check_sources(layer, {name: array for name, array in pairs if isinstance(array, jax.Array)})
