"""Form and place of an engine's weights."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from jpaged.config import EngineConfig
from jpaged.loading.model import LoadedModel, quantizer_of
from jpaged.loading.updates.drafter_update import MTPLayer
from jpaged.models.families import family_of
from jpaged.models.families.base import Family
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.families.llama import LLAMA
from jpaged.models.kv_scales import KVScales
from jpaged.models.new_leaves import LeafSlot, NewLeaf, find_layer
from jpaged.models.quantization import LeafPlacer
from jpaged.models.spec import DecoderSpec, Params, WeightLayout


@dataclasses.dataclass(frozen=True)
class EngineWeights:
    """Everything that an update must know about an engine's weights."""

    config: EngineConfig
    family: Family           # has the names of tensors
    constants: Mapping[str, float]  # values of leaves without a tensor
    spec: DecoderSpec        # of the whole model, before `split_spec`
    layout: WeightLayout     # of the engine's tree
    dtype: np.dtype          # of the engine's dense leaves
    placer: LeafPlacer       # as at the start
    device: jax.Device       # the engine's first
    slots: Sequence[Params]  # `LeafSlot`s, a tree for each pipeline stage
    kv_scales: KVScales | None = None  # of the checkpoint that the engine started with
    mtp: MTPLayer | None = None  # drafts on the device
    shared: bool = False     # other engines use the same arrays

    @classmethod
    def of(cls, loaded: LoadedModel, config: EngineConfig, slots: Sequence[Params], device: jax.Device) -> Self:
        """Those of an engine that was started with `loaded`, whose params are not kept."""
        spec = loaded.spec if loaded.stored_spec is None else loaded.stored_spec
        family, constants = LLAMA, {}  # live arrays of a DecoderSpec: Llama's names
        if loaded.config:
            family = family_of(loaded.config)
            constants = dict(family.constants(CheckpointConfig(loaded.config)))
        placer = quantizer_of(config, device.platform) if loaded.placer is None else loaded.placer
        return cls(
            config, family, constants, spec, loaded.layout, loaded.dtype, placer, device, slots, loaded.stored_kv_scales
        )

    def slot(self, layer: int | None, name: str) -> Any:
        """The `LeafSlot` of a leaf, or a weight of several. None: it is not in the model, or split over stages."""
        if layer is None:
            return self.slots[0].get(name) if len(self.slots) == 1 else None
        place = find_layer(self.slots, layer)
        return None if place is None else self.slots[place[0]]["layers"][place[1]].get(name)

    def fits(self, layer: int | None, name: str, array: Any) -> bool:
        """True if the programs accept an array as a leaf, without a copy, on all stages that have the leaf."""
        if layer is None:
            slots = [tree[name] for tree in self.slots if name in tree]
        else:
            slots = [self.slot(layer, name)]
        if not slots or not isinstance(array, jax.Array):
            return False
        return all(isinstance(slot, LeafSlot) and slot.fits(array) for slot in slots)

    def on_device(self, leaf: NewLeaf) -> NewLeaf:
        """The same leaf, made with the engine's device as JAX's default."""

        def make() -> Any:
            with jax.default_device(self.device):
                return leaf.make()

        return dataclasses.replace(leaf, make=make)
