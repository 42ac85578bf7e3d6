"""Placement: the devices that hold an engine's arrays. Today one device."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.runtime.targets import Target

# On NVIDIA, XLA records the loops and branches of a program into its CUDA graphs too: otherwise the host reads each
# condition in the middle of a step. The list is XLA's default and WHILE; `+WHILE` alone is refused (JAX 0.11.2).
#
# XLA takes a program whose arguments fill more than 80% of the memory for one that does not fit, and computes results
# twice to save memory: 456 kernels instead of 424 in a decode step of Llama 3.1 8B (deviceless). The KV pool fills the
# memory on purpose, and `memory.fit` counts the bytes of the programs. So that pass is off.
_NVIDIA_OPTIONS = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    ),
    "xla_disable_hlo_passes": "rematerialization",
}


@dataclasses.dataclass(frozen=True)
class Placement:
    """A device, and the sharding of arrays on it."""

    device: jax.Device | Target
    sharding: jax.sharding.Sharding | None  # None: no compiler for the device is installed, so nothing can be compiled
    dump_to: str | None = None  # a folder where XLA writes each program and its commands, as text

    @classmethod
    def single(cls, device: jax.Device) -> "Placement":
        """All arrays whole on one device."""
        return cls(device, jax.sharding.SingleDeviceSharding(device))

    @classmethod
    def for_target(cls, target: Target) -> "Placement":
        """A kind of device that need not be present: its compiler's description, or the target without a compiler."""
        if target.missing is not None:
            return cls(target, None)
        sharding = target.sharding()
        return cls(next(iter(sharding.device_set)), sharding)

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
        """An array with this placement, as a shape to compile with."""
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=self.sharding)

    def shapes_of(self, tree: Any) -> Any:
        """The same tree as shapes to compile with."""
        return jax.tree.map(lambda leaf: self.shape(leaf.shape, leaf.dtype), tree)

    def put(self, array: np.ndarray) -> jax.Array:
        """Upload a host array."""
        return jax.device_put(array, self.sharding)


def device_of(tree: Any) -> jax.Device:
    """The device that holds all arrays of a tree. Raises ModelLoadError if they are on several devices."""
    devices = {device for leaf in jax.tree.leaves(tree) for device in leaf.devices()}
    if len(devices) != 1:
        raise ModelLoadError(f"the parameters are on {len(devices)} devices: put them on one")
    return devices.pop()
