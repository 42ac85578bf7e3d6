"""The pipeline stages before the last one. `ModelRunner` has the last stage, and runs these before it in every step.

1. Every stage gets the plan. A stage has its own request table, block tables, and pages of its own layers.
2. A stage's hidden states are copied to the devices of the next stage. The host does not wait: it dispatches the
   programs of all stages at once, and each program runs when its input is ready.
3. The last stage samples. The first stage needs these tokens in the next step of their requests. Until then
   `FrontStages.note_sampled` keeps them: reading them earlier would stall the first stage until the last has sampled.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jpaged.engine.step_plan import SamplerVariant, StepPlan
from jpaged.models.spec import Params
from jpaged.runtime.compile.blueprint import FittedBuild
from jpaged.runtime.compile.program_table import ProgramTable
from jpaged.runtime.memory.sleeping import HostWeights
from jpaged.runtime.state import DeviceState, Field
from jpaged.runtime.step.batch import pack, upload_long_rows
from jpaged.runtime.step.block_moves import BlockMover
from jpaged.runtime.step.forward import flat_weights, run_forward
from jpaged.runtime.step.output_programs import SampleShape
from jpaged.runtime.store.stored_programs import compile_program


@dataclasses.dataclass(frozen=True)
class _Sampled:
    """Sampled tokens that are not yet in the first stage's request table."""

    rows: np.ndarray   # int32[N]  rows of the request table
    output: jax.Array  # `Sampled.packed`, on the devices of the first stage


class FrontStages:
    """All stages but the last. Empty, and does nothing, without pipeline parallelism."""

    def __init__(
        self, builds: Sequence[FittedBuild], params: Sequence[Params], last: FittedBuild | None, *, host_slots: int,
        progress: bool,
    ):  # fmt: skip
        """Compile the programs and allocate the states. last: build of the last stage. Others: see `ModelRunner`."""
        self._stages = [
            _FrontStage(build, tree, host_slots=host_slots, progress=progress)
            for build, tree in zip(builds, params, strict=True)
        ]
        self._sampled: collections.deque[_Sampled] = collections.deque()  # oldest first
        self._after = [stage.placement for stage in self._stages[1:]]
        self._accept: dict[tuple[int, ...], Any] = {}
        if last is not None and self._stages:
            self._after.append(last.blueprint.placement)
            wide = 3 + 2 * last.blueprint.num_logprobs
            for shape in last.blueprint.program_shapes:
                if isinstance(shape, SampleShape):
                    columns = wide if shape.variant is SamplerVariant.FULL else 1
                    self._accept[shape.rows, columns] = self._stages[0].compile_accept(shape.rows, columns)

    def __len__(self) -> int:
        return len(self._stages)

    @property
    def programs(self) -> list[Any]:
        """The forward programs of all front stages."""
        return [program for stage in self._stages for program in stage.programs.programs]

    def forward(self, plan: StepPlan) -> tuple[jax.Array, ...]:
        """Run all front stages. Returns the last stage's input, on its devices; () without front stages."""
        hidden: tuple[jax.Array, ...] = ()
        if self._stages:
            self._accept_tokens(plan.rows[: plan.num_decodes])
        for stage, placement in zip(self._stages, self._after, strict=True):
            hidden = (jax.device_put(stage.forward(plan, *hidden), placement.sharding),)
        return hidden

    def note_sampled(self, plan: StepPlan, output: jax.Array) -> None:
        """Keep a step's sampled tokens for the first stage. output: `Sampled.packed`; may still be computed."""
        if self._stages:
            rows = plan.rows[plan.samples]
            self._sampled.append(_Sampled(rows, jax.device_put(output, self._stages[0].placement.sharding)))

    def _accept_tokens(self, decodes: np.ndarray) -> None:
        """Write kept tokens into the first stage's table, oldest step first, until the rows `decodes` have theirs."""
        needed = [i for i, sampled in enumerate(self._sampled) if np.isin(sampled.rows, decodes).any()]
        for _ in range(needed[-1] + 1 if needed else 0):
            sampled = self._sampled.popleft()
            rows = np.full(sampled.output.shape[0], -1, np.int32)
            rows[: len(sampled.rows)] = sampled.rows
            self._stages[0].accept(self._accept[sampled.output.shape], rows, sampled.output)

    def recover(self) -> None:
        """Allocate empty states for stages whose state was donated to a failed step."""
        self._sampled.clear()
        for stage in self._stages:
            stage.recover()

    def release(self, *, weights: bool) -> None:
        """Free the states. weights: move the weights to the host, except on CPU."""
        self._sampled.clear()
        for stage in self._stages:
            stage.release(weights=weights)

    def restore(self, *, weights: bool, kv_cache: bool) -> None:
        """Undo `release`. weights: copy the weights back from the host. kv_cache: allocate new states."""
        for stage in self._stages:
            stage.restore(weights=weights, kv_cache=kv_cache)

    def block_until_ready(self) -> None:
        """Wait for all dispatched steps."""
        jax.block_until_ready([stage.state for stage in self._stages])

    def close(self) -> None:
        """Free states and weights."""
        self.release(weights=False)
        self._stages.clear()
        self._after.clear()


