"""Rows with more than FEW tokens on NVIDIA, in chunks of CHUNK tokens as matmuls, lowered through Triton: two kernels.

- `state_inverse`: the inverse of each chunk's triangular system, for the delta rule only. All chunks at once.
- `state_chunks`: a row's chunks, one after the other. A program has a row, a head, and a block of the state's columns,
  which stays in registers.

The arithmetic is that of `chunk.py`. All products are of bfloat16: a float32 number is the sum of three of them.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.state_scan.call import EPS, ScanCall
from pallas_kernels.state_scan.chunk import CHUNK, FEW, chunks_of_rows

Ref = Any     # an array inside a kernel, addressed by `.at`
SOLVED = 16   # tokens of a block whose inverse needs no matmul
COLUMNS = 32  # of a block of the state
WARPS = 4     # of Hopper's matmul instructions, which have 64 rows


def add_chunks(call: ScanCall, out: Array, states: Array, skip: Array, *, interpret: bool) -> list[Array]:
    """out and states with the results of rows with more than FEW tokens, in place."""
    (tokens, heads, v_dim), (rows, columns) = call.v.shape, map(pl.next_power_of_2, call.states.shape[2:])
    block = min(columns, COLUMNS)
    launch = functools.partial(pl.pallas_call, interpret=interpret)
    parameters = plgpu.CompilerParams(num_warps=WARPS, num_stages=1)
    inverses = ()
    if call.is_delta:
        row, index, count = chunks_of_rows(call)
        begins, ends = call.query_start_loc[:-1][row], call.query_start_loc[1:][row]
        first = begins - call.positions[row] % CHUNK + index * CHUNK
        is_used = jnp.arange(row.shape[0]) < count
        low, high = jnp.maximum(first, begins), jnp.where(is_used, jnp.minimum(first + CHUNK, ends), 0)
        inverses = launch(
            functools.partial(_inverse_kernel, rows=rows, v_per_k=call.v_per_k),
            jax.ShapeDtypeStruct((tokens, heads, CHUNK), jnp.float32),
            grid=(row.shape[0], heads), compiler_params=parameters, name="state_inverse",
        )(first, low, high, call.k, call.decay, call.factor)  # fmt: skip
        inverses = (inverses,)
    given = (call.query_start_loc, call.slots, call.positions, skip, call.q, call.k, call.v, call.decay, call.factor)
    given += inverses + (() if call.targets is None else (call.targets,))
    return launch(
        functools.partial(_chunk_kernel, call=call, rows=rows, block=block),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, states)],
        grid=(call.slots.shape[0], heads, pl.cdiv(v_dim, block)),
        input_output_aliases={len(given): 0, len(given) + 1: 1},
        compiler_params=parameters, name="state_chunks",
    )(*given, out, states)  # fmt: skip


# --- products --------------------------------------------------------------------------------------------------------


def split(x: Float[Array, "m n"]) -> list[Float[Array, "m n"]]:
    """bfloat16 arrays whose sum is x, largest first: one of bfloat16, two of float16, three of float32."""
    if x.dtype == jnp.bfloat16:
        return [x]
    found, rest = [], x.astype(jnp.float32)
    for _ in range(2 if x.dtype == jnp.float16 else 3):
        # a conversion would be left out: XLA in interpret mode may keep the bits that it drops
        part = lax.bitcast_convert_type(lax.bitcast_convert_type(rest, jnp.int32) & jnp.int32(-(1 << 16)), jnp.float32)
        found.append(part.astype(jnp.bfloat16))
        rest -= part
    return found


def multiply(a: Sequence[Array], b: Sequence[Array], *, trans_a: bool = False, trans_b: bool = False) -> Array:
    """The product of two split arrays in float32, either transposed first. Terms below 2**-24 are left out."""
    terms = [(x, y) for order in (2, 1, 0) for n, x in enumerate(a) for m, y in enumerate(b) if n + m == order]
    product: Any = 0.0
    for x, y in terms:
        product = product + plgpu.dot(x, y, trans_a=trans_a, trans_b=trans_b)
    return product


# --- kernels ---------------------------------------------------------------------------------------------------------


def _load(ref: Ref, *index: Any, mask: Array) -> Array:
    return plgpu.load(ref.at[index], mask=mask, other=0)


def _keys(ref: Ref, t: Array, inside: Array, head: Array, rows: int) -> tuple[Array, Array]:
    """Queries or keys of tokens, [tokens, rows], and what they are to be multiplied by to have length 1."""
    at, k_dim = jnp.arange(rows)[None, :], ref.shape[2]
    mask = inside[:, None] if rows == k_dim else inside[:, None] & (at < k_dim)
    x = _load(ref, t[:, None], head, at, mask=mask)
    wide = x.astype(jnp.float32)
    return x, lax.rsqrt(jnp.sum(wide * wide, axis=1) + EPS)


def _between(total: Array) -> Array:
    """exp of the decays after token j up to token i, for j <= i, else 0: [i, j]. total: sums up to each token."""
    i, j = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    return jnp.where(i >= j, jnp.exp(jnp.minimum(total[:, None] - total[None, :], 0.0)), 0.0)


def _inverse_kernel(
    first_ref: Ref, low_ref: Ref, high_ref: Ref, k_ref: Ref, decay_ref: Ref, factor_ref: Ref, out_ref: Ref, *,
    rows: int, v_per_k: int,
) -> None:  # fmt: skip
    """The inverse of one chunk's system for one head, with its columns multiplied by the factors."""
    chunk, head = pl.program_id(0), pl.program_id(1)
    low, high = low_ref[chunk], high_ref[chunk]

    @pl.when(high > low)
    def _compute() -> None:
        t = first_ref[chunk] + jnp.arange(CHUNK)
        inside = (t >= low) & (t < high)
        t = jnp.where(inside, t, k_ref.shape[0])  # interpret mode stores no number past the end
        k, size = _keys(k_ref, t, inside, lax.div(head, v_per_k), rows)
        decay, factor = (_load(ref, t, head, mask=inside) for ref in (decay_ref, factor_ref))
        k = split(k)
        i, j = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
        system = multiply(k, k, trans_b=True) * (factor * size)[:, None] * size[None, :] * _between(jnp.cumsum(decay))
        inverse = inverse_of(jnp.where(i > j, system, 0.0)) * factor[None, :]
        plgpu.store(out_ref.at[t[:, None], head, jnp.arange(CHUNK)[None, :]], inverse, mask=inside[:, None])


