"""state_scan for TPU in Pallas, lowered through Mosaic: two kernels, which update the states in place.

- `state_step_tpu`: tokens of rows with up to FEW tokens, one after the other. A program has a token and up to
  MOST_HEADS heads. Pallas fetches the state of the next row, and writes that of the row before, while a program works.
  In a call with targets, the row's last program copies the state to its target instead.
- `state_chunks_tpu`: longer rows, in chunks of CHUNK tokens as matmuls. A program has a chunk and a head. XLA gathers
  the tokens of the chunks first, because a TPU reads and writes whole tiles of memory. A call with `max_query_len` up
  to FEW leaves it out.

Programs run one after the other. Programs of one row follow each other, and its state stays in VMEM between them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.platforms import refuse_tpu
from pallas_kernels.state_scan.call import ScanCall
from pallas_kernels.state_scan.chunk import CHUNK, FEW, Chunks, compute_channel_chunk, compute_chunk
from pallas_kernels.state_scan.reference import l2_norm

Ref = Any  # an array inside a kernel
MOST_HEADS = 8  # of a token's program: states of 512 KiB with 128 x 128 numbers, four times in VMEM
MOST_BYTES = 512 << 10  # of a head's state
# How a program gets its state: from the program before, from the slot, or as zeros. COPY: there is nothing to compute.
CONTINUE, LOAD, ZEROS, COPY = range(4)


def refuse(device: Any, call: ScanCall) -> str | None:
    """Reason why the kernels cannot run; None if they can."""
    if call.v.dtype not in (jnp.float32, jnp.bfloat16) or call.q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"q of {call.q.dtype}, v of {call.v.dtype}: it takes float32 and bfloat16"
    k_dim, v_dim = call.states.shape[2:]
    if call.by_channel and not call.is_delta:
        return "a decay for each channel without the delta rule: it takes one decay for each head"
    if call.targets is not None and call.max_query_len > FEW:
        return f"targets of rows with {call.max_query_len} tokens: it takes targets of rows with up to {FEW} tokens"
    if k_dim % 8 or k_dim * -(-v_dim // 128) * 512 > MOST_BYTES:
        return f"states of {k_dim} x {v_dim} numbers: it takes multiples of 8 rows, and up to {MOST_BYTES >> 10} KiB"
    return refuse_tpu(device) if call.v.size and call.states.size else "there is nothing to compute"


def state_scan(
    call: ScanCall, *, interpret: Any = False
) -> tuple[Float[Array, "tokens heads v_dim"], Float[Array, "slots heads k_dim v_dim"]]:
    """See `pallas_kernels.state_scan`. interpret: run the kernels in XLA operations, on any platform."""
    out, states = _steps(call, call.states, interpret)
    if call.max_query_len <= FEW:
        return out, states
    longer, states = _chunks(call, states, interpret)
    begins, ends = call.query_start_loc[:-1], call.query_start_loc[1:]
    return jnp.where(((ends - begins) > FEW)[_row_of_token(call)][:, None, None], longer, out), states


def _row_of_token(call: ScanCall) -> Array:
    tokens = jnp.arange(call.v.shape[0], dtype=jnp.int32)
    row = jnp.searchsorted(call.query_start_loc[1:], tokens, side="right").astype(jnp.int32)
    return jnp.minimum(row, call.slots.shape[0] - 1)


def _launch(
    kernel: Any, name: str, grid: tuple[Any, ...], scalars: tuple[Array, ...], inputs: list[tuple[Array, Any]],
    states: Array, state_spec: Any, out: jax.ShapeDtypeStruct, out_spec: Any, interpret: Any,
    scratch: tuple[Any, ...] = (),
) -> tuple[Array, Array]:  # fmt: skip
    """Run a kernel of (slots, how, inputs, states, out, new states). inputs: arrays with their BlockSpec.

    scalars: slot and `how` of each program, then what BlockSpecs and the kernel read. scratch: more arguments of the
    kernel. With any, the new states are the whole array in HBM.
    """
    slots = jnp.clip(scalars[0], 0, states.shape[0] - 1)  # rows without tokens may name any slot
    scalars = (slots, *scalars[1:])
    out_type: Any = jax.ShapeDtypeStruct
    if not interpret:  # XLA would move states that fit into VMEM there, and back
        out_type, states = pltpu.HBM, pltpu.with_memory_space_constraint(states, pltpu.HBM)
    results = pl.pallas_call(
        kernel,
        [out, out_type(states.shape, states.dtype)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=grid, in_specs=[*(spec for _, spec in inputs), state_spec],
            out_specs=[out_spec, pl.BlockSpec(memory_space=pl.ANY) if scratch else state_spec],
            scratch_shapes=scratch,
        ),
        input_output_aliases={len(scalars) + len(inputs): 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * len(grid)),
        interpret=interpret,
        name=name,
    )(*scalars, *(array for array, _ in inputs), states)  # fmt: skip
    return results[0], results[1]


# --- few tokens ------------------------------------------------------------------------------------------------------


def _steps(call: ScanCall, states: Array, interpret: Any) -> tuple[Array, Array]:
    """Outputs of the tokens of rows with up to FEW tokens, and the states. Other outputs are undefined."""
    (tokens, heads, v_dim), (_, k_heads, k_dim) = call.v.shape, call.k.shape
    block = max(n for n in range(1, min(heads, MOST_HEADS) + 1) if _fits(n, call.v_per_k, k_heads))
    keys = max(1, block // call.v_per_k)  # heads of q and k in a block
    begins, ends = call.query_start_loc[:-1], call.query_start_loc[1:]
    row, token = _row_of_token(call), jnp.arange(tokens, dtype=jnp.int32)
    is_computed = (token < ends[-1]) & (ends - begins <= FEW)[row]
    token = jnp.argsort(~is_computed, stable=True).astype(jnp.int32)  # those that are computed come first
    count, row = jnp.sum(is_computed, dtype=jnp.int32), row[token]
    how = jnp.where(token > begins[row], CONTINUE, jnp.where(call.positions[row] == 0, ZEROS, LOAD))
    how = jnp.where(count == 0, COPY, how).astype(jnp.int32)

    def by_blocks(x: Array, width: int) -> Array:
        return x.reshape(x.shape[0], -1, width, *x.shape[2:])

    def spec(*shape: int, block_of_head: Any = lambda b: b) -> Any:
        return pl.BlockSpec((1, 1, *shape), lambda b, i, slot, how, token, *_: (token[i], block_of_head(b), 0, 0))

    def numbers(x: Array) -> Array:
        return x.reshape(tokens, heads // block, 1, block)

    skip = jnp.zeros(heads, jnp.float32) if call.skip is None else call.skip
    key_spec = spec(keys, k_dim, block_of_head=lambda b: lax.div(b * block, call.v_per_k * keys))
    kernel = functools.partial(
        _step_kernel, scale=call.scale, is_delta=call.is_delta, v_per_k=call.v_per_k, by_channel=call.by_channel
    )
    if call.by_channel:
        decay = (by_blocks(call.decay, block), spec(block, k_dim))
    else:
        decay = (numbers(call.decay), spec(1, block))
    scalars, scratch = (call.slots[row], how, token), ()
    if call.targets is not None:
        is_last = is_computed[token] & (token == ends[row] - 1)
        kernel = functools.partial(_step_to_target, kernel)
        scalars = (*scalars, jnp.where(is_last, call.targets[row], -1))
        scratch = (pltpu.VMEM((1, block, k_dim, v_dim), jnp.float32), pltpu.SemaphoreType.DMA)
    out, states = _launch(
        kernel, "state_step_tpu", (heads // block, jnp.maximum(count, 1)), scalars,
        [
            (by_blocks(call.q, keys), key_spec), (by_blocks(call.k, keys), key_spec),
            (by_blocks(call.v, block), spec(block, v_dim)), decay, (numbers(call.factor), spec(1, block)),
            (skip.reshape(-1, 1, block), pl.BlockSpec((1, 1, block), lambda b, *_: (b, 0, 0))),
        ],
        states, pl.BlockSpec((1, block, k_dim, v_dim), lambda b, i, slot, *_: (slot[i], b, 0, 0)),
        jax.ShapeDtypeStruct((tokens, heads // block, block, v_dim), call.v.dtype), spec(block, v_dim), interpret,
        scratch,
    )  # fmt: skip
    return out.reshape(call.v.shape), states


def _fits(block: int, v_per_k: int, k_heads: int) -> bool:
    """True if blocks of this many heads have whole heads of q and k, or parts of one."""
    return v_per_k % block == 0 or (block % v_per_k == 0 and k_heads % (block // v_per_k) == 0)


def _step_kernel(
    slot_ref: Ref, how_ref: Ref, token_ref: Ref, q_ref: Ref, k_ref: Ref, v_ref: Ref, decay_ref: Ref, factor_ref: Ref,
    skip_ref: Ref, old_ref: Ref, out_ref: Ref, state_ref: Ref, *, scale: float, is_delta: bool, v_per_k: int,
    by_channel: bool,
) -> None:  # fmt: skip
    """One token and a block of heads. States are [1, heads, k_dim, v_dim]."""
    how = how_ref[pl.program_id(1)]
    _begin(how, old_ref, state_ref)

    @pl.when(how != COPY)
    def _compute() -> None:
        k_dim = state_ref.shape[2]
        i, j = (lax.broadcasted_iota(jnp.int32, (k_dim, k_dim), axis) for axis in (0, 1))

        def as_column(row: Array) -> Array:
            return jnp.sum(jnp.where(i == j, row, 0.0), axis=1, keepdims=True)

        results = []
        for head in range(state_ref.shape[1]):
            key = head // v_per_k
            q, k = (ref[0, 0, key : key + 1].astype(jnp.float32) for ref in (q_ref, k_ref))
            v = v_ref[0, 0, head : head + 1].astype(jnp.float32)
            factor, skip = (x[:, head : head + 1] for x in (factor_ref[0, 0], skip_ref[0]))
            if by_channel:
                kept = as_column(jnp.exp(decay_ref[0, 0, head : head + 1]))
            else:
                kept = jnp.exp(decay_ref[0, 0][:, head : head + 1])
            if is_delta:
                q, k = l2_norm(q), l2_norm(k)
            q, k = as_column(q), as_column(k)
            state = kept * state_ref[0, head]
            found = jnp.sum(k * state, axis=0, keepdims=True) if is_delta else 0.0
            state += k * (factor * (v - found))
            state_ref[0, head] = state
            results.append(scale * jnp.sum(q * state, axis=0, keepdims=True) + skip * v)
        out_ref[0, 0] = jnp.concatenate(results, axis=0).astype(out_ref.dtype)


def _step_to_target(kernel: Any, slot_ref: Ref, how_ref: Ref, token_ref: Ref, target_ref: Ref, *refs: Ref) -> None:
    """`_step_kernel` with the state in scratch. target_ref: of each program, -1 before a row's last token."""
    *others, states_ref, state_ref, semaphore = refs
    kernel(slot_ref, how_ref, token_ref, *others, state_ref)
    block, target, heads = pl.program_id(0), target_ref[pl.program_id(1)], state_ref.shape[1]

    @pl.when((target >= 0) & (target < states_ref.shape[0]))
    def _write() -> None:
        place = states_ref.at[pl.ds(target, 1), pl.ds(block * heads, heads)]
        copy = pltpu.make_async_copy(state_ref, place, semaphore)
        copy.start()
        copy.wait()


