"""Prefill kernel of triton.py: rows of several tokens, in tiles (Dao et al. 2022).

A program computes one tile of a row's tokens for one KV head. Its query heads are rows of the same two matmuls, QK and
PV. It loops over tiles of keys, and masks only the first and last ones, for the window and for causality.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_kernels.paged_attention.tiles import prompt_tiles
from pallas_kernels.paged_attention.triton_keys import (
    LOG2E,
    Carry,
    Given,
    Problem,
    Ref,
    attend_keys,
    divide,
    divide_up,
    exp2,
    load_queries,
    start,
)

# The widest heads whose tiles inside the row have a loop of their own, without masks. With wider heads, the compiler
# then waits for each of Hopper's matrix instructions before the next one ("wgmma serialized"): of 34 for each tile.
MOST_TWO_LOOPS = 256


def prefill(problem: Problem, given: Given) -> Array:
    """The output of rows of more than one token. Outputs of other rows are undefined."""
    q, starts = given.q, given.starts
    tiling = problem.tiling
    tile_tokens = max(1, tiling.prefill_rows // pl.next_power_of_2(problem.q_per_kv))
    tile_row, tile_first = prompt_tiles(starts, q.shape[0], tile_tokens)
    counts = starts[1:] - starts[:-1]
    # skip tiles without a row, and rows of one token, which `decode` computes
    skipped = (tile_row < 0) | (jnp.take(counts, tile_row, mode="clip") < 2)
    tile_row = jnp.where(skipped, -1, tile_row).astype(jnp.int32)
    return pl.pallas_call(
        functools.partial(_prefill_kernel, problem=problem, tile_tokens=tile_tokens),
        jax.ShapeDtypeStruct((*q.shape[:2], problem.v_dim), q.dtype),
        grid=(tile_row.shape[0], problem.kv_heads, tiling.prefill_v_parts),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.prefill_warps, num_stages=tiling.prefill_stages),
        interpret=problem.interpret,
        name="paged_prefill",
    )(tile_row, tile_first, *given)


def _prefill_kernel(
    tile_row_ref: Ref, tile_first_ref: Ref, *refs: Ref, problem: Problem, tile_tokens: int
) -> None:
    """One KV head, one tile of a row's tokens, and one part of the values.

    Query rows: tokens times q_per_kv, padded to a power of two.
    """
    given, out_ref = Given(*refs[:-1]), refs[-1]
    tile, head, part = (pl.program_id(axis) for axis in range(3))
    row = tile_row_ref[tile]

    def attend() -> None:
        padded_heads = pl.next_power_of_2(problem.q_per_kv)
        values = problem.value_columns(part, problem.tiling.prefill_v_parts)
        first, length = given.starts[row], given.lens[row]
        count = given.starts[row + 1] - first
        line = jnp.arange(tile_tokens * padded_heads)
        token = tile_first_ref[tile] + divide(line, padded_heads)
        lane = line - divide(line, padded_heads) * padded_heads
        real = (token < count) & (lane < problem.q_per_kv)
        query_head = head * problem.q_per_kv + jnp.minimum(lane, problem.q_per_kv - 1)
        index = first + jnp.minimum(token, count - 1)
        q = load_queries(problem, given, index, query_head, real)
        slope = plgpu.load(given.slopes.at[query_head]) if problem.has_slopes else None
        query_position = length - count + token
        first_query = length - count + tile_first_ref[tile]
        size = problem.tiling.prefill_keys
        # keys [begin, end) are seen by some query of the tile
        end = jnp.minimum(first_query + tile_tokens, length)
        begin = jnp.int32(0) if problem.window is None else jnp.maximum(first_query - problem.window + 1, 0)

        def next_keys(i: Array, carry: Carry, *, at_edge: bool) -> Carry:
            position = i * size + jnp.arange(size)
            # blocks before the window may be freed, and have invalid entries in the block table
            valid = (position >= begin) & (position < end) if at_edge else None
            return attend_keys(problem, given, carry, q, slope, query_position, row, head, position, valid, values)

        at_edge, inside = (functools.partial(next_keys, at_edge=edge) for edge in (True, False))
        carry = start(tile_tokens * padded_heads, values.width)
        last = divide_up(end, size)
        if problem.key_dim > MOST_TWO_LOOPS:
            out, top, total = lax.fori_loop(divide(begin, size), last, at_edge, carry)
        else:
            out, top, total = _two_kinds(problem, begin, end, first_query, inside, at_edge, carry)
        if problem.has_sinks:
            total += exp2(problem, plgpu.load(given.sinks.at[query_head]) * LOG2E - top * problem.unit)
        out /= jnp.where(total == 0, 1.0, total)[:, None]
        target = jnp.where(real, index, out_ref.shape[0])
        column = values.columns[None, :]
        mask = real[:, None] & (column < values.end)
        plgpu.store(
            out_ref.at[target[:, None], query_head[:, None], column], out.astype(out_ref.dtype), mask=mask
        )

    pl.when(row >= 0)(attend)


def _two_kinds(
    problem: Problem, begin: Array, end: Array, first_query: Array, inside: Any, at_edge: Any, carry: Carry
) -> Carry:
    """Tiles of keys from begin to end: `at_edge` only where some query does not see some key."""
    size = problem.tiling.prefill_keys
    last = divide_up(end, size)
    inside_end = divide(first_query + 1, size)  # before it, every query is after every key
    inside_begin = jnp.int32(0)
    if problem.window is not None:
        # from here, every query's window has begun
        inside_begin = jnp.minimum(divide_up(jnp.maximum(end - problem.window, 0), size), last)
        inside_end = jnp.maximum(inside_end, inside_begin)
        carry = lax.fori_loop(divide(begin, size), inside_begin, at_edge, carry)
    carry = lax.fori_loop(inside_begin, inside_end, inside, carry)
    return lax.fori_loop(inside_end, last, at_edge, carry)
