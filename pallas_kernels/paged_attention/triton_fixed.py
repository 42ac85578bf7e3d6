"""paged_attention for NVIDIA with one order of sums for chunks and decodes: a token's bits depend on its row only.

The kernels of triton.py sum a chunk's keys in one pass and a decode's keys in splits, with tiles of different sizes. So
a token that is recomputed in a chunk, after a preemption or a prefix hit, has other bits than the decode had. Here both
have the same tile of ROWS query rows and KEYS keys, and the same number of warps. Their splits have the same length,
and begin at multiples of it, from position 0:

- A decode has a program for each split and KV head, and `_merge_kernel` combines the splits of a row, first to last.
- A chunk has a program for each tile of tokens and KV head, which combines the splits in the same order, in registers.

Both call `attend_keys` for a tile of keys and `combine` for a split. The length of a split depends on the width of the
block tables only, which an engine does not change. Keys that a query does not see add nothing, and change no bit.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_attention import triton
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.tiles import prompt_tiles
from pallas_kernels.paged_attention.tiling import Tiling
from pallas_kernels.paged_attention.triton import given_arrays
from pallas_kernels.paged_attention.triton_decode import one_token
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
from pallas_kernels.platforms import has_small_blocks

ROWS, KEYS, WARPS = 64, 64, 4  # of every tile
SPLIT_KEYS, MAX_SPLITS = 512, 64


def paged_attention(call: AttentionCall, *, interpret: bool = False) -> Float[Array, "tokens q_heads head_dim"]:
    """See `pallas_kernels.paged_attention`. interpret: run the kernels in XLA operations, on any platform."""
    # stages change no sum. As in `Tiling.by_rule`: two tiles of keys and values in flight, where they fit
    stages = 2 if has_small_blocks() or call.q.shape[2] > 128 else 5
    tiling = Tiling(KEYS, ROWS, KEYS, min_split_keys=split_keys(call.table_keys), decode_stages=stages)
    problem, given = given_arrays(call, tiling, interpret=interpret)
    out = _chunks(problem, given) if call.max_query_len > 1 else None
    if out is None:
        return _decodes(problem, given, None)
    # inside a CUDA graph, the GPU skips the kernels if no row is a decode
    has_decodes = one_token(given.lens, given.starts).any()
    return lax.cond(has_decodes, lambda: _decodes(problem, given, out), lambda: out)


def refuse(device: Any, q: Any, pages: KVPages, block_tables: Any, max_query_len: int) -> str | None:
    """Reason why the kernels cannot take a call on a jax Device; None if they can."""
    if q.dtype == jnp.float32:
        return "queries of float32: its matmuls have 16-bit inputs"
    if q.shape[1] // pages.num_kv_heads > ROWS:
        return f"{q.shape[1] // pages.num_kv_heads} query heads per KV head: a tile has {ROWS} query rows"
    if q.shape[2] > 256 or pages.v_dim is not None:
        return f"head_dim {q.shape[2]}, or latent pages: it takes heads of up to 256 with keys and values"
    return triton.refuse(device, q, pages, block_tables, max_query_len)


def split_keys(table_keys: int) -> int:
    """Keys of a split: 512, doubled until the longest row has at most MAX_SPLITS splits. table_keys: of that row."""
    keys = SPLIT_KEYS
    while keys * MAX_SPLITS < table_keys:
        keys *= 2
    return keys


def combine(problem: Problem, left: Carry, right: Carry) -> Carry:
    """Softmax over the keys of both, from sums over each. An empty one changes no bit of the other."""
    (out_a, top_a, total_a), (out_b, top_b, total_b) = left, right
    top = jnp.maximum(top_a, top_b)
    weight_a, weight_b = (exp2(problem, each - top, factor=problem.unit) for each in (top_a, top_b))
    out = _weighted(problem, out_a, weight_a[:, None], out_b, weight_b[:, None])
    return out, top, _weighted(problem, total_a, weight_a, total_b, weight_b)


def _weighted(problem: Problem, a: Array, weight_a: Array, b: Array, weight_b: Array) -> Array:
    """a * weight_a + b * weight_b. The compiler would choose, in each kernel, which product it rounds."""
    if problem.interpret:
        return a * weight_a + b * weight_b
    args = [a, jnp.broadcast_to(weight_a, a.shape), b, jnp.broadcast_to(weight_b, a.shape)]
    (result,) = plgpu.elementwise_inline_asm(
        "{ .reg .f32 e; mul.rn.f32 e, $3, $4; fma.rn.f32 $0, $1, $2, e; }",
        args=args, constraints="=f,f,f,f,f", pack=1, result_shape_dtypes=[jax.ShapeDtypeStruct(a.shape, jnp.float32)],
    )  # fmt: skip
    return result


def _finish(problem: Problem, given: Given, carry: Carry, query_head: Array) -> Array:
    """The output of query rows, from the sums over all of their keys."""
    out, top, total = carry
    if problem.has_sinks:
        total += exp2(problem, plgpu.load(given.sinks.at[query_head]) * LOG2E - top * problem.unit)
    return out / jnp.where(total == 0, 1.0, total)[:, None]


def _query_rows(problem: Problem, head: Array, tile_tokens: int) -> tuple[Array, Array, Array]:
    """Token in the tile, query head, and validity of each query row of a tile: tokens times query heads, padded."""
    padded_heads = pl.next_power_of_2(problem.q_per_kv)
    line = jnp.arange(ROWS)
    token = divide(line, padded_heads)
    lane = line - token * padded_heads
    return token, head * problem.q_per_kv + jnp.minimum(lane, problem.q_per_kv - 1), (
        (lane < problem.q_per_kv) & (token < tile_tokens)
    )


def _sum_of_split(
    problem: Problem, given: Given, queries: tuple[tuple[Array, ...], Array], query_head: Array, row: Array,
    head: Array, begin: Array, end: Array,
) -> Carry:  # fmt: skip
    """Sums over the keys from begin to end, in tiles that begin at multiples of KEYS. queries: q and its positions."""
    (q, query_position), values = queries, problem.value_columns()
    slope = plgpu.load(given.slopes.at[query_head]) if problem.has_slopes else None

    def next_keys(i: Array, carry: Carry) -> Carry:
        position = i * KEYS + jnp.arange(KEYS)
        # blocks before the window may be freed, and have invalid entries in the block table
        valid = (position >= begin) & (position < end)
        return attend_keys(problem, given, carry, q, slope, query_position, row, head, position, valid, values)

    return lax.fori_loop(divide(begin, KEYS), divide_up(end, KEYS), next_keys, start(ROWS, values.width))


def _window_begin(problem: Problem, query_position: Array) -> Array:
    """Position of the first key that a query sees."""
    if problem.window is None:
        return jnp.zeros_like(query_position)
    return jnp.maximum(query_position - (problem.window - 1), 0)


def _chunks(problem: Problem, given: Given) -> Array:
    """The output of rows of more than one token. Outputs of other rows are undefined."""
    q, starts = given.q, given.starts
    tile_tokens = max(1, ROWS // pl.next_power_of_2(problem.q_per_kv))
    tile_row, tile_first = prompt_tiles(starts, q.shape[0], tile_tokens)
    skipped = (tile_row < 0) | (jnp.take(starts[1:] - starts[:-1], tile_row, mode="clip") < 2)
    return _launch(
        functools.partial(_chunk_kernel, problem=problem, tile_tokens=tile_tokens), "paged_chunks_fixed", problem,
        jax.ShapeDtypeStruct(q.shape, q.dtype), (tile_row.shape[0], problem.kv_heads),
        jnp.where(skipped, -1, tile_row).astype(jnp.int32), tile_first, *given,
    )  # fmt: skip


def _chunk_kernel(tile_row_ref: Ref, tile_first_ref: Ref, *refs: Ref, problem: Problem, tile_tokens: int) -> None:
    """One KV head and one tile of a row's tokens."""
    given, out_ref = Given(*refs[:-1]), refs[-1]
    tile, head = pl.program_id(0), pl.program_id(1)
    row, size = tile_row_ref[tile], problem.tiling.min_split_keys

    def attend() -> None:
        first, length = given.starts[row], given.lens[row]
        count = given.starts[row + 1] - first
        in_tile, query_head, is_head = _query_rows(problem, head, tile_tokens)
        token = tile_first_ref[tile] + in_tile
        real = is_head & (token < count)
        index = first + jnp.minimum(token, count - 1)
        q = load_queries(problem, given, index, query_head, real)
        first_query = length - count + tile_first_ref[tile]
        begin, end = _window_begin(problem, first_query), jnp.minimum(first_query + tile_tokens, length)
        queries = q, length - count + token

        def next_split(i: Array, carry: Carry) -> Carry:
            bounds = jnp.maximum(i * size, begin), jnp.minimum((i + 1) * size, end)
            split = _sum_of_split(problem, given, queries, query_head, row, head, *bounds)
            return combine(problem, carry, split)

        values = problem.value_columns()
        carry = start(ROWS, values.width)
        carry = lax.fori_loop(divide(begin, size), divide_up(end, size), next_split, carry)
        target = jnp.where(real, index, out_ref.shape[0])
        out = _finish(problem, given, carry, query_head).astype(out_ref.dtype)
        column = values.columns[None, :]
        mask = real[:, None] & (column < values.end)
        plgpu.store(out_ref.at[target[:, None], query_head[:, None], column], out, mask=mask)

    pl.when(row >= 0)(attend)


