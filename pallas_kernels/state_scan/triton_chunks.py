"""state_scan for NVIDIA: rows with more than FEW tokens, in chunks of CHUNK tokens as matmuls. Two kernels:

- `state_matrices`: the part of each chunk's arithmetic that needs no state. A program has a chunk and a head. With a
  decay for each channel it also writes queries and keys, multiplied by their norms and decays.
- `state_chunks`: a row's chunks, one after the other. A program has a row, a head, and a block of the state's columns,
  which stays in registers, transposed.

The arithmetic is that of `chunk.compute_chunk` and `chunk.compute_channel_chunk`. All products are of bfloat16 on the
matrix units, and a float32 number is the sum of three of them. So bfloat16 queries and keys need one product for each
part of the state.

Registers are the limit. A Hopper matmul reads its left operand from registers. It reads its right operand through a
64-bit descriptor for each 16 rows, and the compiler keeps all descriptors in registers during the loop. So the state is
on the left, transposed. See docs/decisions.md, "Layers with a state".
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.platforms import is_hopper
from pallas_kernels.state_scan.call import EPS, ScanCall
from pallas_kernels.state_scan.chunk import FEW, Chunks

Ref = Any  # an array inside a kernel, addressed by `.at`
CHUNK = 32  # tokens
MATRIX_WARPS, CHUNK_WARPS = 2, 4
MATRIX_BYTES = 64  # of a query or key that state_matrices multiplies at once
CHANNELS = 16      # of a query or key instead, with a decay for each; with 32, 176 bytes are spilled
LEAST = 16         # numbers of a product, at least
# The numbers of a token and head that state_matrices computes for state_chunks
FROM_START, QUERY, TO_END, WHOLE = range(4)


def add_chunks(call: ScanCall, skip: Array, out: Array, states: Array, *, interpret: bool) -> list[Array]:
    """out and states with the results of rows with more than FEW tokens, in place. skip: [heads]."""
    (tokens, heads, v_dim), rows = call.v.shape, pl.next_power_of_2(call.k.shape[2])
    chunks = Chunks.of(call, CHUNK)
    number, row = jnp.arange(chunks.row.shape[0], dtype=jnp.int32), chunks.row
    begins, ends = call.query_start_loc[:-1][row], call.query_start_loc[1:][row]
    first = begins - call.positions[row] % CHUNK + chunks.index * CHUNK
    low = jnp.maximum(first, begins)
    high = jnp.where(number < chunks.count, jnp.minimum(first + CHUNK, ends), low)
    shapes: dict[str, tuple[int, ...]] = {"scores": (tokens, heads, CHUNK)}
    if call.is_delta:
        shapes["inverse"] = (tokens, heads, CHUNK)
    if call.by_channel:
        kernel, k_dim = _channel_matrices_kernel, call.k.shape[2]
        shapes |= dict.fromkeys(("queries", "keys", "end_keys"), (tokens, heads, k_dim))
        shapes["whole"] = (number.shape[0], heads, k_dim)
    else:
        kernel, shapes["numbers"] = _matrices_kernel, (tokens, heads, 4)
    results = pl.pallas_call(
        functools.partial(kernel, call=call, rows=rows),
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values()],
        grid=(number.shape[0], heads), interpret=interpret, name="state_matrices",
        compiler_params=plgpu.CompilerParams(num_warps=MATRIX_WARPS, num_stages=1),
    )(first, low, high, call.q, call.k, call.decay, call.factor)  # fmt: skip
    more = dict(zip(shapes, results, strict=True))
    q, k = (more.pop("queries"), more.pop("keys")) if call.by_channel else (call.q, call.k)
    if call.by_channel:
        more["first_chunk"] = chunks.first
    if call.targets is not None:
        more["targets"] = call.targets
    given = (call.query_start_loc, call.slots, call.positions, skip, q, k, call.v, *more.values())
    columns = _columns(rows, q.dtype.itemsize)
    return pl.pallas_call(
        functools.partial(
            _chunks_kernel, call=call, names=tuple(more), rows=rows, columns=columns, interpret=interpret
        ),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, states)],
        grid=(call.slots.shape[0], heads, pl.cdiv(v_dim, columns)), interpret=interpret, name="state_chunks",
        input_output_aliases={len(given): 0, len(given) + 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=CHUNK_WARPS, num_stages=1),
    )(*given, out, states)  # fmt: skip


def _columns(rows: int, itemsize: int) -> int:
    """Columns of a block of the state, so that nothing is spilled. itemsize: of queries and keys."""
    if rows <= 128 and is_hopper():
        return 64  # rows of Hopper's matmul instructions
    return 32 if itemsize == 2 else 16


# --- products --------------------------------------------------------------------------------------------------------


def split(x: Float[Array, "m n"]) -> list[Float[Array, "m n"]]:
    """bfloat16 arrays whose sum is x, smallest first: one of bfloat16, two of float16, three of float32."""
    if x.dtype == jnp.bfloat16:
        return [x]
    count, x = 2 if x.dtype == jnp.float16 else 3, x.astype(jnp.float32)
    # The first 8, 16 and 24 bits of each number, by masks. XLA may leave out a conversion to bfloat16 and back. Each
    # part is computed from x alone, so that no other part needs registers.
    bits = lax.bitcast_convert_type(x, jnp.int32)
    cut = [lax.bitcast_convert_type(bits & jnp.int32(-1 << (16 - 8 * n)), jnp.float32) for n in range(count)]
    parts = [cut[0], *(long - short for short, long in itertools.pairwise(cut))]
    return [part.astype(jnp.bfloat16) for part in reversed(parts)]


def multiply(
    a: Sequence[Array], *bs: Sequence[Array], trans_b: bool = False, start: Sequence[Array] = ()
) -> list[Array]:
    """start (zeros, if empty) + the products of a and each b, all split, in float32. Terms below 2**-24 are left out.

    One part of a is multiplied with all bs before the next one, so that only one needs registers.
    """
    products: list[Any] = list(start) or [0.0] * len(bs)
    for n, x in enumerate(a):
        for i, b in enumerate(bs):
            for y in b[max(0, len(b) + len(a) - 4 - n) :]:
                products[i] = products[i] + plgpu.dot(x, y, trans_b=trans_b)
    return products


def computed_again(index: Int[Array, " n"], interpret: bool) -> Int[Array, " n"]:
    """index, by an instruction that the compiler does not know.

    So it computes the addresses of a store after a loop, and keeps no addresses of a load before it in registers.
    """
    if interpret:
        return index
    result = [jax.ShapeDtypeStruct(index.shape, index.dtype)]
    (copy,) = plgpu.elementwise_inline_asm(
        "mov.b32 $0, $1;", args=[index], constraints="=r,r", pack=1, result_shape_dtypes=result
    )
    return copy


# --- kernels ---------------------------------------------------------------------------------------------------------


def _load(ref: Ref, *index: Any, mask: Array) -> Array:
    return plgpu.load(ref.at[index], mask=mask, other=0)


def _keys(ref: Ref, t: Array, inside: Array, head: Array, at: Array) -> Array:
    """Numbers `at` of the queries or keys of tokens t."""
    return _load(ref, t[:, None], head, at[None, :], mask=inside[:, None] & (at < ref.shape[2])[None, :])


def _tokens(first: Array, low: Array, high: Array, num_tokens: int) -> tuple[Array, Array]:
    """Tokens of a chunk, and True for those from low to high - 1. Others are moved past the end of the arrays.

    Interpret mode stores an old number again where the mask is False, but not past the end.
    """
    t = first + jnp.arange(CHUNK)
    inside = (t >= low) & (t < high)
    return jnp.where(inside, t, num_tokens), inside


def _matrices_kernel(
    first_ref: Ref, low_ref: Ref, high_ref: Ref, q_ref: Ref, k_ref: Ref, decay_ref: Ref, factor_ref: Ref,
    scores_ref: Ref, *refs: Ref, call: ScanCall, rows: int,
) -> None:  # fmt: skip
    """Scores, with is_delta the inverse of one chunk's system, and numbers, for one head.

    Queries and keys keep their length. Their norms are in the numbers and matrices.
    """
    numbers_ref = refs[-1]
    chunk, head = pl.program_id(0), pl.program_id(1)
    low, high = low_ref[chunk], high_ref[chunk]
    width = min(rows, MATRIX_BYTES // call.q.dtype.itemsize)

    @pl.when(high > low)
    def _compute() -> None:
        t, inside = _tokens(first_ref[chunk], low, high, k_ref.shape[0])

        def add(n: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            at = n * width + jnp.arange(width)
            q, k = (_keys(ref, t, inside, lax.div(head, call.v_per_k), at) for ref in (q_ref, k_ref))
            parts = split(k)
            scores = multiply(split(q), parts, trans_b=True, start=sums[:1])
            if not call.is_delta:
                return tuple(scores)
            system = multiply(parts, parts, trans_b=True, start=sums[1:2])
            squares = (jnp.sum(x * x, axis=1) for x in (q.astype(jnp.float32), k.astype(jnp.float32)))
            return (*scores, *system, *(old + new for old, new in zip(sums[2:], squares, strict=True)))

        shapes = [(CHUNK, CHUNK), (CHUNK, CHUNK), (CHUNK,), (CHUNK,)][: 4 if call.is_delta else 1]
        scores, *sums = lax.fori_loop(0, rows // width, add, tuple(jnp.zeros(shape, jnp.float32) for shape in shapes))
        decay, factor = (_load(ref, t, head, mask=inside) for ref in (decay_ref, factor_ref))
        q_factor, k_factor = (lax.rsqrt(x + EPS) for x in sums[1:]) if call.is_delta else [jnp.ones_like(decay)] * 2
        total, whole = jnp.cumsum(decay), jnp.sum(decay)
        since_start = jnp.exp(total)
        numbers = {
            FROM_START: since_start * k_factor if call.is_delta else factor,
            QUERY: call.scale * since_start * q_factor,
            TO_END: jnp.exp(jnp.minimum(whole - total, 0.0)) * k_factor,
            WHOLE: jnp.broadcast_to(jnp.exp(whole), total.shape),
        }
        for n, each in numbers.items():
            plgpu.store(numbers_ref.at[t, head, jnp.int32(n)], each, mask=inside)
        i, j = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
        apart = jnp.where(i >= j, jnp.exp(jnp.minimum(total[:, None] - total[None, :], 0.0)), 0.0) * k_factor[None, :]

        def store(ref: Ref, matrix: Array) -> None:
            plgpu.store(ref.at[t[:, None], head, jnp.arange(CHUNK)[None, :]], matrix, mask=inside[:, None])

        store(scores_ref, scores * (call.scale * q_factor)[:, None] * apart)
        if call.is_delta:
            system = jnp.where(i > j, sums[0] * (factor * k_factor)[:, None] * apart, 0.0)
            store(refs[0], _invert(system) * factor[None, :])


def _channel_matrices_kernel(
    first_ref: Ref, low_ref: Ref, high_ref: Ref, q_ref: Ref, k_ref: Ref, decay_ref: Ref, factor_ref: Ref,
    scores_ref: Ref, inverse_ref: Ref, queries_ref: Ref, keys_ref: Ref, end_keys_ref: Ref, whole_ref: Ref, *,
    call: ScanCall, rows: int,
) -> None:  # fmt: skip
    """The matrices of one chunk and head with a decay for each channel.

    queries, keys: times their decays since the start of the chunk. end_keys: times the decays to its end. whole: the
    factor of the state. Norms and scale are in all of them.
    """
    chunk, head = pl.program_id(0), pl.program_id(1)
    low, high = low_ref[chunk], high_ref[chunk]
    width = min(rows, CHANNELS)

    @pl.when(high > low)
    def _compute() -> None:
        t, inside = _tokens(first_ref[chunk], low, high, k_ref.shape[0])
        i, j = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
        token = lax.broadcasted_iota(jnp.int32, (CHUNK, width), 0)

        def load(n: Array) -> list[Array]:
            """Queries and keys of a part of the channels."""
            at = n * width + jnp.arange(width)
            of_head = lax.div(head, call.v_per_k)
            return [_keys(ref, t, inside, of_head, at).astype(jnp.float32) for ref in (q_ref, k_ref)]

        def add_squares(n: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            q, k = load(n)
            return sums[0] + jnp.sum(q * q, axis=1), sums[1] + jnp.sum(k * k, axis=1)

        squares = lax.fori_loop(0, rows // width, add_squares, (jnp.zeros(CHUNK), jnp.zeros(CHUNK)))
        q_factor, k_factor = (lax.rsqrt(x + EPS)[:, None] for x in squares)

        def add(n: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            at = n * width + jnp.arange(width)
            q, k = load(n)
            q, k = call.scale * q_factor * q, k_factor * k
            decay = _keys(decay_ref, t, inside, head, at)
            parts = split(decay)

            def decayed(counted: Array) -> Array:
                """exp of each token's sum of decays over the tokens that count."""
                (total,) = multiply([jnp.where(counted, 1.0, 0.0).astype(jnp.bfloat16)], parts)
                return jnp.exp(total)

            def store(ref: Ref, x: Array) -> None:
                mask = inside[:, None] & (at < ref.shape[2])[None, :]
                plgpu.store(ref.at[t[:, None], head, at[None, :]], x, mask=mask)

            since_start = decayed(j <= i)
            store(queries_ref, since_start * q)
            store(keys_ref, since_start * k)
            store(end_keys_ref, decayed(j > i) * k)
            whole = jnp.exp(jnp.sum(decay, axis=0))
            plgpu.store(whole_ref.at[chunk, head, at], whole, mask=at < whole_ref.shape[2])

            def add_pairs(level: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
                """See `chunk._pairs`."""
                half = jnp.int32(1) << level
                near = decayed(((i ^ j) < half) & (((i & half) != 0) ^ (j > i)))
                is_later, is_pair = (token & half) != 0, (i ^ j) < 2 * half
                earlier = split(jnp.where(is_later, 0.0, near * k))
                of_q, of_k = (
                    multiply(split(jnp.where(is_later, near * x, 0.0)), earlier, trans_b=True)[0] for x in (q, k)
                )
                return sums[0] + jnp.where(is_pair, of_q, 0.0), sums[1] + jnp.where(is_pair, of_k, 0.0)

            same = jnp.where(i == j, jnp.sum(q * k, axis=1)[:, None], 0.0)
            return lax.fori_loop(0, CHUNK.bit_length() - 1, add_pairs, (sums[0] + same, sums[1]))

        zeros = jnp.zeros((CHUNK, CHUNK), jnp.float32)
        scores, system = lax.fori_loop(0, rows // width, add, (zeros, zeros))
        factor = _load(factor_ref, t, head, mask=inside)
        for ref, matrix in ((scores_ref, scores), (inverse_ref, _invert(factor[:, None] * system) * factor[None, :])):
            plgpu.store(ref.at[t[:, None], head, jnp.arange(CHUNK)[None, :]], matrix, mask=inside[:, None])


def _invert(system: Float[Array, "chunk chunk"]) -> Float[Array, "chunk chunk"]:
    """The inverse of 1 + system, which has numbers below the diagonal only, by substitution."""
    i, j = (lax.broadcasted_iota(jnp.int32, system.shape, axis) for axis in (0, 1))

    def substitute(n: Array, inverse: Array) -> Array:
        """Subtract multiples of row n from the rows below it."""
        column = jnp.sum(jnp.where(j == n, system, 0.0), axis=1)
        row = jnp.sum(jnp.where(i == n, inverse, 0.0), axis=0)
        return inverse - column[:, None] * row[None, :]

    return lax.fori_loop(0, CHUNK - 1, substitute, jnp.where(i == j, 1.0, 0.0))


def _chunks_kernel(
    starts_ref: Ref, slots_ref: Ref, positions_ref: Ref, skip_ref: Ref, q_ref: Ref, k_ref: Ref, v_ref: Ref,
    *refs: Ref, call: ScanCall, names: tuple[str, ...], rows: int, columns: int, interpret: bool,
) -> None:  # fmt: skip
    """All chunks of one row, for one head and block of columns. The state is [columns, rows], in parts of the rows.

    refs: arrays with these names, old results, and the results. With a decay for each channel, queries and keys are
    those of `_channel_matrices_kernel`.
    """
    more, (out_ref, states_ref) = dict(zip(names, refs, strict=False)), refs[-2:]
    row, head = pl.program_id(0), pl.program_id(1)
    begin, end, position = starts_ref[row], starts_ref[row + 1], positions_ref[row]
    k_dim, v_dim = states_ref.shape[2:]
    column = (pl.program_id(2) * columns + jnp.arange(columns))[:, None]
    width = max(LEAST, rows // (2 if q_ref.dtype == jnp.bfloat16 else 4))
    parts = [first + jnp.arange(width) for first in range(0, rows, width)]
    key_head = lax.div(head, call.v.shape[1] // k_ref.shape[1])
    before = lax.rem(position, CHUNK)  # tokens of the first chunk that an earlier step computed

    def add(n: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        first = begin - before + n * CHUNK
        t, inside = _tokens(first, begin, end, k_ref.shape[0])
        real = inside[None, :] & (column < v_dim)

        def number(n: int) -> Array:
            return _load(more["numbers"], t, head, jnp.int32(n), mask=inside)[None, :]

        def matrix(ref: Ref) -> list[Array]:
            return split(_load(ref, t[:, None], head, jnp.arange(CHUNK)[None, :], mask=inside[:, None]))

        keys: list[list[Array]] = []
        sums: list[Array] = []  # q . S and, with is_delta, k . S
        for at, each in zip(parts, state, strict=True):
            q, k = (split(_keys(ref, t, inside, key_head, at)) for ref in (q_ref, k_ref))
            sums = multiply(split(each), *((q, k) if call.is_delta else (q,)), trans_b=True, start=sums)
            keys.append(k)
        v = _load(v_ref, t[None, :], head, column, mask=real).astype(jnp.float32)
        if call.is_delta:
            found = sums[1] if call.by_channel else number(FROM_START) * sums[1]
            (change,) = multiply(split(v - found), matrix(more["inverse"]), trans_b=True)
        else:
            change = number(FROM_START) * v
        out = sums[0] if call.by_channel else number(QUERY) * sums[0]
        if call.skip is not None:
            out += skip_ref[head] * v
        (out,) = multiply(split(change), matrix(more["scores"]), trans_b=True, start=[out])
        plgpu.store(out_ref.at[t[None, :], head, column], out.astype(out_ref.dtype), mask=real)
        # matmuls do not add to the state: they round towards zero, a float32 addition to the nearest number
        if call.by_channel:
            ends = (split(_keys(more["end_keys"], t, inside, head, at)) for at in parts)
            added = (multiply(split(change), end)[0] for end in ends)
            chunk = more["first_chunk"][row] + n
            wholes = (_load(more["whole"], chunk, head, at, mask=at < k_dim)[None, :] for at in parts)
        else:
            added = multiply(split(number(TO_END) * change), *keys)
            whole = plgpu.load(more["numbers"].at[jnp.maximum(first, begin), head, jnp.int32(WHOLE)])
            wholes = [whole] * len(parts)
        return tuple(whole * old + new for whole, old, new in zip(wholes, state, added, strict=True))

    def mask(at: Array) -> Array:
        return (at < k_dim)[None, :] & (column < v_dim)

    @pl.when(end - begin > FEW)
    def _scan() -> None:
        slot = slots_ref[row]
        state = tuple(
            _load(states_ref, slot, head, at[None, :], column, mask=mask(at) & (position > 0)) for at in parts
        )
        state = lax.fori_loop(0, lax.div(before + end - begin + CHUNK - 1, CHUNK), add, state)
        target, is_written = slots_ref[row], True
        if call.targets is not None:
            target = more["targets"][row]
            is_written = (target >= 0) & (target < states_ref.shape[0])
        for at, each in zip(parts, state, strict=True):
            to = computed_again(at, interpret)[None, :]
            plgpu.store(states_ref.at[target, head, to, column], each, mask=mask(at) & is_written)
