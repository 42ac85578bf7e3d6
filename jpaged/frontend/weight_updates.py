"""Prepares updates of the weights: `LLM.update_weights` and `AsyncLLM.update_weights`.

Imported late: JAX and all that uses it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jpaged.config import EngineConfig
from jpaged.errors import EngineError
from jpaged.frontend.traced_calls import refuse_tracing
from jpaged.loading import LoadedModel
from jpaged.loading.model import quantizer_of
from jpaged.loading.updates import EngineWeights, copies, prepare
from jpaged.models.new_leaves import NewLeaf
from jpaged.models.spec import WeightLayout
from jpaged.models.stages import placer_for

if TYPE_CHECKING:
    from jpaged.runtime.runner import ModelRunner

Leaves = Callable[[], Iterable[NewLeaf]]


class WeightUpdater:
    """Prepares updates for all engines of one `LLM` or `AsyncLLM`."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, runners: "Sequence[ModelRunner]"):
        """loaded: its params are not kept. runners: of the engines."""
        self._config, self._runners = config, runners
        first = runners[0]
        spec = loaded.spec if loaded.stored_spec is None else loaded.stored_spec
        device = first.first_device
        placer = placer_for(quantizer_of(config, device.platform), config, spec)
        self._engine = EngineWeights(spec, loaded.layout, loaded.dtype, placer, device, first.weight_slots)

    def prepare(self, weights: Any, layout: WeightLayout | None) -> list[Leaves]:
        """Check new weights. Returns for each engine a function that returns its leaves, to be called in this order.

        The first engine gets the caller's weights. The others get its arrays, or copies on their own devices.
        Raises ModelLoadError and RequestError before anything is replaced.
        """
        if self._config.nnodes > 1:
            raise EngineError(
                f"update_weights: the engine has {self._config.nnodes} processes, which do not share the caller's "
                "arrays: start all processes again, or use an engine of one process"
            )
        refuse_tracing(*jax.tree.leaves(weights))
        new = prepare(weights, self._engine, layout)
        return [lambda: new, *(self._copies_for(runner) for runner in self._runners[1:])]

    def _copies_for(self, runner: "ModelRunner") -> Leaves:
        return lambda: copies(self._runners[0].stage_params, runner.weight_slots)
