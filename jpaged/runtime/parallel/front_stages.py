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
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jpaged.engine.step_plan import SamplerVariant, StepPlan
from jpaged.models.spec import Params
from jpaged.runtime.compile.blueprint import FittedBuild
from jpaged.runtime.stage_runner import StageRunner
from jpaged.runtime.state import Field
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
        self, builds: Sequence[FittedBuild], params: Sequence[Params], last: FittedBuild, *, host_slots: int,
        owns_params: bool, progress: bool,
    ):  # fmt: skip
        """Compile the programs and allocate the states. last: build of the last stage. Others: see `ModelRunner`."""
        self.stages = []
        for build, tree in zip(builds, params, strict=True):
            programs = build.compile_table(progress=progress)
            stage = StageRunner(build, tree, programs, host_slots=host_slots, owns_params=owns_params)
            stage.state = build.create_state()
            self.stages.append(stage)
        self.sampled: collections.deque[_Sampled] = collections.deque()  # oldest first
        self._after = [stage.placement for stage in self.stages[1:]]
        self._accept: dict[tuple[int, ...], Any] = {}
        if self.stages:
            self._after.append(last.blueprint.placement)
            wide = 3 + 2 * last.blueprint.num_logprobs + last.blueprint.mask_words
            for shape in last.blueprint.program_shapes:
                if isinstance(shape, SampleShape):
                    columns = wide if shape.variant is SamplerVariant.FULL else 1
                    self._accept[shape.rows, columns] = _compile_accept(self.stages[0], shape.rows, columns)

    def forward(self, plan: StepPlan) -> tuple[jax.Array, ...]:
        """Run all front stages. Returns the last stage's input, on its devices; () without front stages."""
        hidden: tuple[jax.Array, ...] = ()
        if self.stages:
            self._accept_tokens(plan.rows[: plan.num_decodes])
        for stage, placement in zip(self.stages, self._after, strict=True):
            out = stage.forward(stage.programs.forward(plan), plan, *hidden)
            hidden = (jax.device_put(out, placement.sharding),)
        return hidden

    def note_sampled(self, plan: StepPlan, output: jax.Array) -> None:
        """Keep a step's sampled tokens for the first stage. output: `Sampled.packed`; may still be computed."""
        if self.stages:
            rows = plan.rows[plan.samples]
            self.sampled.append(_Sampled(rows, jax.device_put(output, self.stages[0].placement.sharding)))

    def _accept_tokens(self, decodes: np.ndarray) -> None:
        """Write kept tokens into the first stage's table, oldest step first, until the rows `decodes` have theirs."""
        needed = [i for i, sampled in enumerate(self.sampled) if np.isin(sampled.rows, decodes).any()]
        first = self.stages[0]
        for _ in range(needed[-1] + 1 if needed else 0):
            sampled = self.sampled.popleft()
            rows = np.full(sampled.output.shape[0], -1, np.int32)
            rows[: len(sampled.rows)] = sampled.rows
            accept, state = self._accept[sampled.output.shape], first.live
            first.state = state.replace(table=accept(state.table, first.placement.put(rows), sampled.output))


def _compile_accept(first: StageRunner, rows: int, columns: int) -> jax.stages.Compiled:
    """Compile `_accept` for outputs [rows, columns]. first: the first stage. Donates the table."""
    placement, table = first.placement, first.build.state_shapes().table
    arguments = (table, placement.shape((rows,), np.int32), placement.shape((rows, columns), np.int32))
    call = placement.on_each_device(functools.partial(_accept), arguments, None)
    return compile_program(call, arguments, donate=(0,))


def _accept(
    table: Int[Array, "table_rows num_fields"], rows: Int[Array, " rows"], output: Int[Array, "rows columns"]
) -> Int[Array, "table_rows num_fields"]:
    """Write column 0 of `output` as last tokens. Padding rows (-1) move past the end: -1 would be the last row."""
    rows = jnp.where(rows < 0, table.shape[0], rows)
    return table.at[rows, Field.LAST_TOKEN].set(output[:, 0], mode="drop")
