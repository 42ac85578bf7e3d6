"""Decode kernels of triton.py: rows of one token, flash decoding (Dao et al. 2023) with a fixed number of programs.

A row is cut into splits at fixed positions, which depend on the row's length only. So a row's bits do not depend on
other rows. A task is one split and one KV head. There are as many programs as the GPU runs at once, and each of n
programs takes every n-th task. So a wide block table or a short row costs nothing. If a row has one split, its task
finishes the row. Tasks of other rows write their outputs and logarithms of sums, and a second kernel, with the same
kind of grid, merges them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Int

from pallas_kernels.paged_attention.triton_keys import (
    LOG2E,
    MASKED,
    Carry,
    Columns,
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
from pallas_kernels.platforms import num_multiprocessors

INTERPRETED_PROGRAMS = 3  # in interpret mode: several, so that tests cover sharing of the tasks
MERGE_PROGRAMS = 16  # per multiprocessor, of one warp each
MERGED_COLUMNS, MERGED_SPLITS = 256, 16  # at a time: what a warp's registers hold


def decode(problem: Problem, given: Given, out: Array | None) -> Array:
    """The output of rows of one token. out: the result of `prefill`, completed in place; None: all rows are decodes."""
    ends = jnp.cumsum(splits_of_rows(problem, given.lens, given.starts))
    if out is None:
        return _launch(problem, given, ends, None)
    # Inside a CUDA graph the GPU skips the kernels. The pages are only read, so the branch does not copy them. XLA
    # would compute `ends` in the branch of every layer if the condition did not read it.
    return lax.cond(ends[-1] > 0, lambda: _launch(problem, given, ends, out), lambda: out)


def _launch(problem: Problem, given: Given, ends: Int[Array, " rows"], out: Array | None) -> Array:
    """Launch both kernels of `decode`. ends: cumulative number of splits, up to and including each row."""
    num_rows, q_heads = given.lens.shape[0], given.q.shape[1]
    kv_heads, tiling = problem.kv_heads, problem.tiling
    splits = tiling.splits(problem.table_keys, problem.window, kv_heads)
    multiprocessors = num_multiprocessors()
    programs, mergers = multiprocessors * tiling.decode_programs, multiprocessors * MERGE_PROGRAMS
    if problem.interpret:
        programs = mergers = INTERPRETED_PROGRAMS
    before = () if out is None else (out,)
    shapes = [jax.ShapeDtypeStruct((*given.q.shape[:2], problem.v_dim), given.q.dtype)]
    if splits > 1:
        shapes += [
            jax.ShapeDtypeStruct((splits, num_rows, q_heads, problem.v_dim), jnp.float32),
            jax.ShapeDtypeStruct((splits, num_rows, q_heads), jnp.float32),
        ]
    out, *parts = pl.pallas_call(
        functools.partial(_decode_kernel, problem=problem),
        shapes, grid=(min(programs, num_rows * kv_heads * tiling.decode_v_parts * splits),),
        interpret=problem.interpret, name="paged_decode",
        compiler_params=plgpu.CompilerParams(num_warps=tiling.decode_warps, num_stages=tiling.decode_stages),
        input_output_aliases={len(given) + 1: 0} if before else {},
    )(ends, *given, *before)  # fmt: skip
    if not parts:
        return out
    arguments = (ends, given.starts, given.sinks, *parts)
    return pl.pallas_call(
        functools.partial(_merge_kernel, problem=problem), jax.ShapeDtypeStruct(out.shape, out.dtype),
        grid=(min(mergers, num_rows * q_heads * _pieces_of_merge(problem)),),
        interpret=problem.interpret, name="paged_decode_merge",
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        input_output_aliases={len(arguments): 0},
    )(*arguments, out)  # fmt: skip


def splits_of_rows(
    problem: Problem, context_lens: Int[Array, " rows"], query_start_loc: Int[Array, " rows_plus_1"]
) -> Int[Array, " rows"]:
    """Number of splits of each row: 0 for rows that are empty or have several tokens."""
    size = _split_keys(problem, context_lens)
    splits = (context_lens + size - 1) // size - _first_key(problem, context_lens) // size
    return jnp.where(one_token(context_lens, query_start_loc), splits, 0)


def one_token(context_lens: Int[Array, " rows"], query_start_loc: Int[Array, " rows_plus_1"]) -> Bool[Array, " rows"]:
    """True for rows of one token."""
    return (query_start_loc[1:] - query_start_loc[:-1] == 1) & (context_lens > 0)


def _split_keys(problem: Problem, length: Array) -> Array:
    """Keys of each split of a row. It doubles until the row has at most `max_splits`."""
    tiling = problem.tiling
    most, size = tiling.max_splits(problem.kv_heads), jnp.full(length.shape, tiling.min_split_keys, jnp.int32)
    for keys in tiling.longer_splits(problem.table_keys, problem.kv_heads):
        size = jnp.where(length > keys // 2 * most, keys, size)
    return size


def _first_key(problem: Problem, length: Array) -> Array:
    """Position of the first key that a row's only query sees."""
    return jnp.zeros_like(length) if problem.window is None else jnp.maximum(length - problem.window, 0)


