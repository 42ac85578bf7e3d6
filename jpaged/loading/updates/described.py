"""Shapes of a tree of weights as text, to compare and to show."""

from typing import Any

import jax
import numpy as np


def described(tree: Any) -> dict[str, str]:
    """Name, dtype and shape of each array of a tree."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): f"{np.dtype(leaf.dtype)}{list(leaf.shape)}" for path, leaf in pairs}


def difference(found: Any, wanted: Any) -> tuple[str, str, str] | None:
    """(name, what `found` has, what `wanted` has) of the first array that differs; None: no array does."""
    have, want = described(found), described(wanted)
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            return name, have.get(name, "missing"), want.get(name, "missing")
    return None
