"""Shapes of a tree of weights as text, to compare and to show."""

from typing import Any

import jax
import numpy as np


def described(tree: Any) -> dict[str, str]:
    """Name, dtype and shape of each array of a tree."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): f"{np.dtype(leaf.dtype)}{list(leaf.shape)}" for path, leaf in pairs}