def _decode_kernel(ends_ref: Ref, *refs: Ref, problem: Problem) -> None:
    """Every n-th task of the call."""
    given, rest = Given(*refs[: len(Given._fields)]), refs[len(Given._fields) :]
    num_rows, v_parts = given.lens.shape[0], problem.tiling.decode_v_parts
    of_split = problem.kv_heads * v_parts  # tasks
    outputs = rest[-3:] if len(rest) >= 3 else rest[-1:]  # before them: the output of prefill, aliased to `outputs[0]`
    programs, program = pl.num_programs(0), pl.program_id(0)
    lane = jnp.arange(pl.next_power_of_2(num_rows))

    def task(turn: Array, carry: Array) -> Array:
        index = turn * programs + program
        split_index = divide(index, of_split)  # among the splits of all rows
        ends = plgpu.load(ends_ref.at[jnp.minimum(lane, num_rows - 1)])
        passed = (ends <= split_index) & (lane < num_rows)
        row = passed.sum(dtype=jnp.int32)
        part = split_index - jnp.where(passed, ends, 0).max()
        head = divide(index - split_index * of_split, v_parts)
        values = problem.value_columns(index - split_index * of_split - head * v_parts, v_parts)
        _attend_split(problem, given, outputs, row, head, part, values)
        return carry

    tasks = ends_ref[num_rows - 1] * of_split
    lax.fori_loop(0, lax.div(tasks + (programs - 1) - program, programs), task, jnp.int32(0))


def _attend_split(
    problem: Problem, given: Given, outputs: tuple[Ref, ...], row: Array, head: Array, part: Array, values: Columns
) -> None:
    """Compute one split of a row, one KV head, and these columns of the values.

    part: index of the split, from the first one that the query sees.
    """
    first, length = given.starts[row], given.lens[row]
    split_keys, first_key = _split_keys(problem, length), _first_key(problem, length)
    first_split = lax.div(first_key, split_keys)
    begin = jnp.maximum((first_split + part) * split_keys, first_key)
    end = jnp.minimum((first_split + part + 1) * split_keys, length)

    lane = jnp.arange(max(16, pl.next_power_of_2(problem.q_per_kv)))  # query heads, padded to the smallest matmul
    query_head = head * problem.q_per_kv + jnp.minimum(lane, problem.q_per_kv - 1)
    is_head = lane < problem.q_per_kv
    q = load_queries(problem, given, jnp.full(lane.shape, first), query_head, is_head)
    slope = plgpu.load(given.slopes.at[query_head]) if problem.has_slopes else None
    query_position = jnp.full(lane.shape, length - 1, jnp.int32)
    size = problem.tiling.decode_keys

    def next_keys(i: Array, carry: Carry) -> Carry:
        position = i * size + jnp.arange(size)
        # iterations are aligned to `size`, so the first one may begin in the previous split
        valid = (position >= begin) & (position < end)
        return attend_keys(problem, given, carry, q, slope, query_position, row, head, position, valid, values)

    carry = start(lane.shape[0], values.width)
    out, top, total = lax.fori_loop(divide(begin, size), divide_up(end, size), next_keys, carry)
    target_head = jnp.where(is_head, query_head, given.q.shape[1])
    column = values.columns[None, :]
    mask = is_head[:, None] & (column < values.end)

    def finish() -> None:
        whole = total
        if problem.has_sinks:
            whole += exp2(problem, plgpu.load(given.sinks.at[query_head]) * LOG2E - top * problem.unit)
        result = (out / whole[:, None]).astype(outputs[0].dtype)
        plgpu.store(outputs[0].at[first, target_head[:, None], column], result, mask=mask)

    def keep() -> None:
        _, parts_ref, lse_ref = outputs
        plgpu.store(parts_ref.at[part, row, target_head[:, None], column], out / total[:, None], mask=mask)
        plgpu.store(lse_ref.at[part, row, target_head], top * problem.unit + jnp.log2(total), mask=is_head)

    if len(outputs) == 1:
        finish()
    else:
        has_one = (begin == first_key) & (end == length)
        pl.when(has_one)(finish)
        pl.when(jnp.logical_not(has_one))(keep)


