"""Trees of live arrays like those of trainers: separate q, k, v and gate, up, and split over a mesh."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged import LLM, WeightUpdate
from jpaged.models.new_leaves import slots_of
from jpaged.models.spec import DecoderSpec

# Matrices [out, in]: outputs of q, k, v, gate and up are split, and inputs of o and down, as Megatron-LM does
OUT, IN = PartitionSpec("model"), PartitionSpec(None, "model")
RULES = {
    "q": OUT, "k": OUT, "v": OUT, "gate": OUT, "up": OUT, "o": IN, "down": IN, "embed": OUT, "lm_head": OUT,
    "qkv": OUT, "qkv_bias": OUT, "gate_up": IN,
}  # fmt: skip


class Stage:
    """The part of a StageRunner that `replace_leaves` uses."""

    def __init__(self, params: Any):
        self.slots, self.params, self.owned = slots_of(params), params, True

    def take_params(self) -> Any:
        tree, self.params = self.params, None
        return {**tree, "layers": tuple(dict(layer) for layer in tree["layers"])}

    def use_params(self, params: Any, *, owned: bool) -> None:
        self.params, self.owned = params, owned


def split(spec: DecoderSpec, params: dict[str, Any], turn: bool = False) -> dict[str, Any]:
    """Return the parameters with separate q, k, v and gate, up. turn: store the matrices of layers as [in, out]."""
    layers = []
    for layer in params["layers"]:
        qkv = layer["qkv"]
        out = {
            "q": qkv[:, :-2].reshape(-1, spec.hidden_size),
            "k": qkv[:, -2].reshape(-1, spec.hidden_size),
            "v": qkv[:, -1].reshape(-1, spec.hidden_size),
            "gate": layer["gate_up"][0],
            "up": layer["gate_up"][1],
            "o": layer["o"],
            "down": layer["down"],
        }
        layers.append({name: jnp.array(a.T) if turn else a for name, a in out.items()})
    return params | {"layers": tuple(layers)}


def on_mesh(params: dict[str, Any], mesh: Mesh, rules: dict[str, PartitionSpec], turn: bool = False) -> dict[str, Any]:
    """The tree on a mesh. Leaves without a rule, or that the mesh does not divide, are whole. turn: as for `split`."""

    def placed(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        rule = rules.get(path[-1].key, PartitionSpec())
        if turn and path[0].key == "layers":
            rule = PartitionSpec(*reversed((*rule, None, None)[:2]))
        axis = next((axis for axis, part in enumerate(rule) if part is not None), None)
        if axis is None or axis >= leaf.ndim or leaf.shape[axis] % mesh.size:
            rule = PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, rule))

    return jax.tree_util.tree_map_with_path(placed, params)


def buffers(leaf: jax.Array) -> list[int]:
    """Addresses of an array's parts, by device."""
    return [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]


def live_bytes() -> int:
    """Bytes of all arrays on all devices. Arrays that share a buffer count once."""
    parts = {
        (shard.device, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for array in jax.live_arrays() if not array.is_deleted() for shard in array.addressable_shards
    }  # fmt: skip
    return sum(parts.values())


def update_and_count(llm: LLM, tree: Any) -> tuple[WeightUpdate, list[tuple[int, str]]]:
    """Update the weights. Returns the bytes that all arrays took after each leaf, less those before, and its name."""
    (leaves,) = llm._prepared(tree, None, None)
    start, counted = live_bytes(), []

    def counting(leaf: Any) -> Any:
        def make() -> Any:
            made = leaf.make()
            counted.append((live_bytes() - start, leaf.name))
            return made

        return dataclasses.replace(leaf, make=make)

    llm.engine.flush()
    update = llm.engine.update_weights([counting(leaf) for leaf in leaves()])
    return update, counted
