"""state_scan for NVIDIA in Pallas, lowered through Triton: two kernels, which update the states in place.

- `state_step`: rows of up to FEW tokens, one after the other. A decode is one token.
- `state_chunks`: longer rows, in chunks of CHUNK tokens as matmuls. Not in a call with `max_query_len` up to FEW.
  Its registers are still spilled: docs/decisions.md, "Layers with a state".

A program has a row, a head, and a block of the state's columns, which stays in registers for all tokens of the row.
Programs of rows that belong to the other kernel return at once.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.platforms import refuse_triton
from pallas_kernels.state_scan.call import EPS, ScanCall
from pallas_kernels.state_scan.chunk import FEW, compute_chunk
from pallas_kernels.state_scan.triton_chunks import add_chunks

Ref = Any  # an array inside a kernel, addressed by `.at`
CHUNK = 32  # tokens
PART = 32   # rows of the state in a matmul
LEAST = 16  # least size of a Triton matmul
STEP_NUMBERS = 4096  # of a block of the state: 32 registers for each of 128 threads
CHUNK_COLUMNS = 32   # of a block of the state, with up to 128 rows; a chunk's own matrices need the other registers
CHUNK_WARPS = 4
MOST_ROWS = 256      # of the state


def refuse(device: Any, call: ScanCall) -> str | None:
    """Reason why the kernels cannot run; None if they can."""
    k_dim, v_dim = call.states.shape[2:]
    if not LEAST <= k_dim <= MOST_ROWS or v_dim < LEAST:
        return f"states of {k_dim} x {v_dim} numbers: it takes {LEAST} to {MOST_ROWS} rows, and {LEAST} columns or more"
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
        functools.partial(_kernel, compute=_step, call=call, rows=rows, block=block, precision=None),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (call.v, call.states)],
        grid=(call.slots.shape[0], heads, pl.cdiv(v_dim, block)),
        input_output_aliases={len(given): 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="state_step",
    )(*given, call.states)  # fmt: skip
    if call.max_query_len > FEW:
        out, states = add_chunks(call, skip, out, states, interpret=interpret)
    return out, states


def _kernel(
    starts_ref: Ref, slots_ref: Ref, positions_ref: Ref, skip_ref: Ref, q_ref: Ref, k_ref: Ref, v_ref: Ref,
    decay_ref: Ref, factor_ref: Ref, *refs: Ref, compute: Any, call: ScanCall, rows: int, block: int,
    precision: Any,
) -> None:  # fmt: skip
    """One row, head, and block of columns. compute: `_step` or `_chunks`. refs: targets if there are any, changed."""
    out_ref, states_ref = refs[-2:]
    row, head = pl.program_id(0), pl.program_id(1)
    begin, end, position = starts_ref[row], starts_ref[row + 1], positions_ref[row]
    k_dim, v_dim = states_ref.shape[2:]
    column = pl.program_id(2) * block + jnp.arange(block)
    has_column = column < v_dim
    part = min(rows, PART) if compute is _chunks else rows
    parts = [first + jnp.arange(part) for first in range(0, rows, part)]  # rows of the state

    def scan() -> None:
        places = [states_ref.at[slots_ref[row], head, i[:, None], column[None, :]] for i in parts]
        masks = [(i < k_dim)[:, None] & has_column[None, :] for i in parts]
        states = tuple(
            plgpu.load(place, mask=mask & (position > 0), other=0.0)
            for place, mask in zip(places, masks, strict=True)
        )
        key_head = lax.div(head, call.v_per_k)

        def load(ref: Ref, *index: Any, mask: Array) -> Array:
            return plgpu.load(ref.at[index], mask=mask, other=0.0).astype(jnp.float32)

        def keys(ref: Ref, t: Array, inside: Array) -> tuple[Array, ...]:
            found = []
            for i in parts:
                across, within, at, real = _grid(t, inside, i, i < k_dim)
                found.append(load(ref, across, key_head, at, mask=within & real))
            if not call.is_delta:
                return tuple(found)
            squares = [jnp.sum(x * x, axis=-1, keepdims=True) for x in found]
            return tuple(x * lax.rsqrt(functools.reduce(operator.add, squares) + EPS) for x in found)

        def inputs(t: Array, inside: Array) -> tuple[Any, ...]:
            """q (a function), k, v, decay and factor of tokens [n], or of one. Zeros outside the row and the state."""
            across, within, at, real = _grid(t, inside, column, has_column)
            v = load(v_ref, across, head, at, mask=within & real)
            numbers = (load(ref, t, head, mask=inside) for ref in (decay_ref, factor_ref))
            return functools.partial(keys, q_ref, t, inside), keys(k_ref, t, inside), v, *numbers

        def store(t: Array, inside: Array, out: Array, v: Array) -> None:
            across, within, v_at, real_v = _grid(t, inside, column, has_column)
            result = call.scale * out + skip_ref[head] * v
            plgpu.store(out_ref.at[across, head, v_at], result.astype(out_ref.dtype), mask=within & real_v)

        dot = functools.partial(plgpu.dot, precision=precision)
        states = compute(call, begin, end, position, states, inputs, store, dot)
        if call.targets is not None:
            target = refs[0][row]
            is_slot = (target >= 0) & (target < states_ref.shape[0])
            places = [states_ref.at[target, head, i[:, None], column[None, :]] for i in parts]
            masks = [mask & is_slot for mask in masks]
        for place, mask, state in zip(places, masks, states, strict=True):
            plgpu.store(place, state, mask=mask)

    few = end - begin <= FEW
    pl.when((end > begin) & (few if compute is _step else ~few))(scan)


def _grid(t: Array, inside: Array, *along: Array) -> tuple[Array, ...]:
    """The arrays with axes [tokens, numbers]: t and inside are of the first, the others of the second.

    Triton broadcasts no missing axes. If t is one token, all keep their shape.
    """
    return (t[:, None], inside[:, None], *(x[None, :] for x in along)) if t.ndim else (t, inside, *along)


def _step(
    call: ScanCall, begin: Array, end: Array, position: Array, states: tuple[Array, ...], inputs: Any, store: Any,
    dot: Any,
) -> tuple[Array, ...]:  # fmt: skip
    """The state after the row's tokens, one after the other."""
    del position, dot

    def add(t: Array, states: tuple[Array, ...]) -> tuple[Array, ...]:
        q, (k,), v, decay, factor = inputs(t, t < end)
        (state,) = states
        state = jnp.exp(decay) * state
        change = factor * (v - jnp.sum(k[:, None] * state, axis=0) if call.is_delta else v)
        state += k[:, None] * change[None, :]
        (query,) = q()
        store(t, t < end, jnp.sum(query[:, None] * state, axis=0), v)
        return (state,)

    return lax.fori_loop(begin, end, add, states)


def _chunks(
    call: ScanCall, begin: Array, end: Array, position: Array, states: tuple[Array, ...], inputs: Any, store: Any,
    dot: Any,
) -> tuple[Array, ...]:  # fmt: skip
    """The state after the row's tokens, in chunks that are counted from position 0."""
    before = lax.rem(position, CHUNK)  # tokens of the first chunk that an earlier step computed

    def add(n: Array, states: tuple[Array, ...]) -> tuple[Array, ...]:
        t = begin - before + n * CHUNK + jnp.arange(CHUNK)
        inside = (t >= begin) & (t < end)
        t = jnp.clip(t, 0, call.q.shape[0] - 1)
        q, k, v, decay, factor = inputs(t, inside)
        out, states = compute_chunk(
            q, k, v, decay[None, :], factor[None, :], states, is_delta=call.is_delta, dot=dot
        )  # fmt: skip
        store(t, inside, out, v)
        return states

    return lax.fori_loop(0, lax.div(before + end - begin + CHUNK - 1, CHUNK), add, states)
