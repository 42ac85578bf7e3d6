"""Weights of a sleeping engine: moved to the host, and back to the same devices."""

import dataclasses
from typing import Self

import jax
import numpy as np

from jpaged.models.spec import Params


@dataclasses.dataclass(frozen=True, slots=True)
class HostWeights:
    """A tree of weights in host memory. An array that occurs twice in the tree is stored once."""

    structure: jax.tree_util.PyTreeDef
    arrays: list[np.ndarray]                # distinct arrays
    shardings: list[jax.sharding.Sharding]  # of `arrays`, on the device
    indices: list[int]                      # leaf of the tree -> index in `arrays`

    @classmethod
    def take(cls, params: Params) -> Self:
        """Copy weights to the host, and delete them on the device. They must have the default memory layout."""
        leaves, structure = jax.tree.flatten(params)
        distinct = list({id(leaf): leaf for leaf in leaves}.values())
        numbers = {id(leaf): number for number, leaf in enumerate(distinct)}
        shardings = [leaf.sharding for leaf in distinct]
        arrays = []
        for leaf in distinct:  # one after another: the host needs memory for one copy only
            arrays.append(np.array(leaf))
            leaf.delete()
        return cls(structure, arrays, shardings, [numbers[id(leaf)] for leaf in leaves])

    def put(self) -> Params:
        """Copy the weights to the device. The host copy stays until the caller drops it."""
        placed = jax.block_until_ready(jax.device_put(self.arrays, self.shardings))
        return jax.tree.unflatten(self.structure, [placed[index] for index in self.indices])
