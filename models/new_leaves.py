"""Leaves of a weight update, and what an engine's programs expect of them.

`jpaged.loading.updates` makes `NewLeaf`s from the caller's weights, and `ModelRunner.update_params` uses them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import numpy as np
from jax.experimental.layout import Format

from jpaged.models.resharding import layout_of, resharded, same_place
from jpaged.models.spec import Params


@dataclasses.dataclass(frozen=True, slots=True)
class LeafSlot:
    """An array of an engine's weights, as its programs were compiled for it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding
    layout: Any  # of the memory; `jax.Array.format.layout`

    @classmethod
    def of(cls, array: jax.Array) -> Self:
        """The slot of an array that an engine uses."""
        return cls(array.shape, np.dtype(array.dtype), array.sharding, layout_of(array))

    def fits(self, array: jax.Array) -> bool:
        """True if programs accept the array as it is. A deleted array does not fit."""
        return (
            array.shape == self.shape
            and array.dtype == self.dtype
            and self.is_here(array.sharding)
            and not array.is_deleted()
            and layout_of(array) == self.layout
        )

    def moved(self, array: jax.Array) -> jax.Array:
        """An array of this shape and dtype, on these devices and in this layout. No copy if it fits."""
        if not self.is_here(array.sharding):
            array = resharded(array, self.sharding)
        if layout_of(array) != self.layout:  # a copy of its own: JAX cannot change devices and layout at once
            array = jax.device_put(array, Format(self.layout, self.sharding))
        return array

    def is_here(self, sharding: jax.sharding.Sharding) -> bool:
        """True if an array with this sharding has the same numbers on the same devices, in the same memory."""
        return same_place(sharding, self.sharding, len(self.shape))


@dataclasses.dataclass(frozen=True, slots=True)
class NewLeaf:
    """A leaf of a weight update. A leaf is `params[name]` or `params["layers"][layer][name]`.

    make:         returns the leaf as the engine's `LeafPlacer` does: an array, a quantised weight, or with pipeline
        stages and no layer, a part for each stage. Called once the engine has dropped the old leaf.
    by_reference: the leaf is the caller's own array.
    owned:        the caller has no array that shares memory with the leaf, so that the engine may delete it.
    """

    layer: int | None  # None: outside of layers
    name: str
    make: Callable[[], Any]
    by_reference: bool = False
    owned: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class NewDrafter:
    """New weights of an MTP layer, which come with those of the model. make: returns the whole tree on the devices."""

    make: Callable[[], Params]


def slots_of(params: Params) -> Params:
    """The slot of each array of a tree of weights."""
    return jax.tree.map(LeafSlot.of, params)


def find_layer(trees: Sequence[Params], layer: int) -> tuple[int, int] | None:
    """The stage that has a layer, and the layer's index in it; None: no stage has it. trees: one for each stage."""
    for stage, tree in enumerate(trees):
        if layer < len(tree["layers"]):
            return stage, layer
        layer -= len(tree["layers"])
    return None