def _pieces_of_merge(problem: Problem) -> int:
    """Programs of the merge for each row and query head: each merges a piece of the columns."""
    return divide_up(problem.v_dim, min(MERGED_COLUMNS, problem.value_columns().width))


def _merge_kernel(
    ends_ref: Ref, starts_ref: Ref, sinks_ref: Ref, parts_ref: Ref, lse_ref: Ref, _: Ref, out_ref: Ref,
    *, problem: Problem,
) -> None:  # fmt: skip
    """Every n-th row, query head and piece of columns: the outputs of a row's splits, weighted by their sums."""
    most_splits, num_rows, q_heads, _ = parts_ref.shape
    programs, program = pl.num_programs(0), pl.program_id(0)
    pieces, width = _pieces_of_merge(problem), min(MERGED_COLUMNS, problem.value_columns().width)
    together = min(MERGED_SPLITS, pl.next_power_of_2(most_splits))

    def merge(row: Array, head: Array, piece: Array, splits: Array) -> None:
        columns = Columns(piece * width, width, problem.v_dim)
        column = columns.columns[None, :]

        def log_sums(split: Array) -> Array:
            return plgpu.load(lse_ref.at[split, row, head], mask=split < splits, other=MASKED)

        top = log_sums(jnp.arange(pl.next_power_of_2(most_splits))).max()
        if problem.has_sinks:
            top = jnp.maximum(top, sinks_ref[head] * LOG2E)

        def add(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            merged, total = carry
            split = i * together + jnp.arange(together)
            weights = exp2(problem, log_sums(split) - top)  # 0 for a split that was not written
            mask = (split < splits)[:, None] & (column < columns.end)
            parts = plgpu.load(parts_ref.at[split[:, None], row, head, column], mask=mask, other=0.0)
            return merged + (parts * weights[:, None]).sum(axis=0), total + weights.sum()

        carry = jnp.zeros((width,), jnp.float32), jnp.float32(0.0)
        merged, total = lax.fori_loop(0, divide_up(splits, together), add, carry)
        if problem.has_sinks:
            total += jnp.exp2(sinks_ref[head] * LOG2E - top)
        target = out_ref.at[starts_ref[row], head, columns.columns]
        plgpu.store(target, (merged / total).astype(out_ref.dtype), mask=columns.columns < columns.end)

    def next_row(turn: Array, carry: Array) -> Array:
        index = turn * programs + program
        row = divide(index, q_heads * pieces)
        head = divide(index - row * q_heads * pieces, pieces)
        splits = ends_ref[row] - jnp.where(row > 0, ends_ref[jnp.maximum(row - 1, 0)], 0)
        piece = index - (row * q_heads + head) * pieces
        pl.when(splits > 1)(functools.partial(merge, row, head, piece, splits))
        return carry

    tasks = num_rows * q_heads * pieces
    lax.fori_loop(0, lax.div(tasks + (programs - 1) - program, programs), next_row, jnp.int32(0))
