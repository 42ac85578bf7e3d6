"""StepDrafter: runs the drafter of an engine before and after its steps.

Called by: `ModelRunner`, on the engine's thread.
Owns: the drafter, and its weights while they are in host memory.
Never: waits for a step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jpaged.engine.step_plan import FROM_DEVICE, DeviceDrafter, StepPlan
from jpaged.errors import ModelLoadError
from jpaged.models.new_leaves import LeafSlot, slots_of
from jpaged.models.spec import Params
from jpaged.runtime.drafting.drafter_model import DrafterModel
from jpaged.runtime.drafting.drafters import DraftBuild, DraftHead, DraftModel
from jpaged.runtime.memory.sleeping import HostWeights
from jpaged.runtime.state import DeviceState
from jpaged.runtime.step.batch import ForwardShape, block_updates
from jpaged.runtime.step.draft_shapes import AbsorbShape
from jpaged.runtime.step.program_shapes import Shape
from jpaged.runtime.step.result import StepHandle


class StepDrafter:
    """A draft model, or a draft head, in the steps of an engine."""

    def __init__(
        self, build: DraftBuild, model: DrafterModel, params: Params, target: Params, programs: Mapping[Any, Any],
        shapes: Sequence[Shape],
    ):  # fmt: skip
        """Allocate the drafter's state.

        params: its weights. target: the target's weights. programs: by shape; another thread may add programs. shapes:
        of all programs.
        """
        self._absorbs = [shape for shape in shapes if isinstance(shape, AbsorbShape)]
        self._placement, self._columns = build.placement, build.options.columns
        self._max_len = model.max_len or model.layer_spec.max_position
        self._drafter: DraftModel | DraftHead
        if model.is_head:
            self._drafter = DraftHead(build, params, target, programs)
        else:
            self._drafter = DraftModel(build, params, programs)
        self._params: Params | None = params
        self.spec, self.slots = model.spec, slots_of(params)
        self._host_weights: HostWeights | None = None
        self._no_drafts: dict[ForwardShape, jax.Array] = {}

    @property
    def params(self) -> Params | None:
        """The weights, while they are on the device."""
        return self._params

    def as_engine_sees(self) -> DeviceDrafter:
        """The facts from which the engine plans the drafter's work."""
        return DeviceDrafter(
            isinstance(self._drafter, DraftHead), self._columns.first // self._columns.width, self._max_len,
            max((shape.tokens for shape in self._absorbs), default=0),
            max((shape.rows for shape in self._absorbs), default=0),
        )  # fmt: skip

    def before(self, plan: StepPlan, shape: ForwardShape, target: DeviceState) -> tuple[jax.Array, ...]:
        """The drafts of a verify step, as an argument of its forward program; () for other steps."""
        drafter, model = self._drafter, plan.model_drafts
        if plan.drafts is None:
            if model is not None and isinstance(drafter, DraftModel):
                drafter.absorb(model, target)
            return ()
        updates = block_updates(plan, self._columns.width)
        if isinstance(drafter, DraftModel):
            if model is not None:
                return (drafter.propose(plan, model, updates, target, shape.rows),)
        else:
            num_drafts = np.where(plan.drafts.first == FROM_DEVICE, plan.num_tokens - 1, 0)
            if num_drafts.any():
                return (drafter.propose(plan, num_drafts.astype(np.int32), updates, target, shape.rows),)
        if shape not in self._no_drafts:
            self._no_drafts[shape] = self._placement.put(np.full((shape.rows, shape.drafts), -1, np.int32))
        return (self._no_drafts[shape],)

    def after(self, handle: StepHandle, target: DeviceState) -> None:
        """Let a draft head follow a step that has sampled."""
        if handle.plan.head is not None and isinstance(self._drafter, DraftHead):
            self._drafter.absorb(handle.plan.head, *handle.captured, target, handle.max_query_len)

    def use_target(self, params: Params) -> None:
        """Read these weights of the target from now on."""
        if isinstance(self._drafter, DraftHead):
            self._drafter.use_target(params)

    def use_new(self, params: Params) -> None:
        """Replace the drafter's weights. Raises ModelLoadError if the programs do not accept them."""
        if jax.tree.structure(params) != jax.tree.structure(self.slots) or not all(
            jax.tree.leaves(jax.tree.map(LeafSlot.fits, self.slots, params))
        ):
            raise ModelLoadError("the new MTP layer has another form than the one that the programs were compiled for")
        self._params, self._host_weights = params, None
        self._drafter.use(params)

    def recover(self) -> None:
        """Allocate an empty state if the old one was donated to a failed step."""
        self._drafter.recover()

    def release(self) -> None:
        """Free the state, and move the weights to the host. On CPU they are in host memory."""
        self._drafter.release()
        if self._params is not None and self._placement.platform != "cpu":
            self._host_weights = HostWeights.take(self._params)
            self._params = None
            self._drafter.use(None)

    def restore(self, *, weights: bool, kv_cache: bool, target: Params | None) -> None:
        """Undo `release`. target: the target's weights."""
        if weights and self._host_weights is not None:
            self._params = self._host_weights.put()
            self._host_weights = None
            self._drafter.use(self._params)
        if weights and target is not None:
            self.use_target(target)
        if kv_cache:
            self._drafter.restore()

    def close(self) -> None:
        """Free the state, and drop the weights."""
        self._drafter.release()
        self._drafter.use(None)
        self._params = self._host_weights = None
