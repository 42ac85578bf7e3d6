"""The MTP layer among new weights: a checkpoint has it next to the model's layers.

The engine's layer stays if the new weights have none. Drafts change no answer, so an old layer only drafts worse.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import TensorSource
from jpaged.loading.drafters.drafter import mesh_of, placer_of
from jpaged.loading.drafters.head_weights import head_shapes, load_head
from jpaged.loading.drafters.mtp import head_names, plan_new_layer
from jpaged.loading.model import LoadedModel
from jpaged.loading.updates.described import difference
from jpaged.models.draft_head import HeadSpec
from jpaged.models.families import family_of
from jpaged.models.families.base import Family
from jpaged.models.new_leaves import NewDrafter
from jpaged.models.quantization import LeafPlacer
from jpaged.models.spec import Params


@dataclasses.dataclass(frozen=True)
class MTPLayer:
    """Form and place of an engine's MTP layer."""

    spec: HeadSpec
    family: Family
    values: Mapping[str, Any]  # the model's config.json
    num_layers: int            # of the model
    dtype: np.dtype
    placer: LeafPlacer
    slots: Params              # `LeafSlot`s of its arrays

    @classmethod
    def of(
        cls, loaded: LoadedModel, config: EngineConfig, spec: Any, slots: Params, of_model: Sequence[Params],
        platform: str,
    ) -> Self | None:  # fmt: skip
        """The engine's MTP layer; None: its drafter is no such layer. spec, slots: of the drafter."""
        speculation = config.speculative_config
        if speculation is None or speculation.method != "mtp" or not isinstance(spec, HeadSpec) or not loaded.config:
            return None
        placer = placer_of(speculation, config, platform, mesh_of(of_model))
        layers = loaded.spec.num_layers
        return cls(spec, family_of(loaded.config), loaded.config, layers, loaded.dtype, placer, slots)

    @property
    def of_model(self) -> tuple[str, ...]:
        """Names of the model's tensors that the layer may have a copy of."""
        return head_names(self.family) if self.spec.own_head else ()

    def new(self, source: TensorSource) -> list[NewDrafter]:
        """The layer among new weights, checked; empty if they have none. Raises ModelLoadError if it does not fit."""
        planned = plan_new_layer(self.spec, self.family, self.values, source, self.num_layers)
        if planned is None:
            return []
        plan, tensors = planned
        if differs := difference(head_shapes(plan, self.dtype, None, self.placer), self.slots):
            name, have, want = differs
            raise ModelLoadError(f"{name} of the MTP layer is {have}, and the engine has {want}")
        return [NewDrafter(functools.partial(load_head, plan, tensors, self.dtype, None, self.placer))]
