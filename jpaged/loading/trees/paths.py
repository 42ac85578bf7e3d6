"""Names of the leaves of any tree: keys joined by dots."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

# Last keys of a variable of flax: `nnx.Param` and linen's boxes hold their array under one of these
_BOXES = frozenset({"value", "raw_value"})
_NOT_WEIGHTS = frozenset({"rngs", "rng", "dropout", "inv_freq"})  # keys of state that is not a parameter


def named_leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by name, such as "layers.0.attn.q_proj.w". Accepts any pytree, nested or flat.

    Keys of a flat dictionary may be tuples, or have dots or slashes. State that is no weight (random keys, counters) is
    left out.
    """
    names: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = [part for entry in path for part in _keys(entry)]
        if keys and keys[-1] in _BOXES:
            keys.pop()
        array = getattr(leaf, "value", leaf) if not hasattr(leaf, "shape") else leaf
        if _NOT_WEIGHTS.isdisjoint(keys) and _is_weight(array):
            names[".".join(keys)] = array
    return names


def _is_weight(array: Any) -> bool:
    if not hasattr(array, "dtype"):
        return False
    return jax.dtypes.issubdtype(array.dtype, np.floating)


def _keys(entry: Any) -> Sequence[str]:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            key = getattr(entry, attribute)
            if isinstance(key, tuple):
                return [str(one) for one in key]
            return str(key).replace("/", ".").split(".") if isinstance(key, str) else [str(key)]
    return [str(entry).strip("[].'\"")]


def is_named(value: Any) -> bool:
    """True if a tree may have names: it is a mapping, or a pytree node with children."""
    return isinstance(value, Mapping) or not jax.tree_util.all_leaves([value])