def _decodes(problem: Problem, given: Given, out: Array | None) -> Array:
    """The output of rows of one token. out: of other rows, completed in place."""
    rows, q_heads, size = given.lens.shape[0], given.q.shape[1], problem.tiling.min_split_keys
    splits = -(-problem.table_keys // size)
    if problem.window is not None:
        splits = min(splits, -(-(problem.window - 1) // size) + 1)
    shape = jax.ShapeDtypeStruct((splits, rows, q_heads, problem.head_dim), jnp.float32)
    of_rows = jax.ShapeDtypeStruct((splits, rows, q_heads), jnp.float32)
    parts = _launch(
        functools.partial(_split_kernel, problem=problem), "paged_decode_fixed", problem, [shape, of_rows, of_rows],
        (rows, problem.kv_heads, splits), *given,
    )  # fmt: skip
    before = () if out is None else (out,)
    return _launch(
        functools.partial(_merge_kernel, problem=problem), "paged_merge_fixed", problem,
        jax.ShapeDtypeStruct(given.q.shape, given.q.dtype), (rows, problem.kv_heads), *parts, *given, *before,
        aliases={len(parts) + len(given): 0} if before else {},
    )  # fmt: skip


def _splits_of_row(problem: Problem, given: Given, row: Array) -> tuple[Array, Array, Array]:
    """First key, first split and number of splits of a row of one token; no splits for other rows."""
    size, length = problem.tiling.min_split_keys, given.lens[row]
    begin = _window_begin(problem, length - 1)
    first = divide(begin, size)
    is_decode = (given.starts[row + 1] - given.starts[row] == 1) & (length > 0)
    return begin, first, jnp.where(is_decode, divide_up(length, size) - first, 0)


def _split_kernel(*refs: Ref, problem: Problem) -> None:
    """One split and KV head of a row of one token."""
    given, (out_ref, top_ref, total_ref) = Given(*refs[:-3]), refs[-3:]
    row, head, part = (pl.program_id(axis) for axis in range(3))
    begin, first_split, splits = _splits_of_row(problem, given, row)
    size = problem.tiling.min_split_keys

    def attend() -> None:
        in_tile, query_head, is_head = _query_rows(problem, head, 1)
        length = given.lens[row]
        q = load_queries(problem, given, jnp.full(in_tile.shape, given.starts[row]), query_head, is_head)
        split = first_split + part
        bounds = jnp.maximum(split * size, begin), jnp.minimum((split + 1) * size, length)
        queries = q, length - 1 + in_tile  # rows of padding are later tokens, as in a chunk
        out, top, total = _sum_of_split(problem, given, queries, query_head, row, head, *bounds)
        target = jnp.where(is_head, query_head, given.q.shape[1])
        columns = problem.value_columns()
        column = columns.columns[None, :]
        mask = is_head[:, None] & (column < columns.end)
        plgpu.store(out_ref.at[part, row, target[:, None], column], out, mask=mask)
        plgpu.store(top_ref.at[part, row, target], top, mask=is_head)
        plgpu.store(total_ref.at[part, row, target], total, mask=is_head)

    pl.when(part < splits)(attend)


def _merge_kernel(out_parts: Ref, top_parts: Ref, total_parts: Ref, *refs: Ref, problem: Problem) -> None:
    """The splits of a row of one token and a KV head, combined first to last."""
    given, out_ref = Given(*refs[: len(Given._fields)]), refs[-1]
    row, head = pl.program_id(0), pl.program_id(1)
    _, _, splits = _splits_of_row(problem, given, row)

    def merge() -> None:
        _, query_head, is_head = _query_rows(problem, head, 1)
        columns = problem.value_columns()
        column = columns.columns[None, :]
        mask = is_head[:, None] & (column < columns.end)

        def next_split(part: Array, carry: Carry) -> Carry:
            split = (
                plgpu.load(out_parts.at[part, row, query_head[:, None], column], mask=mask, other=0.0),
                plgpu.load(top_parts.at[part, row, query_head], mask=is_head, other=0.0),
                plgpu.load(total_parts.at[part, row, query_head], mask=is_head, other=0.0),
            )
            return combine(problem, carry, split)

        carry = lax.fori_loop(0, splits, next_split, start(ROWS, columns.width))
        out = _finish(problem, given, carry, query_head).astype(out_ref.dtype)
        target = jnp.where(is_head, query_head, out_ref.shape[1])
        plgpu.store(out_ref.at[given.starts[row], target[:, None], column], out, mask=mask)

    pl.when(splits > 0)(merge)


def _launch(
    kernel: Callable[..., None], name: str, problem: Problem, shapes: Any, grid: tuple[int, ...], *arrays: Array,
    aliases: dict[int, int] | None = None,
) -> Any:  # fmt: skip
    """Launch a kernel with the warps that all of them have."""
    return pl.pallas_call(
        kernel, shapes, grid=grid, interpret=problem.interpret, name=name, input_output_aliases=aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=problem.tiling.decode_stages),
    )(*arrays)  # fmt: skip
