"""`ShardedQuantizer` splits the leaves of a model over the devices of a mesh.

It has the interface of `Quantizer`, which quantises each device's part. The parts of a split QuantizedWeight, and of a
SplitWeight, are joined along axis 0 for any split axis, because each device's program sees its part only. The static
`shape` of such a QuantizedWeight is the shape of one part. Other dense arrays are joined along the split axis.

Leaves are numpy arrays of a checkpoint, or live arrays on any devices. Live arrays that need no padding and are split
like the mesh are used by reference (`resharding`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jpaged.errors import ModelLoadError
from jpaged.models.padding import pad_leaf, padded_shape
from jpaged.models.quantization import LeafPlacer, Quantizer, Scheme
from jpaged.models.resharding import Bounds, has_devices_of, on_auto_mesh, on_host, resharded
from jpaged.models.sharding import Shards, SplitWeight, sharding_on, split_axis, splits_inputs
from jpaged.models.spec import DecoderSpec, Params, WeightLayout
from pallas_kernels import QuantizedWeight


@dataclasses.dataclass(frozen=True)
class ShardedQuantizer(LeafPlacer):
    """Pads, splits, quantises and places leaves. spec: of the model, before `split_spec`."""

    quantizer: Quantizer
    mesh: Mesh | AbstractMesh  # AbstractMesh: for shapes only
    shards: Shards
    spec: DecoderSpec
    layout: WeightLayout = WeightLayout()  # of live arrays

    def of_layer(self, layer: int | None) -> "ShardedQuantizer":
        """The placer with the heads and widths of a layer, if layers differ."""
        if layer is None or not self.spec.layer_kv:
            return self
        return dataclasses.replace(self, spec=self.spec.of_layer(layer))

    def __call__(self, name: str, leaf: Float[Any, "*shape"]) -> Any:
        """Put the leaf `name` on the devices, as an array, QuantizedWeight or SplitWeight. leaf: numpy or jax array."""
        is_dense = self.scheme_of_leaf(name, leaf.shape) is None
        if isinstance(leaf, jax.Array) and is_dense and not self._is_cut(name, leaf.dtype):
            return jax.block_until_ready(self._live(name, leaf))
        leaf = pad_leaf(name, on_host(leaf) if isinstance(leaf, jax.Array) else leaf, self.spec, self.shards)
        if self.scheme_of_leaf(name, leaf.shape) is None:
            return jax.block_until_ready(self._dense(name, leaf))
        return self._on_each_device(name, leaf.shape, lambda index: self.quantizer(name, leaf[index]))

    def part(self, name: str, leaf: Float[Any, "*shape"]) -> Array:
        """A dense part of a JoinedWeight, on the devices."""
        axis = split_axis(name, leaf.ndim, self.shards, self.spec)
        self._check_divides(name, leaf.shape, axis)
        return _put(leaf, sharding_on(self.mesh, axis))

    def packed(self, name: str, weight: QuantizedWeight) -> Any:
        """Put a checkpoint's quantised leaf, in the layout "plain", on the devices. Raises ModelLoadError."""
        weight, axis = self._padded(name, weight)
        return self._on_each_device(
            name, weight.shape, lambda index: self.quantizer.packed(name, _cut(weight, axis, index))
        )

    def packed_shape(self, name: str, weight: QuantizedWeight) -> Any:
        """As `packed`, for ShapeDtypeStructs."""
        padded, axis = self._padded(name, weight)
        index = tuple(slice(size) for size in self._local(name, padded.shape))  # of the first device
        local = jax.eval_shape(lambda one: _cut(one, axis, index), padded)
        return self._joined_shape(name, self.quantizer.packed_shape(name, local))

    def shapes(self, shapes: Params) -> Params:
        """The tree `param_shapes(spec, dtype)` with the shapes and shardings on the devices."""
        return {
            name: tuple(self.of_layer(i).shapes(layer) for i, layer in enumerate(leaf))
            if name == "layers" else self.shape(name, leaf)
            for name, leaf in shapes.items()
        }  # fmt: skip

    def shape(self, name: str, leaf: jax.ShapeDtypeStruct) -> Any:
        """As `__call__`, for a ShapeDtypeStruct."""
        shape = padded_shape(name, leaf.shape, self.spec, self.shards)
        if self.scheme_of_leaf(name, shape) is not None:
            local = jax.ShapeDtypeStruct(self._local(name, shape), leaf.dtype)
            return self._joined_shape(name, self.quantizer.shape(name, local))
        if not self._is_cut(name, leaf.dtype):
            axis = split_axis(name, len(shape), self.shards, self.spec)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding_on(self.mesh, axis))
        here, count = self.shards.parts_here, self.shards.count
        of_one = (count * shape[0], *shape[1:-1], shape[-1] // (here * count))
        one = jax.ShapeDtypeStruct(of_one, leaf.dtype, sharding=sharding_on(self.mesh, 0))
        return SplitWeight((one,) * here)

    def reads_views(self, name: str, shape: tuple[int, ...]) -> bool:
        """True: this process's parts are copied, and other parts are not read."""
        return True

    def scheme_of_leaf(self, name: str, shape: tuple[int, ...]) -> Scheme | None:
        """Scheme for a device's part of the leaf `name`; None if it keeps its dtype. shape: of the whole leaf."""
        return self.quantizer.scheme_of_leaf(name, self._local(name, padded_shape(name, shape, self.spec, self.shards)))

    def needed(self, name: str, shape: tuple[int, ...], devices: Sequence[jax.Device]) -> Bounds:
        """The part of a dense leaf that devices of the mesh need, for each axis. All of it if the leaf is padded."""
        if padded_shape(name, shape, self.spec, self.shards) == shape:
            axis = split_axis(name, len(shape), self.shards, self.spec)
            indices = sharding_on(self.mesh, axis).devices_indices_map(shape)
            parts = [
                [one.indices(size)[:2] for one, size in zip(indices[device], shape, strict=True)] for device in devices
            ]
            return tuple((min(a for a, _ in each), max(b for _, b in each)) for each in zip(*parts, strict=True))
        return tuple((0, size) for size in shape)

    def _is_cut(self, name: str, dtype: DTypeLike) -> bool:
        """True if a dense leaf becomes a SplitWeight."""
        return self.shards.parts > 1 and splits_inputs(name, self.shards) and not self.shards.fixed_kernels(dtype)

    def _local(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        axis = split_axis(name, len(shape), self.shards, self.spec)
        return sharding_on(self.mesh, axis).shard_shape(shape)

    def _live(self, name: str, leaf: Float[Array, "*shape"]) -> Array:
        """Place a live array. If it is padded, each device has the whole leaf for a moment."""
        turned = name in self.layout.transposed
        axis = split_axis(name, leaf.ndim, self.shards, self.spec)
        shape = padded_shape(name, leaf.shape[::-1] if turned else leaf.shape, self.spec, self.shards)
        if turned:
            axis, shape = None if axis is None else 1 - axis, shape[::-1]
        sharding = sharding_on(self.mesh, axis)
        if shape == leaf.shape:
            return resharded(leaf, sharding)
        if not has_devices_of(leaf, sharding):
            leaf = resharded(leaf, sharding_on(self.mesh, None))
        padded = _padded(on_auto_mesh(leaf), name, self.spec, self.shards, turned=turned, sharding=sharding)
        return jax.device_put(padded, sharding)

    def _dense(self, name: str, leaf: Float[Any, "*shape"]) -> Any:
        axis = split_axis(name, leaf.ndim, self.shards, self.spec)
        if not self._is_cut(name, leaf.dtype):
            return _put(leaf, sharding_on(self.mesh, axis))
        # Product p of the sum belongs to device p // parts_here.
        count, here = self.shards.count, self.shards.parts_here
        width = leaf.shape[-1] // (count * here)
        parts = []
        for part in range(here):
            firsts = [(device * here + part) * width for device in range(count)]
            whole = np.concatenate([leaf[..., first : first + width] for first in firsts])
            parts.append(_put(whole, sharding_on(self.mesh, 0)))
        return SplitWeight(tuple(parts))

    def _indices(self, name: str, shape: tuple[int, ...]) -> dict[Any, tuple[slice, ...]]:
        """Slices of a leaf for each device of this process."""
        axis = split_axis(name, len(shape), self.shards, self.spec)
        indices = sharding_on(self.mesh, axis).addressable_devices_indices_map(shape)
        return {device: index or (slice(None),) * len(shape) for device, index in indices.items()}

    def _on_each_device(self, name: str, shape: tuple[int, ...], make: Callable[[tuple[slice, ...]], Any]) -> Any:
        """Make each device's part on that device, and join the parts. make: function of the part's slices of the leaf.

        Equal parts are made once and copied.
        """
        made: dict[tuple[tuple[int, int, int], ...], Any] = {}
        parts = []
        for device, index in self._indices(name, shape).items():
            bounds = tuple(one.indices(size) for one, size in zip(index, shape, strict=True))
            if bounds not in made:
                with jax.default_device(device):
                    made[bounds] = jax.block_until_ready(make(index))
            parts.append(jax.device_put(made[bounds], device))
        return jax.tree.map(functools.partial(self._join, name), *parts)

    def _join(self, name: str, *parts: Array) -> Array:
        shape, sharding = self._joined(name, parts[0].shape)
        return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))

    def _joined_shape(self, name: str, local: Any) -> Any:
        """ShapeDtypeStructs of the joined parts. local: one device's part."""

        def joined(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            shape, sharding = self._joined(name, leaf.shape)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(joined, local)

    def _joined(self, name: str, local: tuple[int, ...]) -> tuple[tuple[int, ...], jax.sharding.Sharding]:
        if split_axis(name, len(local), self.shards, self.spec) is None or not local:
            return local, sharding_on(self.mesh, None)
        return (local[0] * self.shards.count, *local[1:]), sharding_on(self.mesh, 0)

    def _check_divides(self, name: str, shape: tuple[int, ...], axis: int | None) -> None:
        if axis is not None and shape[axis] % self.shards.count:
            raise ModelLoadError(
                f"tensor_parallel_size={self.shards.count}: {name} {list(shape)} is quantised in parts, and "
                f"{shape[axis]} cannot be split: use a number of devices that divides it"
            )

    def _padded(self, name: str, weight: QuantizedWeight) -> tuple[QuantizedWeight, int | None]:
        """Pad the outputs of a weight in the layout "plain". Returns it with its split axis. Raises ModelLoadError."""
        shape = padded_shape(name, weight.shape, self.spec, self.shards)
        axis = split_axis(name, len(shape), self.shards, self.spec)
        count = self.shards.count
        if axis == len(shape) - 1:
            widths = {array.shape[-1] for array in jax.tree.leaves(dataclasses.replace(weight, order=None))}
            divided = shape == weight.shape and all(width == 1 or width % count == 0 for width in widths)
            if weight.order is not None or not divided:
                why = "its inputs have an order of their own (desc_act)" if weight.order is not None else (
                    f"its {weight.groups} groups of inputs do not split into {count} equal parts"
                )
                raise ModelLoadError(
                    f"tensor_parallel_size={count}: the quantised matrix {name} {list(weight.shape)} cannot be split: "
                    f"{why}: use a smaller number of devices, or another checkpoint of the model"
                )
        if shape == weight.shape:
            return weight, axis

        def pad(array: Any) -> Any:
            wanted = (*shape[:-1], array.shape[-1])
            if isinstance(array, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(wanted, array.dtype)
            return pad_leaf(name, np.asarray(array), self.spec, self.shards)

        return weight.changed(pad, shape=shape), axis


def _cut(weight: QuantizedWeight, axis: int | None, index: tuple[slice, ...]) -> QuantizedWeight:
    """A device's part of a weight in the layout "plain". index: slices of the weight's shape."""
    if axis is None:
        return weight
    start, stop, _ = index[axis].indices(weight.shape[axis])
    on_inputs = axis == len(weight.shape) - 1

    def cut(array: Any) -> Any:
        if not on_inputs:
            return array[(slice(None),) * axis + (slice(start, stop),)]
        width, inputs = array.shape[-1], weight.shape[-1]
        return array if width == 1 else array[..., start * width // inputs : stop * width // inputs]

    return weight.changed(cut, shape=(*weight.shape[:axis], stop - start, *weight.shape[axis + 1 :]))


@functools.partial(jax.jit, static_argnames=("name", "spec", "shards", "turned", "sharding"))
def _padded(
    leaf: Float[Array, "..."], name: str, spec: DecoderSpec, shards: Shards, *, turned: bool,
    sharding: jax.sharding.Sharding,
) -> Float[Array, "..."]:  # fmt: skip
    """`pad_leaf` on devices. turned: the leaf is stored [in, out]."""
    padded = pad_leaf(name, leaf.T, spec, shards).T if turned else pad_leaf(name, leaf, spec, shards)
    return jax.lax.with_sharding_constraint(padded, sharding)


def _put(leaf: Float[Any, "*shape"], sharding: jax.sharding.Sharding) -> Array:
    """Put an array on the devices. Of a host array, only the parts of this process's devices are read."""
    if isinstance(leaf, jax.Array):
        return jax.device_put(leaf, sharding)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        # A copy: JAX on CPU may use a view's memory, which would keep the whole leaf or a mapped file in memory.
        return np.array(leaf if index is None else leaf[index])

    return jax.make_array_from_callback(leaf.shape, sharding, part)
