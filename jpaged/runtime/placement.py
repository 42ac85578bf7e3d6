"""Placement: the devices of an engine's arrays, and how programs run on them.

With one device, programs are plain jitted functions. With several, a program runs in `jax.shard_map`: each device runs
it on its part of the weights and pages. `jpaged.models.sharding` says which axes are split, and the model calls the
collectives. Most other modules of the runtime do not depend on the number of devices.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.errors import ModelLoadError
from jpaged.models.sharding import WHOLE, Shards, make_mesh, sharding_on
from jpaged.runtime.targets import Target

# CUDA graphs also contain loops and branches. Otherwise the host reads each condition in the middle of a step. The list
# is XLA's default and WHILE; XLA refuses `+WHILE` alone (JAX 0.11.2).
# Rematerialization is off. If arguments fill more than 80% of the memory, XLA computes results twice to save memory:
# 456 kernels instead of 424 in a decode step of Llama 3.1 8B (deviceless). The KV pool fills the memory on purpose, and
# `memory.plan.fit` already counts the bytes of the programs.
_NVIDIA_OPTIONS = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    ),
    "xla_disable_hlo_passes": "rematerialization",
}


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of an engine, and the sharding of arrays on them."""

    device: jax.Device | Target  # the first device of this process
    # sharding of arrays that are whole on every device. None: no compiler for the device is installed
    sharding: jax.sharding.Sharding | None
    dump_to: str | None = None  # folder where XLA writes each program and its commands as text
    mesh: Mesh | None = None    # None: one device
    shards: Shards = WHOLE

    @classmethod
    def single(cls, device: jax.Device) -> "Placement":
        """One device that has all arrays."""
        return cls(device, jax.sharding.SingleDeviceSharding(device))

    @classmethod
    def over(cls, devices: list[jax.Device], shards: Shards) -> "Placement":
        """Weights and pages split over several devices, or whole on one device."""
        if len(devices) == 1:
            return dataclasses.replace(cls.single(devices[0]), shards=shards)
        return cls._on(make_mesh(devices, shards), shards)

    @classmethod
    def of(cls, params: Any, shards: Shards) -> "Placement":
        """The placement of a tree of weights: arrays, or ShapeDtypeStructs with shardings.

        Raises ModelLoadError if they are on several devices without a mesh.
        """
        mesh = next((leaf.sharding.mesh for leaf in jax.tree.leaves(params) if _is_split(leaf)), None)
        if mesh is None:
            return dataclasses.replace(cls.single(device_of(params)), shards=shards)
        return cls._on(mesh, shards)

    @classmethod
    def _on(cls, mesh: Mesh, shards: Shards) -> "Placement":
        own = next(device for device in mesh.devices.flat if device.process_index == jax.process_index())
        return cls(own, sharding_on(mesh, None), mesh=mesh, shards=shards)

    @classmethod
    def for_target(cls, target: Target, shards: Shards = WHOLE) -> "Placement":
        """Placement on a kind of device that need not be present. Without its compiler nothing can be compiled."""
        if target.missing is not None:
            return cls(target, None, shards=shards)
        return cls.over(target.devices(shards.num_devices), shards)

    @property
    def first_device(self) -> jax.Device:
        """The first device of this process, which must be present."""
        assert isinstance(self.device, jax.Device)
        return self.device

    @property
    def own_devices(self) -> list[jax.Device]:
        """The devices of this process."""
        if self.mesh is None:
            return [self.first_device]
        return [device for device in self.mesh.devices.flat if device.process_index == jax.process_index()]

    def least(self, number: int) -> int:
        """Minimum of `number` (< 2**62) over all processes of the engine, which must all call this."""
        if self.mesh is None or jax.process_count() == 1:
            return number
        halves = np.array(divmod(number, 2**31), np.int32)  # JAX has no int64 by default
        return min(int(high) * 2**31 + int(low) for high, low in multihost_utils.process_allgather(halves))

    @property
    def platform(self) -> str:
        """Platform of the device: "cpu", "gpu" or "tpu"."""
        return self.device.platform

    @property
    def compiler_options(self) -> dict[str, str]:
        """Options of XLA for the programs of a step."""
        options = _NVIDIA_OPTIONS if self.platform == "gpu" else {}
        return dict(options) if self.dump_to is None else {**options, "xla_dump_to": self.dump_to}

    def shape(self, shape: tuple[int, ...], dtype: np.dtype | type) -> jax.ShapeDtypeStruct:
        """ShapeDtypeStruct of an array that is whole on every device, to compile with."""
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=self.sharding)

    def shapes_of(self, tree: Any) -> Any:
        """The same tree of ShapeDtypeStructs, to compile with. Split arrays keep their sharding."""

        def shape(leaf: Any) -> jax.ShapeDtypeStruct:
            sharding = leaf.sharding if _is_split(leaf) else self.sharding
            return jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype), sharding=sharding)

        return jax.tree.map(shape, tree)

    def split(self, leaf: jax.ShapeDtypeStruct, axis: int | None) -> jax.ShapeDtypeStruct:
        """The same shape, split over the devices along an axis; None: whole on every device."""
        sharding = self.sharding if self.mesh is None else sharding_on(self.mesh, axis)
        return jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype), sharding=sharding)

    def of_pages(self, *, latent: bool) -> jax.sharding.Sharding | None:
        """Sharding of KV pages [blocks, parts, kv_heads, ...]. Latent pages have one head, on every device."""
        return self.sharding if self.mesh is None or latent else sharding_on(self.mesh, 2)

    def on_each_device(self, call: Callable[..., Any], arguments: tuple[Any, ...], results: Any) -> Callable[..., Any]:
        """`call` in a `shard_map`: each device runs it on its part of the arguments. With one device: `call` itself.

        arguments: arrays or ShapeDtypeStructs with shardings. results: tree prefix of the results. A leaf is an array
        with the result's sharding, or None for results that are whole on every device.
        """
        if self.mesh is None:
            return call
        whole = PartitionSpec()
        out_specs = jax.tree.map(
            lambda leaf: whole if leaf is None else _spec(leaf), results, is_leaf=lambda leaf: leaf is None
        )
        mapped = jax.shard_map(
            call, mesh=self.mesh, in_specs=jax.tree.map(_spec, arguments), out_specs=out_specs, check_vma=False
        )
        mapped.__name__ = getattr(call, "__name__", None) or call.func.__name__  # profiles show it
        return mapped

    def put(self, array: np.ndarray) -> jax.Array:
        """Upload a host array."""
        return jax.device_put(array, self.sharding)


def _is_split(leaf: Any) -> bool:
    """True if an array or ShapeDtypeStruct is on a mesh of several devices."""
    sharding = getattr(leaf, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh.size > 1


def _spec(leaf: Any) -> PartitionSpec:
    return leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()


def device_of(tree: Any) -> jax.Device:
    """The device of all arrays of a tree. Raises ModelLoadError if they are on several devices."""
    devices = {device for leaf in jax.tree.leaves(tree) for device in _devices(leaf)}
    if len(devices) != 1:
        raise ModelLoadError(f"the parameters are on {len(devices)} devices: put them on one")
    return devices.pop()


def _devices(leaf: Any) -> set[jax.Device]:
    return leaf.sharding.device_set if leaf.sharding is not None else {jax.devices()[0]}
