"""The program that ends a verify step of a model with recurrent layers: it adds the kept tokens to the states.

Called by: `LastStageRunner`, after `sample_checked`.
Owns: the way from accepted drafts to states, and snapshots at block boundaries that a row passes.
Never: reads a hidden state, or a token.

The forward pass of a verify step reads states, and does not write them: any of its drafts may be rejected. It leaves
the inputs of its tokens in `DeviceState.state_inputs`. A token of gated DeltaNet has under 1% of the bytes of a state.
From them, this program computes the state after the last kept token, by the operations of a decode. A row that reaches
a block boundary has a snapshot slot in the plan. Its state at the boundary is computed there first.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jpaged.engine.step_plan import StepPlan
from jpaged.models.recurrent import StateRows, advance
from jpaged.models.recurrent_spec import Recurrence
from jpaged.models.spec import DecoderSpec, Params
from jpaged.runtime.placement import Placement
from jpaged.runtime.state import DeviceState, Field, formats
from jpaged.runtime.store.stored_programs import ProgramStore, compile_program

States = tuple[tuple[Array, ...], ...]


@dataclasses.dataclass(frozen=True)
class AdvanceShape:
    """Key of an `advance_states` program. The sizes are the verify program's."""

    tokens: int
    rows: int
    drafts: int  # most drafts of a row
    block_size: int

    def __str__(self) -> str:
        return f"advance states {self.tokens} tokens"


def state_params(spec: DecoderSpec, params: Params) -> tuple[Params, ...]:
    """The leaves of each recurrent layer that the program reads."""
    if spec.recurrence is None:
        return ()
    names = spec.recurrence.state_leaves
    layers = zip(params["layers"], spec.recurrent, strict=True)
    return tuple({name: layer[name] for name in names if name in layer} for layer, has_state in layers if has_state)


def pack_rows(plan: StepPlan, rows: int) -> np.ndarray:
    """int32[3, rows]: row of the table, tokens, and snapshot slot of each row of a verify step. Padding: -1, 0, -1."""
    packed = np.full((3, rows), -1, np.int32)
    packed[1] = 0
    count = len(plan.rows)
    packed[0, :count], packed[1, :count] = plan.rows, plan.num_tokens
    if plan.drafts is not None and plan.drafts.snapshots is not None:
        packed[2, :count] = plan.drafts.snapshots
    return packed


def advance_states(
    params: tuple[Params, ...],
    states: States,
    state_inputs: tuple[Array, ...],
    table: Int[Array, "table_rows num_fields"],
    packed: Int[Array, "3 rows"],
    *,
    recurrence: Recurrence,
    shape: AdvanceShape,
) -> States:
    """The states after the kept tokens of a verify step. Donate `states`.

    params: from `state_params`. state_inputs: see `DeviceState`. table: with the lengths after the step. packed: from
    `pack_rows`.
    """
    rows, num_tokens, snapshots = packed
    before, inputs = state_inputs[0][: shape.rows], state_inputs[1:]
    ends = jnp.cumsum(num_tokens)
    begins = ends - num_tokens
    length = jnp.take(table[:, Field.LENGTH], rows, mode="clip")
    num_kept = jnp.where(num_tokens > 0, length - before, 0)
    boundary = length // shape.block_size * shape.block_size
    until_boundary = jnp.where((snapshots >= 0) & (boundary > before), boundary - before, 0)
    token = jnp.arange(shape.tokens)
    row_of = jnp.minimum(jnp.searchsorted(ends, token, side="right"), shape.rows - 1)
    offset = jnp.where(token < ends[-1], token - begins[row_of], shape.tokens)

    def run(states: States, counts: Int[Array, " rows"], targets: Int[Array, " rows"] | None) -> States:
        """Compute the first `counts` tokens of each row."""
        order, starts = _compacted(offset < counts[row_of], counts)
        of_rows = StateRows(rows, before, starts, 1 + shape.drafts, targets)
        return tuple(
            advance(recurrence, leaves, tuple(each[layer, order] for each in inputs), state, of_rows)[1]
            for layer, (leaves, state) in enumerate(zip(params, states, strict=True))
        )

    if states[0][0].shape[0] > table.shape[0]:  # there are slots for snapshots
        states = run(states, until_boundary, jnp.where(until_boundary > 0, snapshots, -1))
    return run(states, num_kept, None)


def _compacted(
    wanted: Bool[Array, " tokens"], counts: Int[Array, " rows"]
) -> tuple[Int[Array, " tokens"], Int[Array, " rows_plus_1"]]:
    """Indices of the tokens, the wanted ones first, and the first index of each row among them."""
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    return jnp.argsort(~wanted, stable=True), starts


def compile_advance(
    params: Params, state: DeviceState, shape: AdvanceShape, *, spec: DecoderSpec, placement: Placement,
    store: ProgramStore | None = None,
) -> jax.stages.Compiled:  # fmt: skip
    """Compile an `advance_states` program from arrays or ShapeDtypeStructs. params: the whole tree."""
    assert spec.recurrence is not None
    call: Any = functools.partial(advance_states, recurrence=spec.recurrence, shape=shape)
    arguments = (
        state_params(spec, params), state.recurrent, state.state_inputs, state.table,
        placement.shape((3, shape.rows), np.int32),
    )  # fmt: skip
    call = placement.on_each_device(call, arguments, state.recurrent)
    return compile_program(
        call, arguments, donate=(1,), out_shardings=formats(state).recurrent, store=store,
        compiler_options=placement.compiler_options,
    )  # fmt: skip
