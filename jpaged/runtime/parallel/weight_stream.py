"""Sends new weights from node 0 to the other nodes of an engine, leaf by leaf.

1. `LeafSender` takes the place of node 0's placer. Each leaf that node 0 places is on its host, whole. The sender sends
   each other node the part that its devices need, then places node 0's own part.
2. `received_leaves` makes the same leaves on another node. The node's placer splits and quantises them as at the start.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from jpaged.errors import ModelLoadError
from jpaged.models.new_leaves import NewLeaf
from jpaged.models.quantization import LeafPlacer, Scheme
from jpaged.models.resharding import on_host
from jpaged.models.shard_weights import Bounds, ShardedQuantizer
from jpaged.models.spec import Params
from jpaged.runtime.parallel.process_group import ProcessGroup
from pallas_kernels import QuantizedWeight

logger = logging.getLogger(__name__)

ABANDONED = "node 0 has ended the update"


@dataclasses.dataclass(frozen=True)
class LeafSender(LeafPlacer):
    """Sends each leaf to the other nodes, then places it.

    devices: of each other node, by rank from 1. layer: of the leaves; None: outside of layers.
    """

    placer: ShardedQuantizer
    group: ProcessGroup
    devices: Sequence[Sequence[jax.Device]]
    layer: int | None = None

    @classmethod
    def of(cls, placer: ShardedQuantizer, group: ProcessGroup) -> "LeafSender":
        """The sender of an engine whose placer is `placer`."""
        devices = list(placer.mesh.devices.flat) if isinstance(placer.mesh, jax.sharding.Mesh) else []
        by_rank = [[each for each in devices if each.process_index == rank] for rank in range(1, group.size)]
        return cls(placer, group, by_rank)

    def of_layer(self, layer: int | None) -> "LeafSender":
        """The sender of a layer's leaves."""
        return dataclasses.replace(self, layer=layer)

    def __call__(self, name: str, leaf: Float[Any, "*shape"]) -> Any:
        """Send and place the dense leaf `name`. leaf: numpy or jax array of this process, in the default layout."""
        host = on_host(leaf) if isinstance(leaf, jax.Array) else leaf
        messages = []
        for devices in self.devices:
            bounds = self.placer.needed(name, host.shape, devices)
            part = host[tuple(slice(*each) for each in bounds)]
            messages.append((("leaf", self.layer, name, str(host.dtype), tuple(host.shape), bounds), part))
        self.group.send_arrays(messages)
        return self.placer(name, host)

    def part(self, name: str, leaf: Any) -> Array:
        """Not used: arrays of an update are not quantised."""
        raise NotImplementedError(name)

    def packed(self, name: str, weight: QuantizedWeight) -> Any:
        """Not used: arrays of an update are not quantised."""
        raise NotImplementedError(name)

    def packed_shape(self, name: str, weight: QuantizedWeight) -> Any:
        """As the placer."""
        return self.placer.packed_shape(name, weight)

    def shapes(self, shapes: Params) -> Params:
        """As the placer."""
        return self.placer.shapes(shapes)

    def reads_views(self, name: str, shape: tuple[int, ...]) -> bool:
        """As the placer."""
        return self.placer.reads_views(name, shape)

    def scheme_of_leaf(self, name: str, shape: tuple[int, ...]) -> Scheme | None:
        """As the placer."""
        return self.placer.scheme_of_leaf(name, shape)


def received_leaves(
    group: ProcessGroup, placer: LeafPlacer, commands: Mapping[str, Callable[..., None]]
) -> Iterator[NewLeaf]:
    """The leaves that node 0 sends, on another node. Ends the process if node 0 is lost.

    commands: functions of calls that may come between two leaves, by name. Raises ModelLoadError if node 0 fails.
    """
    [leader] = group.channels
    while True:
        try:
            command, *values = leader.receive()
            if command == "end_of_weights":
                return
            if command == "abandon_weights":
                raise ModelLoadError(ABANDONED)
            if command != "leaf":
                commands[command](*values)
                continue
            layer, name, dtype, shape, bounds = values
            part_shape = tuple(stop - start for start, stop in bounds)
            data = leader.receive_bytes(int(np.prod(part_shape, dtype=np.int64)) * jnp.dtype(dtype).itemsize)
        except (EOFError, OSError):
            group.lost("node 0")
            raise
        part = data.view(jnp.dtype(dtype)).reshape(part_shape)
        make = functools.partial(_placed, placer.of_layer(layer), name, part, shape, bounds)
        yield NewLeaf(layer, name, make, owned=True)


def _placed(
    placer: LeafPlacer, name: str, part: Shaped[np.ndarray, "..."], shape: tuple[int, ...], bounds: Bounds
) -> Any:
    """A leaf on the devices of this node. The placer reads only `part` of the leaf: other pages take no memory."""
    leaf = part
    if part.shape != tuple(shape):
        leaf = np.zeros(shape, part.dtype)
        leaf[tuple(slice(*each) for each in bounds)] = part
    return placer(name, leaf)
