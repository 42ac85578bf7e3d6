"""Rows with more than FEW tokens on NVIDIA, in chunks of CHUNK tokens as matmuls, lowered through Triton: two kernels.

- `state_matrices`: what a chunk's results need but the state: a program has a chunk and a head.
- `state_chunks`: the results. A program has a row, a head, and a block of the state's columns, which stays in registers
  for all chunks of the row.

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
from pallas_kernels.state_scan.chunk import FEW, chunks_of_rows

Ref = Any  # an array inside a kernel, addressed by `.at`
CHUNK = 32    # tokens
COLUMNS = 64  # of a block of the state: the rows of Hopper's matmul instructions
WARPS = 4
STAGES, VAR = 1, 0
MATRIX_WARPS = 2
WIDTH = 32
STATE_WIDTH = 128


def add_chunks(call: ScanCall, skip: Array, out: Array, states: Array, *, interpret: bool) -> list[Array]:
    """out and states with the results of rows with more than FEW tokens, in place."""
    (tokens, heads, v_dim), rows = call.v.shape, pl.next_power_of_2(call.k.shape[2])
    row, index, count = chunks_of_rows(call, CHUNK)
    begins, ends = call.query_start_loc[:-1][row], call.query_start_loc[1:][row]
    first = begins - call.positions[row] % CHUNK + index * CHUNK
    low = jnp.maximum(first, begins)
    high = jnp.where(jnp.arange(row.shape[0]) < count, jnp.minimum(first + CHUNK, ends), low)
    shapes = [(tokens, heads, 4), (tokens, heads, CHUNK), (tokens, heads, CHUNK)]
    matrices = pl.pallas_call(
        functools.partial(_matrices_kernel, call=call, rows=rows),
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes[: 3 if call.is_delta else 2]],
        grid=(row.shape[0], heads), interpret=interpret, name="state_matrices",
        compiler_params=plgpu.CompilerParams(num_warps=MATRIX_WARPS, num_stages=1),
    )(first, low, high, call.q, call.k, call.decay, call.factor)  # fmt: skip
    given = (call.query_start_loc, call.slots, call.positions, skip, call.q, call.k, call.v, *matrices)
    given += () if call.targets is None else (call.targets,)
    return pl.pallas_call(
        functools.partial(_chunks_kernel, call=call, rows=rows),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, states)],
        grid=(call.slots.shape[0], heads, pl.cdiv(v_dim, COLUMNS)), interpret=interpret, name="state_chunks",
        input_output_aliases={len(given): 0, len(given) + 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
    )(*given, out, states)  # fmt: skip


# --- products --------------------------------------------------------------------------------------------------------


def split(x: Float[Array, "m n"]) -> list[Float[Array, "m n"]]:
    """bfloat16 arrays whose sum is x, smallest first: one of bfloat16, two of float16, three of float32."""
    if x.dtype == jnp.bfloat16:
        return [x]
    count, x = 2 if x.dtype == jnp.float16 else 3, x.astype(jnp.float32)
    # the first 8, 16 and 24 bits of each number; rounding to bfloat16 and back could be left out by XLA
    bits = lax.bitcast_convert_type(x, jnp.int32)
    heads = [lax.bitcast_convert_type(bits & jnp.int32(-1 << (16 - 8 * n)), jnp.float32) for n in range(count)]
    parts = [heads[0], *(long - short for short, long in zip(heads, heads[1:], strict=False))]
    return [part.astype(jnp.bfloat16) for part in reversed(parts)]


def multiply(a: Sequence[Array], *bs: Sequence[Array], trans_b: bool = False, start: Any = None) -> list[Array]:
    """The products of a and each b, split arrays, in float32. Terms below 2**-24 are left out."""
    products: list[Any] = list(start) if start else [0.0] * len(bs)
    for n, x in enumerate(a):
        for i, b in enumerate(bs):
            # parts n from the end of a and m from the end of b: their product has 8 * (n + m) bits fewer
            for y in b[max(0, len(b) - 3 + len(a) - 1 - n) :]:
                products[i] = products[i] + plgpu.dot(x, y, trans_b=trans_b)
    return products


# --- kernels ---------------------------------------------------------------------------------------------------------


def _load(ref: Ref, *index: Any, mask: Array) -> Array:
    return plgpu.load(ref.at[index], mask=mask, other=0)


def _keys(ref: Ref, t: Array, inside: Array, head: Array, at: Array) -> Array:
    """Numbers `at` of the queries or keys of tokens t."""
    return _load(ref, t[:, None], head, at[None, :], mask=inside[:, None] & (at < ref.shape[2])[None, :])


def _tokens(first: Array, low: Array, high: Array, num_tokens: int) -> tuple[Array, Array]:
    """Tokens of a chunk, and which of them are from low to high - 1. The others are past the end of the arrays."""
    t = first + jnp.arange(CHUNK)
    inside = (t >= low) & (t < high)
    return jnp.where(inside, t, num_tokens), inside


def _matrices_kernel(
    first_ref: Ref, low_ref: Ref, high_ref: Ref, q_ref: Ref, k_ref: Ref, decay_ref: Ref, factor_ref: Ref,
    numbers_ref: Ref, scores_ref: Ref, *refs: Ref, call: ScanCall, rows: int,
) -> None:  # fmt: skip
    """Numbers and matrices of one chunk and head. refs: inverses, with is_delta."""
    chunk, head = pl.program_id(0), pl.program_id(1)
    low, high = low_ref[chunk], high_ref[chunk]

    @pl.when(high > low)
    def _compute() -> None:
        t, inside = _tokens(first_ref[chunk], low, high, k_ref.shape[0])
        across = jnp.arange(CHUNK)[None, :]
        decay, factor = (_load(ref, t, head, mask=inside) for ref in (decay_ref, factor_ref))

        def add(n: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            """Products and squares of q and k over one part of their numbers."""
            at = n * width + jnp.arange(width)
            q, k = (_keys(ref, t, inside, lax.div(head, call.v_per_k), at) for ref in (q_ref, k_ref))
            q_parts, k_parts = split(q), split(k)
            (products,) = multiply(q_parts, k_parts, trans_b=True, start=sums[:1])
            if not call.is_delta:
                return (products,)
            squares = [jnp.sum(x * x, axis=1) for x in (q.astype(jnp.float32), k.astype(jnp.float32))]
            return (
                products, *multiply(k_parts, k_parts, trans_b=True, start=sums[1:2]),
                *(total + each for total, each in zip(sums[2:], squares, strict=True)),
            )  # fmt: skip

        width = min(rows, WIDTH)
        shapes = [(CHUNK, CHUNK)] * 2 + [(CHUNK,)] * 2
        zeros = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes[: 4 if call.is_delta else 1])
        products, *more = lax.fori_loop(0, rows // width, add, zeros)
        q_size, k_size = (lax.rsqrt(x + EPS) for x in more[1:]) if more else (jnp.ones_like(decay),) * 2
        total, whole = jnp.cumsum(decay), jnp.sum(decay)
        since_start, kept = jnp.exp(total), jnp.exp(jnp.minimum(whole - total, 0.0))
        numbers = (
            since_start * k_size if call.is_delta else factor, call.scale * since_start * q_size, kept * k_size,
            jnp.broadcast_to(jnp.exp(whole), total.shape),
        )  # fmt: skip
        for n, each in enumerate(numbers):
            plgpu.store(numbers_ref.at[t, head, jnp.int32(n)], each, mask=inside)
        i, j = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
        between = jnp.where(i >= j, jnp.exp(jnp.minimum(total[:, None] - total[None, :], 0.0)), 0.0)
        between *= k_size[None, :]
        scores = products * (call.scale * q_size)[:, None] * between
        plgpu.store(scores_ref.at[t[:, None], head, across], scores, mask=inside[:, None])
        if call.is_delta:
            inverse = _invert(jnp.where(i > j, more[0] * (factor * k_size)[:, None] * between, 0.0)) * factor[None, :]
            plgpu.store(refs[0].at[t[:, None], head, across], inverse, mask=inside[:, None])


def _invert(system: Float[Array, "chunk chunk"]) -> Float[Array, "chunk chunk"]:
    """The inverse of 1 + system, which has numbers below the diagonal only, by substitution."""
    i, j = (lax.broadcasted_iota(jnp.int32, system.shape, axis) for axis in (0, 1))

    def substitute(n: Array, inverse: Array) -> Array:
        """Take multiples of row n from the rows below it."""
        column = jnp.sum(jnp.where(j == n, system, 0.0), axis=1)
        row = jnp.sum(jnp.where(i == n, inverse, 0.0), axis=0)
        return inverse - column[:, None] * row[None, :]

    return lax.fori_loop(0, CHUNK - 1, substitute, jnp.where(i == j, 1.0, 0.0))


def _chunks_kernel(
    starts_ref: Ref, slots_ref: Ref, positions_ref: Ref, skip_ref: Ref, q_ref: Ref, k_ref: Ref, v_ref: Ref,
    numbers_ref: Ref, scores_ref: Ref, *refs: Ref, call: ScanCall, rows: int,
) -> None:  # fmt: skip
    """All chunks of one row, for one head and block of columns. The state and its changes are transposed.

    refs: inverses with is_delta, targets if there are any, 2 that are changed, and the results.
    """
    out_ref, states_ref = refs[-2:]
    row, head = pl.program_id(0), pl.program_id(1)
    begin, end, position = starts_ref[row], starts_ref[row + 1], positions_ref[row]
    k_dim, v_dim = states_ref.shape[2:]
    column = (pl.program_id(2) * COLUMNS + jnp.arange(COLUMNS))[:, None]
    across, width = jnp.arange(CHUNK)[None, :], min(rows, STATE_WIDTH)
    parts = [first + jnp.arange(width) for first in range(0, rows, width)]  # of the state's rows

    def mask(part: Array) -> Array:
        return (part < k_dim)[None, :] & (column < v_dim)

    before = lax.rem(position, CHUNK)  # tokens of the first chunk that an earlier step computed

    def add(n: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        first = begin - before + n * CHUNK
        t, inside = _tokens(first, begin, end, k_ref.shape[0])
        real = inside[None, :] & (column < v_dim)

        def number(n: int) -> Array:
            return _load(numbers_ref, t, head, jnp.int32(n), mask=inside)[None, :]

        def keys(ref: Ref, part: Array) -> list[Array]:
            return split(_keys(ref, t, inside, lax.div(head, call.v_per_k), part))

        def matrix(ref: Ref) -> list[Array]:
            return split(_load(ref, t[:, None], head, across, mask=inside[:, None]))

        k, sums = [], [0.0] * (2 if call.is_delta else 1)
        for part, each in zip(parts, state, strict=True):
            q, k = keys(q_ref, part), [*k, keys(k_ref, part)]
            sums = multiply(split(each), *([q, k[-1]] if call.is_delta else [q]), trans_b=True, start=sums)
        v = _load(v_ref, t[None, :], head, column, mask=real).astype(jnp.float32)
        if call.is_delta:
            (change,) = multiply(split(v - number(0) * sums[1]), matrix(refs[0]), trans_b=True)
        else:
            change = number(0) * v
        out = number(1) * sums[0]
        if call.skip is not None:
            out += skip_ref[head] * v
        (out,) = multiply(split(change), matrix(scores_ref), trans_b=True, start=[out])
        plgpu.store(out_ref.at[t[None, :], head, column], out.astype(out_ref.dtype), mask=real)
        added = multiply(split(number(2) * change), *k)
        whole = plgpu.load(numbers_ref.at[jnp.maximum(first, begin), head, jnp.int32(3)])
        return tuple(whole * old + new for old, new in zip(state, added, strict=True))

    @pl.when(end - begin > FEW)
    def _scan() -> None:
        state = tuple(
            _load(states_ref, slots_ref[row], head, at[None, :], column, mask=mask(at) & (position > 0))
            for at in parts
        )
        state = lax.fori_loop(0, lax.div(before + end - begin + CHUNK - 1, CHUNK), add, state)
        target, is_written = slots_ref[row], True
        if call.targets is not None:
            target = refs[-5][row]
            is_written = (target >= 0) & (target < states_ref.shape[0])
        for at, each in zip(parts, state, strict=True):
            if VAR & 4:
                (at,) = plgpu.elementwise_inline_asm("mov.b32 $0, $1;", args=[at], constraints="=r,r", pack=1, result_shape_dtypes=[jax.ShapeDtypeStruct(at.shape, jnp.int32)])
            plgpu.store(states_ref.at[target, head, at[None, :], column], each, mask=mask(at) & is_written)