class _FrontStage:
    """One stage: its weights, its state and its forward programs."""

    def __init__(self, build: FittedBuild, params: Params, *, host_slots: int, progress: bool):
        self.placement = build.blueprint.placement
        self.programs: ProgramTable = build.compile_table(progress=progress)
        self._build = build
        self._upload_row = build.compile_upload_row()
        self._mover = BlockMover(build.state_shapes(), self.placement, host_slots=host_slots)
        self.params: Params | None = params
        self._weights = flat_weights(params)
        self._host_weights: HostWeights | None = None
        self.state: DeviceState | None = build.create_state()

    def forward(self, plan: StepPlan, *hidden: jax.Array) -> jax.Array:
        """Run a plan. hidden: from the stage before; none for the first. Returns the hidden states of all tokens."""
        program = self.programs.forward(plan)
        state = self._live
        if len(plan.moves):
            state = self.state = self._mover.run(state, plan.moves)
        width, most = self._build.limits.width, program.shape.max_updates
        self.state, updates = upload_long_rows(state, plan, width, most, self._upload_row, self.placement)
        self.state, out = run_forward(
            program.run, self._weights, self.state, pack(plan, updates, program.shape), *hidden
        )
        return out

    def compile_accept(self, rows: int, columns: int) -> jax.stages.Compiled:
        """Compile `accept`'s program for outputs [rows, columns]."""
        placement, table = self.placement, self._build.state_shapes().table
        arguments = (table, placement.shape((rows,), np.int32), placement.shape((rows, columns), np.int32))
        call = placement.on_each_device(functools.partial(_accept), arguments, None)
        return compile_program(call, arguments, donate=(0,))

    def accept(self, program: Callable[..., jax.Array], rows: np.ndarray, output: jax.Array) -> None:
        """Write sampled tokens into the request table. rows: int32[N], -1 is padding. output: `Sampled.packed`."""
        state = self._live
        self.state = state.replace(table=program(state.table, self.placement.put(rows), output))

    def recover(self) -> None:
        if self.state is not None and any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
            self.state = self._build.create_state()

    def release(self, *, weights: bool) -> None:
        for leaf in jax.tree.leaves(self.state):
            if not leaf.is_deleted():
                leaf.delete()
        self.state = None
        self._mover.close()
        if weights and self.params is not None and self.placement.platform != "cpu":
            self._host_weights = HostWeights.take(self.params)
            self.params, self._weights = None, ()

    def restore(self, *, weights: bool, kv_cache: bool) -> None:
        if weights and self._host_weights is not None:
            self.params = self._host_weights.put()
            self._weights = flat_weights(self.params)
            self._host_weights = None
        if kv_cache and self.state is None:
            self.state = jax.block_until_ready(self._build.create_state())

    @property
    def _live(self) -> DeviceState:
        assert self.state is not None, "the runner checks its own state first"
        return self.state


def _accept(
    table: Int[Array, "table_rows num_fields"], rows: Int[Array, " rows"], output: Int[Array, "rows columns"]
) -> Int[Array, "table_rows num_fields"]:
    """Write column 0 of `output` as last tokens. Padding rows (-1) move past the end: -1 would be the last row."""
    rows = jnp.where(rows < 0, table.shape[0], rows)
    return table.at[rows, Field.LAST_TOKEN].set(output[:, 0], mode="drop")
