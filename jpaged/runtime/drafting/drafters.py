"""`DraftModel` and `DraftHead`: a drafter's weights, state and programs. The runner calls their methods.

Called by: the runner, on the engine's thread. Compiling may happen in any thread.
Owns: the drafter's `DraftState` and its compiled programs.
Never: waits for a step. Every method returns at once, and results are device arrays.

Order in a verify step: `DraftModel.propose` or `DraftHead.propose`, then the target's verify forward program with the
drafts, then its sample program. `DraftHead.absorb` runs after the sample program of every step that the head follows.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jpaged.engine.step_plan import HeadPlan, ModelDraftPlan, StepPlan
from jpaged.models.spec import Params
from jpaged.runtime.drafting.draft_head import (
    HeadOptions,
    compile_draft_head,
    num_rows_of,
    pack_head_absorb,
    pack_head_propose,
    target_leaves,
)
from jpaged.runtime.drafting.draft_model import (
    DraftModelOptions,
    compile_draft_model,
    pack_absorb,
    pack_propose,
)
from jpaged.runtime.drafting.draft_state import DraftSizes, DraftState, create_draft_state, draft_state_shapes
from jpaged.runtime.kv_format import KVFormat
from jpaged.runtime.placement import Placement
from jpaged.runtime.state import DeviceState
from jpaged.runtime.step.draft_shapes import (
    AbsorbShape,
    DraftShape,
    HeadAbsorbShape,
    HeadProposeShape,
    ProposeShape,
)
from jpaged.runtime.step.forward import flat_weights
from jpaged.runtime.store.stored_programs import ProgramStore


@dataclasses.dataclass(frozen=True)
class DraftBuild:
    """Everything that the programs of a drafter are compiled from."""

    options: DraftModelOptions | HeadOptions
    params: Params       # of the drafter: arrays or ShapeDtypeStructs, whole on every device
    target_params: Params  # the target's whole tree
    target: DeviceState  # the target's state, or its shapes
    sizes: DraftSizes
    dtype: np.dtype      # of the drafter's weights and hidden states
    placement: Placement
    kv_format: KVFormat | None = None  # of the drafter's pages; None: pages of `dtype`
    store: ProgramStore | None = None

    def state_shapes(self) -> DraftState:
        """The drafter's state as ShapeDtypeStructs."""
        return draft_state_shapes(
            self._spec, self.sizes, dtype=self.dtype, kv_format=self.kv_format, placement=self.placement
        )

    def create_state(self) -> DraftState:
        """Allocate the drafter's state."""
        return create_draft_state(
            self._spec, self.sizes, dtype=self.dtype, kv_format=self.kv_format, placement=self.placement
        )

    @property
    def _spec(self) -> Any:
        return self.options.spec if isinstance(self.options, DraftModelOptions) else self.options.spec.layer

    def compile(self, shape: DraftShape) -> jax.stages.Compiled:
        """Compile one program."""
        table, blocks = self.target.table, self.target.blocks
        if isinstance(self.options, HeadOptions):
            assert isinstance(shape, HeadAbsorbShape | HeadProposeShape)
            return compile_draft_head(
                self.params, self.target_params, self.state_shapes(), table, blocks, shape,
                hidden_dtype=self.target.hidden.dtype, options=self.options, placement=self.placement,
                store=self.store,
            )  # fmt: skip
        assert isinstance(shape, AbsorbShape | ProposeShape)
        return compile_draft_model(
            self.params, self.state_shapes(), table, blocks, shape, options=self.options, placement=self.placement,
            store=self.store,
        )  # fmt: skip


class _Drafter:
    """State and programs of a drafter."""

    def __init__(self, build: DraftBuild, params: Params, programs: Mapping[DraftShape, Callable[..., Any]]):
        """Allocate the state.

        params:   the drafter's weights.
        programs: compiled with `DraftBuild.compile`, by shape. Another thread may add programs.
        """
        self._build, self.programs = build, programs
        self.use(params)
        self.state: DraftState | None = build.create_state()

    def use(self, params: Params | None) -> None:
        """Use these weights of the drafter from now on. None: drop them."""
        self._weights = () if params is None else flat_weights(params)

    def _smallest(self, kind: type, rows: int, tokens: int = 0, **wanted: Any) -> Any:
        """The smallest program of a kind for rows and tokens. Raises ValueError if none is large enough."""
        fits = [
            shape for shape in self.programs
            if isinstance(shape, kind) and shape.rows >= rows and getattr(shape, "tokens", 0) >= tokens
            and all(getattr(shape, name) == value for name, value in wanted.items())
        ]  # fmt: skip
        if not fits:
            raise ValueError(f"no {kind.__name__} program for {rows} rows and {tokens} tokens with {wanted}")
        return min(fits, key=lambda shape: (shape.rows, getattr(shape, "tokens", 0)))

    @property
    def live(self) -> DraftState:
        """The state. There is none between `release` and `restore`."""
        assert self.state is not None
        return self.state

    def _keep(self, arrays: Any) -> None:
        page_arrays, tail, hidden, progress = arrays
        self.state = DraftState(page_arrays, tail, hidden, progress, self.live.page_v_dim)

    def recover(self) -> None:
        """Allocate an empty state if the old one was donated to a failed step. The host must `reset` its progress."""
        if self.state is not None and any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
            self.state = self._build.create_state()

    def release(self) -> None:
        """Free the state."""
        for leaf in jax.tree.leaves(self.state):
            if not leaf.is_deleted():
                leaf.delete()
        self.state = None

    def restore(self) -> None:
        """Allocate the state again, empty. The host must `reset` its progress."""
        if self.state is None:
            self.state = self._build.create_state()


