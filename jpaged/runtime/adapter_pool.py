"""The pools of LoRA adapters on the device: their sizes, and the program that writes an adapter into a slot.

Called by: the blueprint, for shapes and bytes; `StageRunner`, to allocate the pools and to load adapters.
Owns: the layout of an adapter that is copied to the device.
Never: decides which adapter is in which slot.

A slot is written between two steps. The device runs programs in order, so steps that were dispatched before the write
read the slot's old content.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jpaged.models.adapters import Adapter, AdapterPool, AdapterTarget, pool_shapes
from jpaged.runtime.placement import Placement
from jpaged.runtime.store.stored_programs import ProgramStore, compile_program


@dataclasses.dataclass(frozen=True)
class AdapterOptions:
    """Sizes of the pools of an engine."""

    targets: tuple[AdapterTarget, ...]
    slots: int      # adapters that are on the device at a time
    rank: int       # largest rank of an adapter
    dtype: np.dtype

    def shapes(self, placement: Placement | None = None) -> dict[str, AdapterPool]:
        """The pools as ShapeDtypeStructs."""
        shapes = pool_shapes(self.targets, slots=self.slots, rank=self.rank, dtype=self.dtype)
        return shapes if placement is None else placement.shapes_of(shapes)

    def create(self, placement: Placement) -> dict[str, AdapterPool]:
        """Allocate empty pools. Rank 0 means that a slot changes nothing, so only `ranks` must be zeros."""
        zeros = functools.partial(jnp.zeros, device=placement.sharding)
        return jax.tree.map(lambda leaf: zeros(leaf.shape, leaf.dtype), self.shapes())

    def content(self, adapter: Adapter) -> dict[str, AdapterPool]:
        """An adapter as the slice of one slot of each pool: host arrays, padded to the largest rank.

        Pools that the adapter does not change get rank 0.
        """
        return {target.leaf: self._content(target, adapter) for target in self.targets}

    def _content(self, target: AdapterTarget, adapter: Adapter) -> AdapterPool:
        shape = pool_shapes((target,), slots=1, rank=self.rank, dtype=self.dtype)[target.leaf]
        empty = jax.tree.map(lambda leaf: np.zeros((leaf.shape[0], *leaf.shape[2:]), leaf.dtype), shape)
        matrix = adapter.matrices.get(target.leaf)
        if matrix is None:
            return empty
        rank = matrix.b.shape[2]
        if target.leaf == "embed":
            empty.a[..., :rank] = matrix.a
        else:
            empty.a[..., :rank, :] = matrix.a
        empty.b[:, :, :rank] = matrix.b.reshape(*matrix.b.shape[:3], *target.out_shape)
        empty.ranks[:], empty.scales[:] = matrix.ranks, matrix.scales
        return empty


def write_slot(
    pools: Mapping[str, AdapterPool], slot: Int[Array, ""], content: Mapping[str, AdapterPool]
) -> Mapping[str, AdapterPool]:
    """Write `content`, as from `AdapterOptions.content`, into a slot of all pools. Donate `pools`."""
    return jax.tree.map(lambda pool, new: lax.dynamic_update_index_in_dim(pool, new, slot, 1), pools, content)


def compile_write_slot(
    options: AdapterOptions, placement: Placement, store: ProgramStore | None
) -> jax.stages.Compiled:
    """Compile `write_slot`."""
    pools = options.shapes(placement)
    content = jax.tree.map(lambda leaf: placement.shape((leaf.shape[0], *leaf.shape[2:]), leaf.dtype), pools)
    call = functools.partial(write_slot)
    return compile_program(call, (pools, placement.shape((), np.int32), content), donate=(0,), store=store)