def _begin(how: Array, old_ref: Ref, state_ref: Ref) -> None:
    """Make the state before the program's tokens."""

    @pl.when((how == LOAD) | (how == COPY))
    def _load() -> None:
        state_ref[...] = old_ref[...]

    @pl.when(how == ZEROS)
    def _clear() -> None:
        state_ref[...] = jnp.zeros_like(state_ref)


# --- chunks ----------------------------------------------------------------------------------------------------------


def _chunks(call: ScanCall, states: Array, interpret: Any) -> tuple[Array, Array]:
    """Outputs of the tokens of rows with more than FEW tokens, and the states. Other outputs are undefined."""
    (tokens, heads, v_dim), k_dim = call.v.shape, call.k.shape[2]
    begins, ends = call.query_start_loc[:-1], call.query_start_loc[1:]
    before = call.positions % CHUNK  # tokens of the first chunk that an earlier step computed
    chunks = Chunks.of(call, CHUNK)
    row, index, count = chunks.row, chunks.index, chunks.count
    chunk = jnp.arange(row.shape[0], dtype=jnp.int32)
    token = (begins - before)[row][:, None] + index[:, None] * CHUNK + jnp.arange(CHUNK)
    inside = (token >= begins[row][:, None]) & (token < ends[row][:, None]) & (chunk < count)[:, None]
    token = jnp.clip(token, 0, tokens - 1)
    how = jnp.where(index > 0, CONTINUE, jnp.where(call.positions[row] == 0, ZEROS, LOAD))
    how = jnp.where(count == 0, COPY, how).astype(jnp.int32)

    def gather(x: Array) -> Array:
        """Tokens of the chunks: [chunks, heads, CHUNK, ...]."""
        x = x[token]
        return jnp.where(inside.reshape(*inside.shape, *[1] * (x.ndim - 2)), x, 0).swapaxes(1, 2)

    def spec(*shape: int, v_per_k: int = 1) -> Any:
        return pl.BlockSpec((1, 1, *shape), lambda head, i, *_: (i, lax.div(head, v_per_k), 0, 0))

    if call.by_channel:
        decay, decay_spec = gather(call.decay), spec(CHUNK, k_dim)
    else:
        decay, decay_spec = gather(call.decay)[:, :, None], spec(1, CHUNK)
    key_spec = spec(CHUNK, k_dim, v_per_k=call.v_per_k)
    skip = jnp.zeros(heads, jnp.float32) if call.skip is None else call.skip
    out, states = _launch(
        functools.partial(_chunk_kernel, scale=call.scale, is_delta=call.is_delta, by_channel=call.by_channel),
        "state_chunks_tpu", (heads, jnp.maximum(count, 1)), (call.slots[row], how),
        [
            (gather(call.q), key_spec), (gather(call.k), key_spec), (gather(call.v), spec(CHUNK, v_dim)),
            (decay, decay_spec), (gather(call.factor)[:, :, None], spec(1, CHUNK)),
            (skip.reshape(-1, 1, 1), pl.BlockSpec((1, 1, 1), lambda head, *_: (head, 0, 0))),
        ],
        states, pl.BlockSpec((1, 1, k_dim, v_dim), lambda head, i, slot, _: (slot[i], head, 0, 0)),
        jax.ShapeDtypeStruct((chunk.shape[0], heads, CHUNK, v_dim), call.v.dtype), spec(CHUNK, v_dim), interpret,
    )  # fmt: skip
    row = _row_of_token(call)
    place = before[row] + jnp.arange(tokens) - begins[row]  # of a token among those of its row's chunks
    return out[jnp.clip(chunks.first[row] + place // CHUNK, 0, chunk.shape[0] - 1), :, place % CHUNK], states


def _chunk_kernel(
    slot_ref: Ref, how_ref: Ref, q_ref: Ref, k_ref: Ref, v_ref: Ref, decay_ref: Ref, factor_ref: Ref, skip_ref: Ref,
    old_ref: Ref, out_ref: Ref, state_ref: Ref, *, scale: float, is_delta: bool, by_channel: bool,
) -> None:  # fmt: skip
    """One chunk of one head."""
    how = how_ref[pl.program_id(1)]
    _begin(how, old_ref, state_ref)
    compute = compute_channel_chunk if by_channel else functools.partial(compute_chunk, is_delta=is_delta)

    @pl.when(how != COPY)
    def _compute() -> None:
        q, k, v = (ref[0, 0].astype(jnp.float32) for ref in (q_ref, k_ref, v_ref))
        if is_delta:
            q, k = l2_norm(q), l2_norm(k)
        out, state = compute(q, k, v, decay_ref[0, 0], factor_ref[0, 0], state_ref[0, 0], dot=_dot)
        state_ref[0, 0] = state
        out_ref[0, 0] = (scale * out + skip_ref[0] * v).astype(out_ref.dtype)


def _dot(a: Array, b: Array, *, trans_a: bool = False, trans_b: bool = False) -> Array:
    dimensions = (((0 if trans_a else 1,), (1 if trans_b else 0,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