class DraftModel(_Drafter):
    """A smaller model that proposes tokens."""

    def propose(
        self, plan: StepPlan, drafts: ModelDraftPlan, updates: np.ndarray, target: DeviceState, num_rows: int
    ) -> jax.Array:
        """Draft tokens for a verify step, before its forward program. Catches up first.

        plan:     of the verify step.
        updates:  int32[U, 3], its changes of block tables from `step.batch.block_updates`, also of the target's groups.
        target:   its table and blocks are read.
        num_rows: rows of the verify program.

        Returns int32[num_rows, k], in the order of `plan.rows`; -1: no draft.
        """
        options = self._build.options
        assert isinstance(options, DraftModelOptions)
        self.absorb(drafts, target)
        shape = self._smallest(ProposeShape, num_rows)
        packed = pack_propose(
            plan.rows, drafts.num_drafts, drafts.num_known, drafts.continues, drafts.known, updates, shape,
            options.columns,
        )  # fmt: skip
        arrays, tokens = self.programs[shape](self._weights, self.live.arrays, target.table, target.blocks, packed)
        self._keep(arrays)
        return tokens


    def absorb(self, drafts: ModelDraftPlan, target: DeviceState) -> None:
        """Compute the KV of known tokens."""
        for part in drafts.absorbs:
            shape = self._smallest(AbsorbShape, len(part.rows), len(part.tokens))
            packed = pack_absorb(part.rows, part.first, part.num_tokens, part.tokens, shape)
            self._keep(self.programs[shape](self._weights, self.live.arrays, target.table, target.blocks, packed))


class DraftHead(_Drafter):
    """A layer that proposes tokens from the target's hidden states."""

    def __init__(
        self, build: DraftBuild, params: Params, target_params: Params,
        programs: Mapping[DraftShape, Callable[..., Any]],
    ):  # fmt: skip
        """Allocate the state. target_params: the target's weights. Others as in `_Drafter`."""
        super().__init__(build, params, programs)
        self.use_target(target_params)

    def use_target(self, params: Params) -> None:
        """Read these weights of the target from now on."""
        options = self._build.options
        assert isinstance(options, HeadOptions)
        self._columns = options.columns
        self._target = flat_weights(target_leaves(options.spec, options.target_spec, params))

    def absorb(
        self, drafts: HeadPlan, step_tokens: jax.Array, hidden: jax.Array, target: DeviceState, max_query_len: int
    ) -> None:
        """Follow a step, after its sample program.

        step_tokens, hidden: results of the step's forward program. max_query_len: of this program. target: its table
        and blocks are read.
        """
        rows, tokens = num_rows_of(step_tokens, len(hidden)), len(hidden)
        shape = self._smallest(HeadAbsorbShape, rows, tokens, max_query_len=max_query_len)
        packed = pack_head_absorb(drafts.next_tokens, drafts.starts, drafts.first_block, shape)
        self._keep(self.programs[shape](
            self._weights, self._target, self.live.arrays, target.table, target.blocks, step_tokens, hidden, packed
        ))  # fmt: skip

    def propose(
        self, plan: StepPlan, num_drafts: np.ndarray, updates: np.ndarray, target: DeviceState, num_rows: int
    ) -> jax.Array:
        """Draft tokens for a verify step, before its forward program. Arguments and result as in `DraftModel.propose`.

        num_drafts: int32[R], by row of the plan.
        """
        shape = self._smallest(HeadProposeShape, num_rows)
        packed = pack_head_propose(plan.rows, num_drafts, updates, shape, self._columns)
        arrays, tokens = self.programs[shape](
            self._weights, self._target, self.live.arrays, target.table, target.blocks, packed
        )
        self._keep(arrays)
        return tokens
