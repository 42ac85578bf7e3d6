"""New weights for a running engine, checked before the first leaf of the old ones is replaced.

1. `prepare` checks the caller's weights against the model, and lists their leaves in the engine's tree.
2. `ModelRunner.update_params` calls `NewLeaf.make` for one leaf after another.

| Weights | Module |
|---|---|
| a tree of live arrays | `tree_update.py` |
| a tree with a trainer's names | `trainer_update.py` |
| arrays by Hugging Face's names: a dictionary or an iterator | `named_update.py` |
| a folder or a GGUF file | `stored_update.py` |
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jpaged.errors import ModelLoadError, RequestError
from jpaged.loading.live import refuse_remote
from jpaged.loading.trees import is_trainer_tree, refuse_layout
from jpaged.loading.updates.copies import copies, drafter_copy, moved
from jpaged.loading.updates.drafter_update import MTPLayer
from jpaged.loading.updates.engine_weights import EngineWeights
from jpaged.loading.updates.named_update import prepare_iterator, prepare_names
from jpaged.loading.updates.stored_update import prepare_path, sample
from jpaged.loading.updates.trainer_update import prepare_trainer
from jpaged.loading.updates.tree_update import prepare_tree
from jpaged.models.new_leaves import NewDrafter, NewLeaf
from jpaged.models.spec import WeightLayout

__all__ = ["EngineWeights", "MTPLayer", "copies", "drafter_copy", "moved", "prepare", "sample"]


def prepare(
    weights: Any, engine: EngineWeights, layout: WeightLayout | None = None
) -> Callable[[], Iterable[NewLeaf | NewDrafter]]:
    """Check new weights. Returns a function that returns their leaves, to be called once. Changes nothing.

    weights: a tree of live arrays, as for `LLM(config, params=...)`, also with a trainer's names. Or a dictionary, or
        an iterator of pairs, from Hugging Face's names to jax or numpy arrays. Or the path of a checkpoint folder, a
        converted folder or a GGUF file.
    layout:  of the tree; None: detected.

    Raises ModelLoadError that names the leaf or the tensor, and RequestError for a bad argument. An iterator can only
    be checked while it is read: its leaves raise these errors later.
    """
    if isinstance(weights, Mapping):
        for array in jax.tree.leaves(weights):
            refuse_remote(array)
    if isinstance(weights, Mapping) and not weights:
        known = "the dictionary is empty: pass a tree of arrays, or all arrays by Hugging Face's names"
        raise RequestError("weights", "{}", known)
    is_tree = isinstance(weights, Mapping) and ("layers" in weights or not any("." in str(name) for name in weights))
    if is_trainer_tree(weights):
        refuse_layout(layout)
        of_trainer = prepare_trainer(weights, engine)
        return functools.partial(_unless_deleted, of_trainer, weights)
    if layout is not None and not (is_tree and isinstance(layout, WeightLayout)):
        raise RequestError("layout", layout, "must be a jpaged.models.spec.WeightLayout, and goes with a tree")
    if isinstance(weights, Mapping):
        leaves = prepare_tree(weights, engine, layout) if is_tree else prepare_names(weights, engine)
        return functools.partial(_unless_deleted, leaves, weights)
    if isinstance(weights, (str, os.PathLike)):
        return prepare_path(os.fspath(weights), engine)
    if isinstance(weights, Iterator):
        return lambda: prepare_iterator(weights, engine)
    known = "must be a tree of arrays, a dictionary of arrays by name, an iterator of (name, array), or a path"
    if isinstance(weights, (list, tuple)):
        known += " (for a list of pairs: iter(pairs))"
    raise RequestError("weights", type(weights).__name__, known)


def _unless_deleted(leaves: Sequence[NewLeaf | NewDrafter], weights: Any) -> Sequence[NewLeaf | NewDrafter]:
    """Return the leaves. Raises ModelLoadError if the caller has deleted an array while the update waited."""
    if any(isinstance(array, jax.Array) and array.is_deleted() for array in jax.tree.leaves(weights)):
        raise ModelLoadError("an array of the new weights was deleted before the update began, for example by donation")
    return leaves
