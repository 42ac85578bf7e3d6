"""Prepares updates of the weights: `LLM.update_weights` and `AsyncLLM.update_weights`.

Imported late: JAX and all that uses it.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jpaged.config import EngineConfig
from jpaged.frontend.group_updates import LeaderUpdates
from jpaged.frontend.traced_calls import refuse_tracing
from jpaged.loading import LoadedModel
from jpaged.loading.updates import EngineWeights, MTPLayer, copies, drafter_copy, moved, prepare
from jpaged.models.new_leaves import NewDrafter, NewLeaf
from jpaged.models.spec import WeightLayout

if TYPE_CHECKING:
    from jpaged.runtime.parallel.process_group import ProcessGroup
    from jpaged.runtime.runner import ModelRunner

Leaves = Callable[[], Iterable[NewLeaf | NewDrafter]]


class WeightUpdater:
    """Prepares updates for all engines of one `LLM` or `AsyncLLM`."""

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, runners: "Sequence[ModelRunner]",
        group: "ProcessGroup | None" = None,
    ):  # fmt: skip
        """loaded: its params are not kept. runners: of the engines. group: other processes of the one engine."""
        self._runners = runners
        engine = EngineWeights.of(loaded, config, runners[0].weight_slots, runners[0].first_device)
        shared = any(runner.first_device == engine.device for runner in runners[1:])
        mtp, first = None, runners[0]
        if group is None and first.drafter_slots is not None:
            spec, platform = first.drafter_spec, engine.device.platform
            mtp = MTPLayer.of(loaded, config, spec, first.drafter_slots, engine.slots, platform)
        self._engine = dataclasses.replace(engine, shared=shared, mtp=mtp)
        self._group = None if group is None else LeaderUpdates(self._engine, group)

    def prepare(self, weights: Any, layout: WeightLayout | None) -> list[Leaves]:
        """Check new weights. Returns for each engine a function that returns its leaves, to be called in this order.

        An engine that has ended may be left out. The first engine that is not gets the caller's weights. The others get
        its arrays, or copies on their own devices. Raises ModelLoadError and RequestError before anything is replaced.
        """
        refuse_tracing(*(jax.tree.leaves(weights) if isinstance(weights, Mapping) else ()))
        if self._group is not None:
            return [self._group.prepare(weights, layout)]
        given = prepare(weights, self._engine, layout)
        updated: list[ModelRunner] = []  # the first engine's that gets new weights

        def leaves_of(runner: "ModelRunner") -> Iterable[NewLeaf | NewDrafter]:
            if updated:
                tree, slots = updated[0].drafter_params, runner.drafter_slots
                has_layer = self._engine.mtp is not None and tree is not None and slots is not None
                drafter = [drafter_copy(tree, slots)] if has_layer else []
                return [*copies(updated[0].stage_params, runner.weight_slots), *drafter]
            updated.append(runner)
            if runner is self._runners[0]:
                return given()
            return moved(given(), runner.weight_slots, runner.drafter_slots)

        return [functools.partial(leaves_of, runner) for runner in self._runners]
