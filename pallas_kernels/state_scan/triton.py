"""state_scan for NVIDIA in Pallas, lowered through Triton. The kernels update the states in place.

- `state_step`: rows of up to FEW tokens, one after the other. A decode is one token.
- The kernels of triton_chunks.py: longer rows. Not in a call with `max_query_len` up to FEW.

A program has a row, a head, and a block of the state's columns, which stays in registers for all tokens of the row.
Programs of rows that belong to the other kernels return at once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.platforms import refuse_triton
from pallas_kernels.state_scan.call import ScanCall
from pallas_kernels.state_scan.chunk import FEW
from pallas_kernels.state_scan.reference import l2_norm
from pallas_kernels.state_scan.triton_chunks import add_chunks, computed_again

Ref = Any  # an array inside a kernel, addressed by `.at`
LEAST = 16  # least size of a Triton matmul
STEP_NUMBERS = 4096  # of a block of the state: 32 registers for each of 128 threads
MOST_ROWS = 256      # of the state


def refuse(device: Any, call: ScanCall) -> str | None:
    """Reason why the kernels cannot run; None if they can."""
    k_dim, v_dim = call.states.shape[2:]
    if not LEAST <= k_dim <= MOST_ROWS or v_dim < LEAST:
        return f"states of {k_dim} x {v_dim} numbers: it takes {LEAST} to {MOST_ROWS} rows, and {LEAST} columns or more"
    if call.by_channel and not call.is_delta:
        return "a decay for each channel without the delta rule: it takes one decay for each head"
    if not call.v.size or not call.states.size:
        return "there is nothing to compute"
    return refuse_triton(device)


def state_scan(
    call: ScanCall, *, interpret: bool = False
) -> tuple[Float[Array, "tokens heads v_dim"], Float[Array, "slots heads k_dim v_dim"]]:
    """See `pallas_kernels.state_scan`. interpret: run the kernels in XLA operations, on any platform."""
    heads, k_dim, v_dim = call.states.shape[1:]
    rows, columns = pl.next_power_of_2(k_dim), pl.next_power_of_2(v_dim)
    skip = jnp.zeros(heads, jnp.float32) if call.skip is None else call.skip
    given = (call.query_start_loc, call.slots, call.positions, skip, call.q, call.k, call.v, call.decay, call.factor)
    given += () if call.targets is None else (call.targets,)
    block = max(LEAST, min(columns, STEP_NUMBERS // rows))
    out, states = pl.pallas_call(
        functools.partial(_step_kernel, call=call, rows=rows, block=block, interpret=interpret),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (call.v, call.states)],
        grid=(call.slots.shape[0], heads, pl.cdiv(v_dim, block)), interpret=interpret, name="state_step",
        input_output_aliases={len(given): 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
    )(*given, call.states)  # fmt: skip
    if call.max_query_len > FEW:
        out, states = add_chunks(call, skip, out, states, interpret=interpret)
    return out, states


def _step_kernel(
    starts_ref: Ref, slots_ref: Ref, positions_ref: Ref, skip_ref: Ref, q_ref: Ref, k_ref: Ref, v_ref: Ref,
    decay_ref: Ref, factor_ref: Ref, *refs: Ref, call: ScanCall, rows: int, block: int, interpret: bool,
) -> None:  # fmt: skip
    """One row, head, and block of columns. refs: targets if there are any, the old states, and the results."""
    out_ref, states_ref = refs[-2:]
    row, head = pl.program_id(0), pl.program_id(1)
    begin, end, position = starts_ref[row], starts_ref[row + 1], positions_ref[row]
    k_dim, v_dim = states_ref.shape[2:]
    at, column = jnp.arange(rows), pl.program_id(2) * block + jnp.arange(block)
    has_column = column < v_dim
    mask = (at < k_dim)[:, None] & has_column[None, :]
    key_head = lax.div(head, call.v_per_k)

    def load(ref: Ref, *index: Any, mask: Array) -> Array:
        return plgpu.load(ref.at[index], mask=mask, other=0.0).astype(jnp.float32)

    def add(t: Array, state: Array) -> Array:
        inside = t < end
        q, k = (load(ref, t, key_head, at, mask=inside & (at < k_dim)) for ref in (q_ref, k_ref))
        if call.is_delta:
            q, k = l2_norm(q), l2_norm(k)
        v = load(v_ref, t, head, column, mask=inside & has_column)
        factor = load(factor_ref, t, head, mask=inside)
        if call.by_channel:  # a column for the rows of the state
            decay = load(decay_ref, t, head, at, mask=inside & (at < k_dim))[:, None]
        else:
            decay = load(decay_ref, t, head, mask=inside)
        state = jnp.exp(decay) * state
        change = factor * (v - jnp.sum(k[:, None] * state, axis=0) if call.is_delta else v)
        state += k[:, None] * change[None, :]
        out = call.scale * jnp.sum(q[:, None] * state, axis=0) + skip_ref[head] * v
        plgpu.store(out_ref.at[t, head, column], out.astype(out_ref.dtype), mask=inside & has_column)
        return state

    @pl.when((end > begin) & (end - begin <= FEW))
    def _scan() -> None:
        state = load(states_ref, slots_ref[row], head, at[:, None], column[None, :], mask=mask & (position > 0))
        state = lax.fori_loop(begin, end, add, state)
        target, is_written = slots_ref[row], mask
        if call.targets is not None:
            target = refs[0][row]
            is_written = mask & (target >= 0) & (target < states_ref.shape[0])
        to = computed_again(at, interpret)
        plgpu.store(states_ref.at[target, head, to[:, None], column[None, :]], state, mask=is_written)
