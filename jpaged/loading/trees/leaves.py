"""A leaf of the engine's tree, made of arrays of a trainer's tree: one array as it is, or a copy in another order."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jpaged.models.resharding import on_auto_mesh


@dataclasses.dataclass(frozen=True)
class Step:
    """How a part is cut out of one array. Static: a part of the compiled copy."""

    stack_axis: int | None      # axis of stacked layers; the index in it is an argument of the program
    shared: int | None          # index of the part in axis "c", the first one; None: the array has no such axis
    axes: tuple[int, ...]       # sizes of the letters' axes in the array's order, without "c" and the stack
    crop: int | None            # rows of the vocabulary to keep; None: all
    order: tuple[int, ...]      # transposition of `axes`
    head_axis: int | None       # after the transposition: axis of h whose dimensions are reordered; None: none
    shape: tuple[int, ...]      # of the result
    factor: float = 1.0
    offset: float = 0.0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a leaf is put together from its parts. Static."""

    steps: tuple[Step, ...]
    join: str  # "one", "qkv" (per KV head: queries, key, value) or "stack"
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class TreeLeaf:
    """One leaf of the engine's tree. Without a recipe it is the trainer's own array."""

    names: tuple[str, ...]       # in the trainer's tree
    arrays: tuple[Any, ...]      # jax.Array or np.ndarray, one for each step
    indices: tuple[int, ...]     # in the axis of stacked layers, one for each step; 0 without such an axis
    recipe: Recipe | None

    @property
    def is_reference(self) -> bool:
        """True if `make` returns the trainer's own array."""
        return self.recipe is None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the leaf."""
        return tuple(self.arrays[0].shape) if self.recipe is None else self.recipe.shape

    @property
    def copied_bytes(self) -> int:
        """Bytes that `make` allocates."""
        return 0 if self.recipe is None else math.prod(self.recipe.shape) * self.recipe.dtype.itemsize

    def make(self) -> jax.Array:
        """The leaf: the trainer's array, or a new one."""
        if self.recipe is None:
            return self.arrays[0]
        distinct = {id(array): array for array in self.arrays}
        places = {key: place for place, key in enumerate(distinct)}
        order = tuple(places[id(array)] for array in self.arrays)
        arrays = tuple(on_auto_mesh(one) if isinstance(one, jax.Array) else one for one in distinct.values())
        return _make(arrays, np.asarray(self.indices, np.int32), self.recipe, order)


@functools.partial(jax.jit, static_argnames=("recipe", "order"))
def _make(arrays: tuple[Array, ...], indices: Array, recipe: Recipe, order: tuple[int, ...]) -> Array:
    """One program for all layers with equal shapes: the index in a stack is an argument."""
    sources = [arrays[place] for place in order]
    parts = [_part(array, index, step) for array, index, step in zip(sources, indices, recipe.steps, strict=True)]
    if recipe.join == "qkv":
        heads = [part.reshape(recipe.shape[0], -1, *recipe.shape[2:]) for part in parts]
        out = jnp.concatenate(heads, axis=1)
    elif recipe.join == "stack":
        out = jnp.stack(parts)
    else:
        out = parts[0]
    return out.reshape(recipe.shape).astype(recipe.dtype)


def _part(array: Array, index: Array, step: Step) -> Array:
    if step.stack_axis is not None:
        array = lax.dynamic_index_in_dim(array, index, step.stack_axis, keepdims=False)
    if step.shared is not None:
        array = lax.index_in_dim(array, step.shared, 0, keepdims=False)
    if step.crop is not None:
        array = lax.slice_in_dim(array, 0, step.crop, axis=0)
    array = array.reshape(step.axes).transpose(step.order)
    if step.head_axis is not None:
        even, odd = (lax.slice_in_dim(array, first, None, 2, step.head_axis) for first in (0, 1))
        array = jnp.concatenate([even, odd], step.head_axis)
    if step.factor != 1 or step.offset != 0:
        array = (array.astype(jnp.float32) * step.factor + step.offset).astype(array.dtype)
    return array.reshape(step.shape)