def inverse_of(system: Float[Array, "chunk chunk"]) -> Float[Array, "chunk chunk"]:
    """The inverse of 1 + system, which has numbers below the diagonal only.

    First of blocks of SOLVED tokens on the diagonal, by substitution, then of blocks of twice the size, by matmuls.
    """
    blocks = CHUNK // SOLVED
    i, j = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    block_of = lax.broadcasted_iota(jnp.int32, (CHUNK, blocks, SOLVED), 0) // SOLVED
    is_own = block_of == lax.broadcasted_iota(jnp.int32, (CHUNK, blocks, SOLVED), 1)
    own = jnp.sum(jnp.where(is_own, system.reshape(CHUNK, blocks, SOLVED), 0.0), axis=1)
    own = own.reshape(blocks, SOLVED, SOLVED)
    row, column = (lax.broadcasted_iota(jnp.int32, own.shape, axis) for axis in (1, 2))

    def substitute(n: Array, solved: Array) -> Array:
        """Take multiples of row n from the rows below it."""
        factors = jnp.sum(jnp.where(column == n, own, 0.0), axis=2)
        rows = jnp.sum(jnp.where(row == n, solved, 0.0), axis=1)
        return solved - factors[:, :, None] * rows[:, None, :]

    solved = lax.fori_loop(0, SOLVED - 1, substitute, jnp.where(row == column, 1.0, 0.0))
    solved = jnp.broadcast_to(solved.reshape(CHUNK, 1, SOLVED), is_own.shape)
    inverse = jnp.where(is_own, solved, 0.0).reshape(CHUNK, CHUNK)

    def double(level: Array, inverse: Array) -> Array:
        """Inverses of blocks of 2 * SOLVED << level tokens, from those of blocks of half the size."""
        size = jnp.int32(SOLVED) << level
        lower = ((i ^ j) < 2 * size) & ((i & size) != 0) & ((j & size) == 0)  # the lower left quarter of each block
        parts = split(inverse)
        return inverse - multiply(parts, split(multiply(split(jnp.where(lower, system, 0.0)), parts)))

    return lax.fori_loop(0, (CHUNK // SOLVED).bit_length() - 1, double, inverse)


def _chunk_kernel(
    starts_ref: Ref, slots_ref: Ref, positions_ref: Ref, skip_ref: Ref, q_ref: Ref, k_ref: Ref, v_ref: Ref,
    decay_ref: Ref, factor_ref: Ref, *refs: Ref, call: ScanCall, rows: int, block: int,
) -> None:  # fmt: skip
    """All chunks of one row, for one head and block of columns. refs: inverses and targets if there are any, changed."""
    inverse_ref, (out_ref, states_ref) = refs[0], refs[-2:]
    row, head = pl.program_id(0), pl.program_id(1)
    begin, end, position = starts_ref[row], starts_ref[row + 1], positions_ref[row]
    k_dim, v_dim = states_ref.shape[2:]
    column = pl.program_id(2) * block + jnp.arange(block)
    at = jnp.arange(rows)
    mask = (at < k_dim)[:, None] & (column < v_dim)[None, :]

    def add(n: Array, state: Array) -> Array:
        t = begin - lax.rem(position, CHUNK) + n * CHUNK + jnp.arange(CHUNK)
        inside = (t >= begin) & (t < end)
        t = jnp.where(inside, t, k_ref.shape[0])  # interpret mode stores no number past the end
        real = inside[:, None] & (column < v_dim)[None, :]
        v = _load(v_ref, t[:, None], head, column[None, :], mask=real).astype(jnp.float32)
        decay, factor = (_load(ref, t, head, mask=inside) for ref in (decay_ref, factor_ref))
        total, whole = jnp.cumsum(decay), jnp.sum(decay)
        since_start, kept = jnp.exp(total), jnp.exp(jnp.minimum(whole - total, 0.0))
        key_head = lax.div(head, call.v_per_k)
        k, k_size = _keys(k_ref, t, inside, key_head, rows)
        k, old = split(k), split(state)
        if call.is_delta:
            missing = v - (since_start * k_size)[:, None] * multiply(k, old)
            inverse = _load(inverse_ref, t[:, None], head, jnp.arange(CHUNK)[None, :], mask=inside[:, None])
            change = multiply(split(inverse), split(missing))
        else:
            change = factor[:, None] * v
        q, q_size = _keys(q_ref, t, inside, key_head, rows)
        q = split(q)
        scores = multiply(q, k, trans_b=True) * _between(total)
        if call.is_delta:
            scores *= q_size[:, None] * k_size[None, :]
            since_start, kept = since_start * q_size, kept * k_size
        out = since_start[:, None] * multiply(q, old) + multiply(split(scores), split(change))
        result = call.scale * out + skip_ref[head] * v
        plgpu.store(out_ref.at[t[:, None], head, column[None, :]], result.astype(out_ref.dtype), mask=real)
        return jnp.exp(whole) * state + multiply(k, split(kept[:, None] * change), trans_a=True)

    @pl.when(end - begin > FEW)
    def _scan() -> None:
        state = _load(
            states_ref, slots_ref[row], head, at[:, None], column[None, :], mask=mask & (position > 0)
        )
        chunks = lax.div(lax.rem(position, CHUNK) + end - begin + CHUNK - 1, CHUNK)
        state = lax.fori_loop(0, chunks, add, state)
        target, is_written = slots_ref[row], mask
        if call.targets is not None:
            target = refs[-5][row]
            is_written = mask & (target >= 0) & (target < states_ref.shape[0])
        plgpu.store(states_ref.at[target, head, at[:, None], column[None, :]], state, mask=is_written)
