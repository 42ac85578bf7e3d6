"""Devices of several engines in one process, and copies of the weights on them (data parallelism)."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError

Devices = tuple[jax.Device, ...]


def devices_of_engines(config: EngineConfig, *, live: bool) -> list[Devices] | None:
    """Return the devices of each engine. None: all engines share the devices and the weights of the first engine.

    live: the weights are the caller's arrays, which must stay on their device.
    Raises ModelLoadError, before any weight is read, if there are too few devices.

    Engines share a device only on CPU, and only if each has one device. A program for several devices must start in the
    same order on each of them. Two engines' threads start programs in any order, so their all-reduces could deadlock.
    """
    count, size = config.data_parallel_size, config.devices_per_engine
    if count == 1:
        return None
    devices = jax.devices()
    if len({device.process_index for device in devices}) > 1:
        raise ModelLoadError(
            f"data_parallel_size={count}: all engines run in one process, but JAX has devices of several processes: "
            "leave it out, and start a server for each engine"
        )
    may_share = size == 1 and devices[0].platform == "cpu"
    if may_share and (live or len(devices) < count):
        return None
    if live:
        raise ModelLoadError(
            f"data_parallel_size={count}: live arrays are used without a copy, and each engine needs its own on this "
            f"{devices[0].device_kind}: leave it out, or load a checkpoint"
        )
    if len(devices) < count * size:
        raise ModelLoadError(_too_few(config, devices))
    return [tuple(devices[first : first + size]) for first in range(0, count * size, size)]


def _too_few(config: EngineConfig, devices: list[jax.Device]) -> str:
    found, count, size = len(devices), config.data_parallel_size, config.devices_per_engine
    if size != config.tensor_parallel_size:
        return (
            f"data_parallel_size={count} with {size} devices for each engine (pipeline_parallel_size="
            f"{config.pipeline_parallel_size}, tensor_parallel_size={config.tensor_parallel_size}, "
            f"prefill_context_parallel_size={config.prefill_context_parallel_size}) needs {count * size} devices, "
            f"there are {found} ({devices[0].device_kind}): use sizes whose product is at most {found}"
        )
    said = f"data_parallel_size={count} with tensor_parallel_size={size} needs {count * size} devices, there are "
    said += f"{found} ({devices[0].device_kind}): use "
    choices = [f"data_parallel_size={found // size}"] if found >= size else []
    smaller = next((fewer for fewer in range(size - 1, 0, -1) if fewer * count <= found), None)
    if smaller is not None:
        choices.append(f"tensor_parallel_size={smaller}")
    if devices[0].platform == "cpu":
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={count * size}"
        return f"{said}{' or '.join(choices) or 'tensor_parallel_size=1'}, or set the environment variable {flag}"
    if not choices:
        choices.append(f"data_parallel_size={found} and tensor_parallel_size=1")
    return said + " or ".join(choices)


def copied(params: Any, here: Devices, there: Devices) -> Any:
    """Copy a tree of weights from here[i] to there[i]. An array that occurs twice in the tree is copied once."""
    moved = dict(zip(here, there, strict=True))
    copies: dict[int, jax.Array] = {}

    def copy(leaf: jax.Array) -> jax.Array:
        if id(leaf) not in copies:
            copies[id(leaf)] = jax.device_put(leaf, _moved(leaf.sharding, moved))
        return copies[id(leaf)]

    return jax.block_until_ready(jax.tree.map(copy, params))


def _moved(sharding: Sharding, moved: dict[jax.Device, jax.Device]) -> Sharding:
    """Return the same sharding on other devices."""
    if not isinstance(sharding, NamedSharding):
        return SingleDeviceSharding(moved[next(iter(sharding.device_set))])
    devices = np.vectorize(moved.__getitem__, otypes=[object])(sharding.mesh.devices)
    return NamedSharding(Mesh(devices, sharding.mesh.axis_names), sharding.spec)
