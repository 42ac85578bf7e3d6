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

from jpaged.config import DTYPE_ALIASES, EngineConfig
from jpaged.errors import RequestError
from jpaged.models.adapters import EMBED, Adapter, AdapterPool, AdapterTarget, adapter_targets, pool_shapes
from jpaged.models.padding import pad_leaf
from jpaged.models.sharding import WHOLE, Shards, shards_of, split_axis
from jpaged.models.spec import DecoderSpec, WeightLayout
from jpaged.runtime.placement import Placement
from jpaged.runtime.store.stored_programs import ProgramStore, compile_program


@dataclasses.dataclass(frozen=True)
class AdapterOptions:
    """Sizes of the pools of an engine."""

    spec: DecoderSpec    # of the engine, after `split_spec`
    stored: DecoderSpec  # of the checkpoint, before it
    layout: WeightLayout
    slots: int           # adapters that are on the device at a time
    rank: int            # largest rank of an adapter
    dtype: np.dtype
    shards: Shards = WHOLE

    @classmethod
    def of(
        cls, spec: DecoderSpec, config: EngineConfig, dtype: np.dtype, layout: WeightLayout = WeightLayout(), *,
        stored: DecoderSpec | None = None,
    ) -> "AdapterOptions | None":  # fmt: skip
        """The sizes that the options ask for; None without `enable_lora`.

        dtype: of the checkpoint, for lora_dtype="auto". stored: spec before `split_spec`; None: it is not needed,
        because no adapter is read. Raises RequestError if the model cannot have adapters.
        """
        if not config.enable_lora:
            return None
        if spec.latent is not None:
            known = "is not supported yet for models with latent attention: leave it out"
            raise RequestError("enable_lora", True, known)
        name = DTYPE_ALIASES.get(config.lora_dtype, config.lora_dtype)
        chosen = dtype if name == "auto" else np.dtype(getattr(jnp, name))
        sizes = (config.max_loras, config.max_lora_rank, chosen, shards_of(config))
        options = cls(spec, stored or spec, layout, *sizes)
        if [target.layers for target in options.targets] != [target.layers for target in options._stored.values()]:
            raise RequestError(
                "enable_lora", True, "layers of this model have unlike sizes, which are equal when they are padded for "
                f"tensor_parallel_size={config.tensor_parallel_size}: use another size"
            )  # fmt: skip
        return options

    @functools.cached_property
    def targets(self) -> tuple[AdapterTarget, ...]:
        """The matrices that adapters may change."""
        return adapter_targets(self.spec, self.layout)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one adapter in host memory: a slot of all pools, whatever the adapter's rank."""
        shapes = pool_shapes(self.targets, slots=1, rank=self.rank, dtype=self.dtype)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))

    def shapes(self, placement: Placement) -> dict[str, AdapterPool]:
        """The pools as ShapeDtypeStructs, with their shardings."""
        shapes = pool_shapes(self.targets, slots=self.slots, rank=self.rank, dtype=self.dtype)
        return {target.name: self._placed(target, shapes[target.name], placement) for target in self.targets}

    def create(self, placement: Placement) -> dict[str, AdapterPool]:
        """Allocate empty pools. Rank 0 means that a slot changes nothing, so only `ranks` must be zeros."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), self.shapes(placement))

    def _placed(self, target: AdapterTarget, pool: AdapterPool, placement: Placement) -> AdapterPool:
        """A pool's shapes with shardings. Like the matrix, B is split along its outputs, or A along its inputs.

        The embedding's adapters are whole on every device.
        """
        splits = {"a": None, "b": None, "ranks": None, "scales": None}
        axis = _split_axis(target, self.shards, self.spec)
        if axis is not None:
            of_inputs = axis == len(target.out_shape)
            splits["a" if of_inputs else "b"] = 4 if of_inputs else 3 + axis
        return AdapterPool(**{name: placement.split(getattr(pool, name), axis) for name, axis in splits.items()})

    def content(self, adapter: Adapter) -> dict[str, AdapterPool]:
        """An adapter as the slice of one slot of each pool: host arrays, padded to the largest rank.

        Pools that the adapter does not change get rank 0.
        """
        return {target.name: self._content(target, adapter) for target in self.targets}

    def _content(self, target: AdapterTarget, adapter: Adapter) -> AdapterPool:
        shape = pool_shapes((target,), slots=1, rank=self.rank, dtype=self.dtype)[target.name]
        empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shape)
        matrix = adapter.matrices.get(target.name)
        if matrix is None:
            return empty
        rank, stored = matrix.b.shape[2], self._stored[target.name]
        a, b = matrix.a, matrix.b.reshape(*matrix.b.shape[:3], *stored.out_shape)
        if (stored.inputs, stored.out_shape) != (target.inputs, target.out_shape):
            a, b = self._padded(target, a, b)
        if target.leaf == EMBED:
            empty.a[..., :rank] = a
        else:
            empty.a[..., :rank, :] = a
        empty.b[:, :, :rank] = b
        empty.ranks[:], empty.scales[:] = matrix.ranks, matrix.scales
        return empty

    @functools.cached_property
    def _stored(self) -> dict[str, AdapterTarget]:
        """The targets of the checkpoint, by name."""
        return {target.name: target for target in adapter_targets(self.stored, self.layout)}

    def _padded(
        self, target: AdapterTarget, a: np.ndarray, b: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """A and B of a matrix with the sizes of `split_spec`, padded as `pad_leaf` pads the matrix."""
        pad = functools.partial(pad_leaf, target.leaf, spec=self.stored.of_layer(target.layers[0]), shards=self.shards)
        if _split_axis(target, self.shards, self.spec) == len(target.out_shape):  # inputs; it has one part
            padded = [[pad(of_expert[0])[None] for of_expert in of_layer] for of_layer in a]
            return np.array(padded), b
        padded = [[np.moveaxis(pad(np.moveaxis(of_expert, 0, -1)), -1, 0) for of_expert in of_layer] for of_layer in b]
        return a, np.array(padded)


def write_slot(
    pools: Mapping[str, AdapterPool], slot: Int[Array, ""], content: Mapping[str, AdapterPool]
) -> Mapping[str, AdapterPool]:
    """Write `content`, as from `AdapterOptions.content`, into a slot of all pools. Donate `pools`."""

    def written(pool: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(pool, new, slot * new.shape[1], 1)  # one entry per expert

    return jax.tree.map(written, pools, content)


def compile_write_slot(
    options: AdapterOptions, placement: Placement, store: ProgramStore | None
) -> jax.stages.Compiled:
    """Compile `write_slot`."""
    pools = options.shapes(placement)
    content = dataclasses.replace(options, slots=1).shapes(placement)
    call = functools.partial(write_slot)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, pools)
    arguments = (pools, placement.shape((), np.int32), content)
    return compile_program(call, arguments, donate=(0,), out_shardings=shardings, store=store)


def _split_axis(target: AdapterTarget, shards: Shards, spec: DecoderSpec) -> int | None:
    """Split axis of a matrix of one expert; None: it is whole on every device."""
    experts = 1 if target.leaf.startswith("expert_") else 0
    if target.leaf == EMBED or shards.count == 1:
        return None
    axis = split_axis(target.leaf, experts + len(target.out_shape) + 1, shards, spec)
    return None if axis is None else axis - experts
