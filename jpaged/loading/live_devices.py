"""The devices of an engine with live arrays: those of `mesh`, of the arrays, or JAX's first ones. Places the arrays."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError, RequestError
from jpaged.loading.live import refuse_remote
from jpaged.models.quantization import LeafPlacer, Quantizer
from jpaged.models.shard_weights import ShardedQuantizer
from jpaged.models.sharding import WHOLE, find_devices, make_mesh
from jpaged.models.spec import DecoderSpec, Params, WeightLayout
from jpaged.models.stages import placer_for

_SIZES = ("pipeline_parallel_size", "tensor_parallel_size", "prefill_context_parallel_size")


def devices_of_mesh(mesh: Any, config: EngineConfig) -> list[jax.Device] | None:
    """The devices of `LLM(mesh=...)`, in their order; None without a mesh.

    Raises RequestError for another type, or for a mesh with another number of devices than the engine's sizes.
    """
    if mesh is None:
        return None
    if not isinstance(mesh, Mesh):
        raise RequestError("mesh", type(mesh).__name__, "must be a jax.sharding.Mesh, for example jax.make_mesh(…)")
    devices = list(mesh.devices.flat)
    for name in ("data_parallel_size", "nnodes"):
        if (value := getattr(config, name)) != 1:
            raise RequestError(name, value, "must be 1 with mesh: leave it out, or leave mesh out")
    if len(devices) != config.devices_per_engine:
        known = f"has {len(devices)} devices, but {_asked(config)}: {_remedy(len(devices))}, or pass another mesh"
        raise RequestError("mesh", f"Mesh{dict(mesh.shape)}", known)
    return devices


def devices_of_arrays(params: Params, config: EngineConfig) -> list[jax.Device] | None:
    """The devices of live arrays in the order of their mesh. None: JAX's first devices.

    Arrays that are on one device each do not count if others are split over several. Raises ModelLoadError if the
    arrays have another number of devices than the engine's sizes.
    """
    leaves = jax.tree.leaves(params)
    for leaf in leaves:
        refuse_remote(leaf)
    needed = config.devices_per_engine
    several = [leaf for leaf in leaves if len(leaf.sharding.device_set) > 1]
    found = {device for leaf in several or leaves for device in leaf.sharding.device_set}
    if len(found) == needed:
        return _in_order(several, found)
    if several:
        raise ModelLoadError(
            f"the arrays are on {len(found)} devices, but {_asked(config)}: {_remedy(len(found))}, or pass mesh= with "
            f"the engine's {'device' if needed == 1 else 'devices'}"
        )
    if len(found) > 1:
        raise ModelLoadError(
            f"the arrays are on {len(found)} devices, and each is on one: put them on one device, or split them over "
            "one mesh, or pass mesh= with the engine's devices"
        )
    return None


def live_placer(
    config: EngineConfig, spec: DecoderSpec, devices: Sequence[jax.Device] | None, layout: WeightLayout
) -> LeafPlacer:
    """The placer of live arrays. spec: before `split_spec`. devices: from the functions above."""
    if config.devices_per_engine > 1 or config.deterministic:
        return placer_for(Quantizer(), config, spec, chosen=devices, layout=layout)
    ((device,),) = find_devices(WHOLE, 1, devices)
    return ShardedQuantizer(Quantizer(), make_mesh([device], WHOLE), WHOLE, spec, layout)


def place_tree(placer: LeafPlacer, params: Params) -> Any:
    """Place a checked tree leaf by leaf. Returns the weights of an engine, as `LeafPlacer.finish`."""
    tree: Params = {
        "layers": tuple(
            {name: placer.of_layer(i)(name, leaf) for name, leaf in layer.items()}
            for i, layer in enumerate(params["layers"])
        )
    }
    whole = placer.of_layer(None)
    tree |= {name: whole(name, leaf) for name, leaf in params.items() if name != "layers"}
    return placer.finish(tree)


def _in_order(leaves: Sequence[jax.Array], found: set[jax.Device]) -> list[jax.Device]:
    """The devices in the order of a mesh that has them all; else in JAX's order."""
    for leaf in leaves:
        if isinstance(leaf.sharding, NamedSharding) and leaf.sharding.device_set == found:
            return list(leaf.sharding.mesh.devices.flat)
    return sorted(found, key=lambda device: device.id)


def _asked(config: EngineConfig) -> str:
    given = [f"{name}={size}" for name in _SIZES if (size := getattr(config, name)) > 1]
    sizes = " with ".join(given or ["tensor_parallel_size=1"])
    return f"{sizes} needs {config.devices_per_engine}"


def _remedy(found: int) -> str:
    return f"use tensor_parallel_size={found}" if found > 1 else "leave it out"
