"""A pipeline stage on its devices. An engine without pipeline parallelism has one stage, the last.

Called by: `ModelRunner`, which has the last stage; `FrontStages`, which has the stages before it.
Owns: the stage's weights, on the devices or asleep on the host; its `DeviceState`; the programs that change the state.
Never: waits for a step, or handles its failure.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jpaged.engine.step_plan import AdapterLoad, BlockMove, RowInit, RowMask, StepPlan, TransferCosts
from jpaged.errors import EngineError
from jpaged.models.adapters import AdapterPool
from jpaged.models.new_leaves import slots_of
from jpaged.models.spec import Params
from jpaged.runtime.adapter_pool import compile_write_slot
from jpaged.runtime.compile.blueprint import FittedBuild
from jpaged.runtime.compile.program_table import Program, ProgramTable
from jpaged.runtime.memory.sleeping import HostWeights
from jpaged.runtime.state import DeviceState
from jpaged.runtime.step.advance_states import pack_rows, state_params
from jpaged.runtime.step.batch import ForwardShape, pack, upload_long_rows
from jpaged.runtime.step.block_moves import BlockMover
from jpaged.runtime.step.forward import flat_weights, run_forward
from jpaged.runtime.step.output_programs import OutputShape, lm_head_params, score_lines, uses_extras
from jpaged.runtime.step.row_extras import ExtrasUploader

CLOSED = "the engine is closed: make a new one"


class StageRunner:
    """Weights, state and forward programs of one stage."""

    slots: Params                     # the `LeafSlot` of each array of `params`
    params: Params | None             # None while they are in host memory or discarded, and after `close`
    _weights: tuple[jax.Array, ...]   # of `params`, as the forward programs take them
    _lent: tuple[jax.Array, ...]      # arrays of `params` that the caller may delete

    def __init__(
        self, build: FittedBuild, params: Params, programs: ProgramTable, *, host_slots: int, owns_params: bool,
        handover: bool = False,
    ):  # fmt: skip
        """Compile the programs that copy. The caller sets `state`.

        params:      weights with the shapes of the blueprint, used without a copy.
        owns_params: nothing else uses the weights, so `release` may delete them on the device.
        host_slots, handover: see `BlockMover`.
        """
        self.build, self.programs, self.placement = build, programs, build.blueprint.placement
        options = build.blueprint.model.adapters
        self.adapters: Mapping[str, AdapterPool] | None = None  # None: the engine has none, and while asleep
        self._write_slot = None
        if options is not None:
            self.adapters = options.create(self.placement)
            self._write_slot = compile_write_slot(options, self.placement, build.store)
        self.state: DeviceState | None = None  # None between `release` and `restore`, and after `close`
        self.released = False                  # True: `restore` may allocate the state
        self.slots = slots_of(params)
        self.closed = False
        self._owns_params = owns_params
        self._host_weights: HostWeights | None = None
        self.discarded = False                 # `release` has discarded the weights, and there are no new ones yet
        self._width = build.limits.width
        self._upload_row = build.compile_upload_row()
        self.mover = BlockMover(
            build.state_shapes(), self.placement, host_slots=host_slots, handover=handover, store=build.store
        )
        self._use(params)

    def _use(self, params: Params | None) -> None:
        self.params = params
        self._weights = () if params is None else flat_weights(self._with_adapters(params))
        self._lent = () if params is None or self._owns_params else flat_weights(params)

    def _with_adapters(self, params: Params) -> Params:
        """The weights as programs take them: with the pools of adapters, if the engine has any."""
        return params if self.adapters is None else {**params, "adapters": self.adapters}

    def load_adapters(self, loads: Sequence[AdapterLoad]) -> None:
        """Write adapters into their slots, before the next step. Returns at once."""
        if self._write_slot is None or not loads:
            return
        try:
            for load in loads:
                self.adapters = self._write_slot(self.adapters, np.int32(load.slot), load.content)
        finally:
            self._use(self.params)  # each write donates the pools, also if a later write fails

    @property
    def live(self) -> DeviceState:
        """The state. Raises EngineError if there is none."""
        if self.state is None:
            raise EngineError(CLOSED)
        return self.state

    def forward(self, program: Program[ForwardShape], plan: StepPlan, *more: jax.Array) -> Any:
        """Run a plan with a program of the table. Returns the second result of `step.forward.forward`.

        more: hidden states from the stage before, or drafts from a drafter on the device; none in other programs.
        """
        state, most = self.live, program.shape.max_updates
        if len(plan.moves):
            state = self.state = self.mover.run(state, plan.moves)
        self.state, updates = upload_long_rows(state, plan, self._width, most, self._upload_row, self.placement)
        packed = pack(plan, updates, program.shape)
        # `packed` is a numpy array: the call uploads it in 4 us, `jax.device_put` takes 40 to 75 us
        self.state, result = run_forward(program.run, self._weights, self.state, packed, *more)
        return result

    def write_blocks(
        self, moves: Sequence[tuple[BlockMove, int, int]], blocks: Sequence[int],
        contents: Sequence[tuple[np.ndarray, ...]],
    ) -> None:  # fmt: skip
        """Run moves, then write `contents` into `blocks`, before the next step."""
        if len(moves):
            self.state = self.mover.run(self.live, np.array(moves, np.int32))
        if len(blocks):
            self.state = self.mover.write(self.live, blocks, contents)

    @property
    def no_update(self) -> str | None:
        """Reason why the weights cannot be replaced now; None: they can."""
        if self._host_weights is not None:
            return 'the weights sleep: call wake_up(["weights"]) before they are replaced'
        return CLOSED if self.closed else None

    def take_params(self) -> Params:
        """Give up the weights: an empty tree if there are none. The caller's tree has the only references to them."""
        params = self.params
        self._use(None)
        if params is None:
            return {"layers": tuple({} for _ in self.slots["layers"])}
        return {**params, "layers": tuple(dict(layer) for layer in params["layers"])}

    def use_params(self, params: Params, *, owned: bool) -> None:
        """Use new weights, with arrays that fit `slots`. owned: nothing else uses any of them."""
        self._owns_params, self.discarded = owned, False
        self._use(params)

    @property
    def has_params(self) -> bool:
        """True if the weights are on the devices or asleep on the host, and the caller has deleted none of them."""
        if self.params is None:
            return self._host_weights is not None
        return not any(array.is_deleted() for array in self._lent)

    def recover(self) -> None:
        """Allocate an empty state if the old one was donated to a failed step, and likewise empty pools of adapters."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.adapters)):
            self._create_adapters()
        if self.state is not None and any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
            self.state = self.build.create_state()

    def release(self, *, discard: bool = False) -> None:
        """Free the state, and move weights that the runner owns to the host. On CPU they are in host memory.

        discard: delete weights that the runner owns, on CPU too, and drop the references to the caller's.
        """
        self._free_state()
        self._free_adapters()
        self.released = True
        if discard:
            self._discard()
        elif self._owns_params and self.params is not None and self.placement.platform != "cpu":
            self._host_weights = HostWeights.take(self.params)
            self._use(None)

    def _discard(self) -> None:
        for leaf in jax.tree.leaves(self.params) if self._owns_params else ():
            if not leaf.is_deleted():  # tied weights are in the tree twice, and engines may share a tree
                leaf.delete()
        self._host_weights, self.discarded = None, True
        self._use(None)

    def restore(self, *, weights: bool, kv_cache: bool) -> None:
        """Undo `release`. weights: copy the weights back from the host. kv_cache: allocate new states."""
        if weights and self._host_weights is not None:
            self._use(self._host_weights.put())
            self._host_weights = None
        if kv_cache and self.released:
            self._create_adapters()
            self.state = jax.block_until_ready(self.build.create_state())
            self.released = False

    def close(self) -> None:
        """Free the state, and drop the references to the weights."""
        self._free_state()
        self._free_adapters()
        self.released, self._host_weights, self.closed = False, None, True
        self._use(None)

    def _create_adapters(self) -> None:
        """Allocate empty pools of adapters, if the engine has any."""
        options = self.build.blueprint.model.adapters
        if options is not None:
            self.adapters = options.create(self.placement)
            self._use(self.params)

    def _free_adapters(self) -> None:
        for leaf in jax.tree.leaves(self.adapters):
            if not leaf.is_deleted():
                leaf.delete()
        self.adapters = None

    def _free_state(self) -> None:
        for leaf in jax.tree.leaves(self.state):
            if not leaf.is_deleted():
                leaf.delete()
        self.state = None
        self.mover.close()


class LastStageRunner(StageRunner):
    """The last stage. It also runs the programs after the forward pass: `sample`, `score` and `pool`."""

    def __init__(
        self, build: FittedBuild, params: Params, programs: ProgramTable, token_mask: jax.Array | None, *,
        on_sampled: Callable[[StepPlan, jax.Array], None], host_slots: int, owns_params: bool, handover: bool,
    ):  # fmt: skip
        """token_mask: see `ModelRunner`. on_sampled: called with a plan and its `Sampled.packed`. Others: as above."""
        self._spec = build.blueprint.model.spec
        super().__init__(build, params, programs, host_slots=host_slots, owns_params=owns_params, handover=handover)
        self._token_mask = token_mask
        self._on_sampled = on_sampled
        self._no_token_masks: dict[int, jax.Array] = {}  # by number of tokens; see `_token_masks`
        self._uploader = None if self._spec.pools else ExtrasUploader(
            build.state_shapes(), build.limits.max_model_len, self.placement, build.store
        )  # fmt: skip

    def _use(self, params: Params | None) -> None:
        super()._use(params)
        head = None if params is None else lm_head_params(self._spec, self._with_adapters(params))
        self._lm_head_params = head
        self._state_params = () if params is None else state_params(self._spec, params)

    def start_rows(self, inits: Sequence[RowInit]) -> None:
        """Set the extras of rows that start, before their step."""
        for init in inits:
            if init.extras is not None and self._uploader is not None:
                self.state = self._uploader.start(self.live, init)

    def score(self, scored: np.ndarray, masks: Sequence[RowMask] = ()) -> tuple[jax.Array, ...]:
        """Log-probabilities of known tokens, or vectors if the model pools. Runs in chunks, to limit live logits.

        scored, masks: see `StepPlan`.
        """
        if not scored.shape[1]:
            return ()
        chunks, pools, programs = [], self._spec.pools, self.programs
        size = self.live.output_rows.shape[1] if pools else programs.score().shape.tokens
        for first in range(0, scored.shape[1], size):
            places, ids, slots, rows = scored[:, first : first + size]
            if pools:
                packed = np.full((2, size), -1, np.int32)
                packed[1, : len(places)] = places
                chunks.append(self._run_output(programs.pooler(len(places)), packed))
                continue
            scorer = programs.score()
            packed = np.zeros((score_lines(scorer.shape, adapters=self.adapters is not None), size), np.int32)
            packed[0, : len(ids)], packed[1, : len(places)] = ids, places
            if self.adapters is not None:
                packed[2, : len(slots)] = slots
            if scorer.shape.processed:
                packed[-1] = -1
                packed[-1, : len(rows)] = rows
                own = [mask for mask in masks if first <= mask.token < first + size]
                chunks.append(self._run_output(scorer, packed, self._token_masks(own, size, first)))
            else:
                chunks.append(self._run_output(scorer, packed))
        return tuple(chunks)

    def sample_or_pool(self, plan: StepPlan, masks: Sequence[RowMask]) -> jax.Array | None:
        """Sample or pool for the plan's rows in `samples`. None if there are none."""
        count = plan.num_samples
        if not count:
            return None
        if masks and self._uploader is not None:
            self.state = self._uploader.set_masks(self.live, masks)
        if self._spec.pools:
            return self._run_output(self.programs.pooler(count), self.live.output_rows)
        output = self._run_output(self.programs.sampler(count, plan.sampler), self.live.output_rows)
        self._on_sampled(plan, output)
        return output

    def sample_checked(self, plan: StepPlan, checked: jax.Array, masks: Sequence[RowMask]) -> jax.Array:
        """Sample for a verify step. checked: see `Batch`. masks: of tokens."""
        program = self.programs.sampler(checked.shape[1], plan.sampler, checks=True)
        more = (self._token_masks(masks, program.shape.rows),) if uses_extras(program.shape) else ()
        output, state = self._run_output(program, checked, *more), self.live
        if state.recurrent:
            advance = self.programs.advances[checked.shape[1]]
            recurrent = advance.run(
                self._state_params, state.recurrent, state.state_inputs, state.table,
                pack_rows(plan, advance.shape.rows),
            )  # fmt: skip
            self.state = state.replace(recurrent=recurrent)
        return output

    def _token_masks(self, masks: Sequence[RowMask], num_tokens: int, first: int = 0) -> jax.Array:
        """Masks of tokens, `first` and after, as `output_programs.sample_checked` takes them."""
        packed = self._no_token_masks.get(num_tokens)
        if packed is None or masks:
            host = np.zeros((num_tokens, self.live.sampling.masks.shape[1] + 1), np.uint32)
            for mask in masks:
                host[mask.token - first, :-1], host[mask.token - first, -1] = mask.words, 1
            packed = self.placement.put(host)
            if not masks:
                self._no_token_masks[num_tokens] = packed
        return packed

    def _run_output(self, program: Program[OutputShape], rows: Any, *more: jax.Array) -> jax.Array:
        state = self.live
        extras = state.sampling if uses_extras(program.shape) else None
        table, extras, output = program.run(
            self._lm_head_params, self._token_mask, state.table, extras, state.hidden, rows, *more
        )
        self.state = state.replace(table=table, sampling=state.sampling if extras is None else extras)
        return output

    def measure_transfers(self) -> TransferCosts:
        """Measure with a step of padding only, which takes as long as a full step without attention."""
        program, blueprint = self.programs.forwards[-1], self.build.blueprint
        nothing = np.zeros(0, np.int32)
        idle = StepPlan(nothing, nothing, 0, nothing.astype(bool), nothing, np.zeros((0, 4), np.int32))
        packed = self.placement.put(pack(idle, np.zeros((0, 3), np.int32), program.shape))
        hidden: tuple[jax.Array, ...] = ()
        if not blueprint.model.stage.is_first:
            shape = (program.shape.tokens, self._spec.hidden_size)
            hidden = (self.placement.put(np.zeros(shape, blueprint.dtype)),)

        def step(state: DeviceState) -> DeviceState:
            return run_forward(program.run, self._weights, state, packed, *hidden)[0]

        block_bytes = self.build.memory_plan.block_bytes
        self.state, costs = self.mover.measure(self.live, block_bytes, step, program.shape.tokens)
        return costs

    def close(self) -> None:
        """Free the state, and drop the references to the weights."""
        super().close()
        self._token_mask = None
