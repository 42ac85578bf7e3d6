"""Moves jax arrays to the devices of an engine, where a trainer has them on other devices or split in another way.

`resharded` uses an array by reference where its sharding equals the wanted one. Otherwise it copies, on the devices
where possible.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Shaped

_SLABS = 8        # of a large array
_LARGE = 1 << 20  # bytes; smaller arrays are exchanged at once
Bounds = tuple[tuple[int, int], ...]  # start and stop of a part of an array, for each axis


def layout_of(leaf: Any) -> Any:
    """Layout of an array's memory. The types of JAX leave `format` out."""
    return leaf.format.layout


def same_place(one: Sharding, other: Sharding, ndim: int) -> bool:
    """True if two shardings put the same numbers of an array of `ndim` axes on the same devices, in the same memory."""
    return one == other or (one.memory_kind == other.memory_kind and one.is_equivalent_to(other, ndim))


def is_placed(leaf: Shaped[Array, "..."], sharding: Sharding) -> bool:
    """True if an array can be used with a sharding without a copy: the same parts on the same devices, row by row."""
    if not same_place(leaf.sharding, sharding, leaf.ndim):
        return False
    layout = layout_of(leaf)
    return layout is None or tuple(layout.major_to_minor) == tuple(range(leaf.ndim))


def resharded(leaf: Shaped[Array, "*shape"], sharding: Sharding) -> Shaped[Array, "*shape"]:
    """The array with another sharding. It shares the buffers of `leaf` where they are in place already.

    A copy needs memory for the result, and for a part of it. The devices of `leaf` exchange parts in one program. To
    other devices, a part is copied from the device that has it; a part on several devices is joined on the host.
    """
    if is_placed(leaf, sharding):
        return leaf if leaf.sharding == sharding else jax.device_put(leaf, sharding)
    kind = sharding.memory_kind
    if kind is not None and leaf.sharding.memory_kind != kind:  # programs do not mix memories
        leaf = jax.device_put(leaf, leaf.sharding.with_memory_kind(kind))
    if has_devices_of(leaf, sharding):
        leaf = on_auto_mesh(leaf)
        return jax.device_put(exchanged(leaf, leaf.sharding, sharding), sharding)
    parts = [
        jax.device_put(_part(leaf, _bounds(index, leaf.shape)), device)
        for device, index in sharding.addressable_devices_indices_map(leaf.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)


def has_devices_of(leaf: Shaped[Array, "..."], sharding: Sharding) -> bool:
    """True if an array has the devices of a sharding, in the same order: then one program can copy it."""
    meshes = [each.mesh for each in (leaf.sharding, sharding) if isinstance(each, NamedSharding)]
    if len(meshes) < 2:
        return len(sharding.device_set) == 1 and leaf.sharding.device_set == sharding.device_set
    return list(meshes[0].devices.flat) == list(meshes[1].devices.flat)


def on_auto_mesh(leaf: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """The array, by reference, on a mesh whose axes are all Auto. JAX refuses to mix meshes with Explicit axes."""
    if not isinstance(leaf.sharding, NamedSharding) or set(leaf.sharding.mesh.axis_types) == {AxisType.Auto}:
        return leaf
    mesh, kind = leaf.sharding.mesh, leaf.sharding.memory_kind
    auto = Mesh(mesh.devices, mesh.axis_names)
    return jax.device_put(leaf, NamedSharding(auto, leaf.sharding.spec, memory_kind=kind))


def on_host(leaf: Shaped[Array, "*shape"]) -> Shaped[np.ndarray, "*shape"]:
    """The whole array in host memory. JAX would keep a copy together with `leaf`, until the caller drops it."""
    parts = [shard.data for shard in leaf.addressable_shards]
    return np.asarray(jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts))


@functools.partial(jax.jit, static_argnames=("before", "after"))
def exchanged(leaf: Shaped[Array, "*shape"], before: Sharding, after: Sharding) -> Shaped[Array, "*shape"]:
    """The array with the sharding `after`, on the devices of `before`, its own sharding. Meshes have Auto axes."""
    if isinstance(before, NamedSharding) and isinstance(after, NamedSharding) and leaf.nbytes >= _LARGE:
        part = before.mesh.size * _SLABS
        for axis, size in enumerate(leaf.shape):
            if size % part == 0:
                return _Slabs(axis, before, after).exchanged(leaf)
    return lax.with_sharding_constraint(jnp.copy(leaf), after)


@dataclasses.dataclass(frozen=True)
class _Slabs:
    """Exchanges one slab of an array after another. A slab has a piece of each device's part, along one axis.

    The exchange of a whole matrix of two axes takes 1.9 times its bytes, besides input and output. With 8 slabs it is a
    quarter (8 CPU devices, JAX 0.10.2 and 0.11.2, `memory_analysis`), and about as fast.
    """

    axis: int  # its size is a multiple of the number of slabs times the number of devices
    before: NamedSharding
    after: NamedSharding

    def exchanged(self, leaf: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
        """The array with the sharding `after`."""
        axis, devices, size = self.axis, self.before.mesh.size, leaf.shape[self.axis]
        split = (*leaf.shape[:axis], devices, _SLABS, size // (devices * _SLABS), *leaf.shape[axis + 1 :])
        view = self._on(self.before, leaf.reshape(split), 2)

        def exchange(index: Any, out: Array) -> Array:
            slab = self._on(self.before, lax.dynamic_index_in_dim(view, index, axis + 1, keepdims=False), 1)
            slab = self._on(self.after, lax.optimization_barrier(slab), 1)
            return self._on(self.after, lax.dynamic_update_index_in_dim(out, slab, index, axis + 1), 2)

        out = lax.fori_loop(0, _SLABS, exchange, self._on(self.after, jnp.zeros(split, leaf.dtype), 2))
        return lax.with_sharding_constraint(out.reshape(leaf.shape), self.after)

    def _on(self, sharding: NamedSharding, array: Array, new_axes: int) -> Array:
        """The array with a sharding of the leaf, which has `new_axes` fewer axes, after `axis`."""
        spec = (*sharding.spec, *[None] * (array.ndim - new_axes - len(sharding.spec)))
        kept = spec[: self.axis + 1], spec[self.axis + 1 :]
        wide = PartitionSpec(*kept[0], *[None] * new_axes, *kept[1])
        return lax.with_sharding_constraint(array, NamedSharding(sharding.mesh, wide))


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    slices = (slice(None),) * len(shape) if index is None else index
    return tuple(one.indices(size)[:2] for one, size in zip(slices, shape, strict=True))


def _part(leaf: Shaped[Array, "..."], wanted: Bounds) -> Any:
    """A part of an array: on one device that has all of it, otherwise on the host."""
    shards = {_bounds(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
    for bounds, data in shards.items():
        if all(a <= c and d <= b for (a, b), (c, d) in zip(bounds, wanted, strict=True)):
            return _cut(data, bounds, wanted)
    host = np.empty([stop - start for start, stop in wanted], leaf.dtype)
    for bounds, data in shards.items():
        common = tuple(
            (max(a, c), min(b, d)) for (a, b), (c, d) in zip(bounds, wanted, strict=True)
        )
        if all(start < stop for start, stop in common):
            host[_slices(common, wanted)] = np.asarray(_cut(data, bounds, common))
    return host


def _cut(data: Shaped[Array, "..."], bounds: Bounds, wanted: Bounds) -> Shaped[Array, "..."]:
    """The part `wanted` of an array that has the part `bounds`. A copy: `np.asarray` of `data` would stay with it."""
    starts = tuple(one.start for one in _slices(wanted, bounds))
    return _sliced(data, starts, tuple(stop - start for start, stop in wanted))


def _slices(wanted: Bounds, bounds: Bounds) -> tuple[slice, ...]:
    """Slices of the part `wanted` in an array that has the part `bounds`."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(wanted, bounds, strict=True))


@functools.partial(jax.jit, static_argnums=2)
def _sliced(data: Shaped[Array, "..."], starts: tuple[Any, ...], sizes: tuple[int, ...]) -> Shaped[Array, "..."]:
    return lax.dynamic_slice(data, starts, sizes) if sizes else jnp.copy(data)
