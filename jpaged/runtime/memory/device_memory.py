"""Memory of an accelerator: JAX's share of it, and the bytes that are free."""

import importlib.util
import os
from typing import Protocol, runtime_checkable

import jax

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.runtime import nvidia_devices
from jpaged.runtime.jax_compat import backends_are_started

# Environment variables that set JAX's share, or that switch its pool off.
GPU_MEMORY_VARIABLES = (
    "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)  # fmt: skip
_FRACTION = "memory_fraction"  # option of JAX's GPU client: share of the GPU's memory


def usable_bytes(device_bytes: int, config: EngineConfig) -> int:
    """Total bytes that the engine may use on an accelerator with `device_bytes` bytes."""
    return int(device_bytes * config.gpu_memory_utilization)


def claim_gpu_memory(config: EngineConfig) -> None:
    """Set JAX's share of an NVIDIA GPU's memory by `gpu_memory_utilization`. JAX's default is 75%.

    Half of the rest is added to JAX's pool, for fragmentation. The other half stays outside, for libraries. No effect
    if JAX has already started, or if the caller has set the share.
    """
    said = any(name in os.environ for name in GPU_MEMORY_VARIABLES) or jax.config.jax_pjrt_client_create_options
    if said or not nvidia_devices.installed_plugins() or importlib.util.find_spec("libtpu") or backends_are_started():
        return
    if 0 < config.gpu_memory_utilization <= 1:  # `decide_limits` refuses other values
        share = (1 + config.gpu_memory_utilization) / 2
        jax.config.update("jax_pjrt_client_create_options", {_FRACTION: share})


def start_backend(config: EngineConfig) -> str:
    """Start JAX with its share of a GPU's memory. Returns the platform of the default device.

    Raises ModelLoadError if no device starts, for example if JAX_PLATFORMS names a platform without a device.
    """
    claim_gpu_memory(config)
    try:
        return jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that a backend was found
        raise ModelLoadError(nvidia_devices.cannot_start(error)) from None


@runtime_checkable
class HasMemoryStats(Protocol):
    """A device that can report its memory, like a jax Device."""

    platform: str

    def memory_stats(self) -> dict[str, int] | None:
        """Bytes by name; None if the backend does not report them."""
        ...


def total_bytes(device: HasMemoryStats) -> int | None:
    """Total bytes of an accelerator; None as in `device_bytes`."""
    found = device_bytes(device)
    return None if found is None else found[0]


def device_bytes(device: HasMemoryStats) -> tuple[int, int] | None:
    """(total bytes, bytes in use) of an accelerator; None on CPU, and if the backend does not report them."""
    stats = _memory_stats(device)
    if stats is None:
        return None
    options = jax.config.jax_pjrt_client_create_options
    share = options.get(_FRACTION, 1.0) if isinstance(options, dict) and device.platform == "gpu" else 1.0
    return int(stats["bytes_limit"] / share), stats["bytes_in_use"]  # bytes_limit is JAX's share


def free_device_bytes(device: HasMemoryStats, config: EngineConfig) -> int | None:
    """Bytes of an accelerator that the engine may still allocate; None as in `device_bytes`."""
    found, stats = device_bytes(device), _memory_stats(device)
    if found is None or stats is None:
        return None
    total, taken = found
    return max(0, min(usable_bytes(total, config), stats["bytes_limit"]) - taken)


def _memory_stats(device: HasMemoryStats) -> dict[str, int] | None:
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats if stats and "bytes_limit" in stats else None
