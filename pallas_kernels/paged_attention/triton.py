"""paged_attention for NVIDIA in Pallas, lowered through Triton: kernels for decodes, for their merge, and for prefills.

1. `_decode_kernel`, grid (rows, KV heads, splits): rows of one token. A program attends with all query heads of one KV
   head over one split of the row's keys (flash decoding, Dao et al. 2023). Splits begin at fixed positions of the
   sequence, so a row's result does not depend on the batch. A program writes its output and the logarithm of its sum.
2. `_merge_kernel`, grid (rows, query heads): a program combines the splits of one row and head.
3. `_prefill_kernel`, grid (tiles of tokens, KV heads): rows of several tokens. A program attends with one tile of a
   row's tokens and all query heads of one KV head, in one product (Dao et al. 2022). It runs before the decode kernels,
   which complete its output in place.

A call with `max_query_len=1` runs 1 and 2, or only 1 if one split covers the block table. A mixed call runs all three,
and programs of rows that belong to another kernel return at once.

The kernels take whole arrays and compute addresses, because this lowering has no scalar prefetch and no scratch memory.
Widths that are not powers of two are padded with masks. Masked stores point past the end of the array, because
interpret mode would write clamped duplicates over valid rows.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import FP8, INT8, KVPages
from pallas_kernels.paged_attention.tiles import prompt_tiles
from pallas_kernels.paged_attention.tiling import Tiling
from pallas_kernels.write_kv.triton import refuse as refuse_pages

Ref = Any  # an array inside a kernel, addressed by `.at`
MASKED = -1e30  # finite: -inf - -inf would be NaN


def paged_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    pages: KVPages,
    block_tables: Int[Array, "rows width"],
    context_lens: Int[Array, " rows"],
    query_start_loc: Int[Array, " rows_plus_1"],
    *,
    scale: float,
    max_query_len: int,
    sliding_window: int | None,
    logit_softcap: float | None,
    sinks: Float[Array, " q_heads"] | None,
    alibi_slopes: Float[Array, " q_heads"] | None,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Float[Array, "tokens q_heads head_dim"]:
    """See `pallas_kernels.paged_attention`.

    tiling: None: chosen by device and shape. interpret: run the kernels in XLA operations, on any platform.
    """
    table_keys = block_tables.shape[1] * pages.block_size
    tiling = tiling or Tiling.choose(q, pages)
    split_keys = tiling.split_keys(table_keys)
    problem = _Problem(
        scale=scale,
        q_per_kv=q.shape[1] // pages.num_kv_heads,
        head_dim=q.shape[2],
        block_size=pages.block_size,
        window=sliding_window,
        softcap=logit_softcap,
        has_sinks=sinks is not None,
        has_slopes=alibi_slopes is not None,
        scales={INT8: "token", FP8: "head"}.get(pages.dtype, "none"),
        splits=-(-table_keys // split_keys),
        split_keys=split_keys,
        tiling=tiling,
        only_decodes=max_query_len == 1,
    )
    # absent arrays have a placeholder, so that each kernel has one signature
    none = jnp.zeros(1, jnp.float32)
    given = _Given(
        block_tables, context_lens, query_start_loc,
        none if sinks is None else sinks.astype(jnp.float32),
        none if alibi_slopes is None else alibi_slopes.astype(jnp.float32),
        q, pages.data, none if pages.scales is None else pages.scales,
    )  # fmt: skip
    out = None if problem.only_decodes else _prefill(problem, given, interpret)
    return _decode(problem, given, out, interpret)


def refuse(device: Any, q: Any, pages: KVPages, block_tables: Any, max_query_len: int) -> str | None:
    """Reason why the kernels cannot take a call on a jax Device; None if they can."""
    del block_tables, max_query_len
    if q.shape[2] > 256:
        return f"head_dim {q.shape[2]}: tiles of more than 256 do not fit into shared memory"
    return refuse_pages(device, pages)


class _Given(NamedTuple):
    """The arrays of a call. Inside the kernels: the references to them."""

    tables: Any
    lens: Any
    starts: Any
    sinks: Any   # float32[q_heads], or [1] if there are none; slopes and scales likewise
    slopes: Any
    q: Any
    data: Any
    scales: Any


@dataclasses.dataclass(frozen=True)
class _Problem:
    """The static facts of a call."""

    scale: float
    q_per_kv: int
    head_dim: int
    block_size: int
    window: int | None
    softcap: float | None
    has_sinks: bool
    has_slopes: bool
    scales: str  # of the pages: "none", "token" (int8) or "head" (fp8)
    splits: int      # decode programs per row and KV head
    split_keys: int  # keys of each decode program
    tiling: Tiling
    only_decodes: bool

    @property
    def width(self) -> int:
        """head_dim, padded to a width that the products accept."""
        return max(16, pl.next_power_of_2(self.head_dim))

    @property
    def head_rows(self) -> int:
        """Query rows of a decode program: q_per_kv, padded to the smallest product."""
        return max(16, pl.next_power_of_2(self.q_per_kv))


# --- one iteration over a few keys, for decode and prefill ------------------------------------------------------------

Carry = tuple[Array, Array, Array]  # output [rows, width], maximum [rows], sum [rows], all float32


def _load_page(
    problem: _Problem, given: _Given, which: int, blocks: Array, head: Array, offset: Array, valid: Array
) -> tuple[Array, Array | None]:
    """Keys (which=0) or values (which=1) of one KV head, [keys, width], and their scales, [keys] or a scalar.

    blocks, offset: block of each key, and its offset in the block. Invalid keys are zeros.
    """
    column = jnp.arange(problem.width)[None, :]
    mask = valid[:, None] & (column < problem.head_dim)
    page = plgpu.load(given.data.at[blocks[:, None], which, head, offset[:, None], column], mask=mask, other=0.0)
    match problem.scales:
        case "token":
            scale = plgpu.load(given.scales.at[blocks, which, head, offset], mask=valid, other=0.0)
            return page, scale.astype(jnp.float32)
        case "head":
            return page, given.scales[which, head]
    return page, None


def _attend_keys(
    problem: _Problem,
    given: _Given,
    carry: Carry,
    q: Array,
    slope: Array | None,
    query_position: Array,
    row: Array,
    head: Array,
    position: Array,
    valid: Array,
) -> Carry:
    """Online softmax (Milakov & Gimelshein 2018): `carry` after the row's keys at the valid positions."""
    out, top, total = carry
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    blocks = plgpu.load(given.tables.at[row, position // problem.block_size], mask=valid, other=0)
    offset = position % problem.block_size
    key, key_scale = _load_page(problem, given, 0, blocks, head, offset, valid)
    scores = plgpu.dot(q, key.astype(q.dtype).T, precision=precision) * problem.scale
    if key_scale is not None:
        scores *= key_scale[None, :] if key_scale.ndim else key_scale
    if problem.softcap is not None:
        scores = problem.softcap * jnp.tanh(scores / problem.softcap)
    distance = query_position[:, None] - position[None, :]
    if slope is not None:
        scores -= slope[:, None] * distance.astype(jnp.float32)
    seen = (distance >= 0) & valid[None, :]
    if problem.window is not None:
        seen &= distance < problem.window
    scores = jnp.where(seen, scores, MASKED)
    new_top = jnp.maximum(top, scores.max(axis=1))
    # if a query sees no key here, new_top may be MASKED, and exp(0) would count the hidden keys
    weights = jnp.where(seen, jnp.exp(scores - new_top[:, None]), 0.0)
    shrink = jnp.exp(top - new_top)
    total = total * shrink + weights.sum(axis=1)
    value, value_scale = _load_page(problem, given, 1, blocks, head, offset, valid)
    if value_scale is not None:
        weights *= value_scale[None, :] if value_scale.ndim else value_scale
    out = out * shrink[:, None] + plgpu.dot(weights.astype(q.dtype), value.astype(q.dtype), precision=precision)
    return out, new_top, total


def _start(rows: int, width: int) -> Carry:
    return (
        jnp.zeros((rows, width), jnp.float32),
        jnp.full((rows,), MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )


# --- decode: one row, one KV head, one split --------------------------------------------------------------------------


def _decode_kernel(*refs: Ref, problem: _Problem) -> None:
    """One row, one KV head, one split.

    With one split in all, writes the output. With more, writes [split, row, head, width] and the logarithm of the sum.
    """
    given, rest = _Given(*refs[: len(_Given._fields)]), refs[len(_Given._fields) :]
    *_, out_ref, lse_ref = rest if problem.splits > 1 else (*rest, None)
    row, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    first = given.starts[row]
    length = given.lens[row]
    is_decode = given.starts[row + 1] - first == 1
    begin = split * problem.split_keys
    end = jnp.minimum(begin + problem.split_keys, length)
    if problem.window is not None:
        begin = jnp.maximum(begin, length - problem.window)

    def attend() -> None:
        lane = jnp.arange(problem.head_rows)
        query_head = head * problem.q_per_kv + jnp.minimum(lane, problem.q_per_kv - 1)
        column = jnp.arange(problem.width)[None, :]
        is_head = lane < problem.q_per_kv
        mask = is_head[:, None] & (column < problem.head_dim)
        q = plgpu.load(given.q.at[first, query_head[:, None], column], mask=mask, other=0.0)
        slope = plgpu.load(given.slopes.at[query_head]) if problem.has_slopes else None
        query_position = jnp.full((problem.head_rows,), length - 1, jnp.int32)

        size = problem.tiling.decode_keys

        def next_keys(i: Array, carry: Carry) -> Carry:
            position = i * size + jnp.arange(size)
            # iterations are aligned to `size`, so the first one may begin in the previous split
            valid = (position >= begin) & (position < end)
            return _attend_keys(problem, given, carry, q, slope, query_position, row, head, position, valid)

        out, top, total = lax.fori_loop(
            begin // size, pl.cdiv(end, size), next_keys, _start(problem.head_rows, problem.width)
        )
        if lse_ref is None and problem.has_sinks:
            total += jnp.exp(plgpu.load(given.sinks.at[query_head]) - top)
        out /= jnp.where(total == 0, 1.0, total)[:, None]
        if lse_ref is None:
            target = out_ref.at[first, jnp.where(is_head, query_head, given.q.shape[1])[:, None], column]
            plgpu.store(target, out.astype(out_ref.dtype), mask=mask)
        else:
            target_head = jnp.where(is_head, query_head, lse_ref.shape[2])
            plgpu.store(out_ref.at[split, row, target_head[:, None], column], out, mask=mask)
            lse = top + jnp.log(jnp.where(total == 0, 1.0, total))
            plgpu.store(lse_ref.at[split, row, target_head], jnp.where(total == 0, MASKED, lse), mask=is_head)

    # a split after the row's end, or before its window, has no keys, and the merge does not read it
    pl.when(is_decode & (begin < end))(attend)


def _merge_kernel(
    lens_ref: Ref, starts_ref: Ref, sinks_ref: Ref, parts_ref: Ref, lse_ref: Ref, *rest: Ref,
    problem: _Problem,
) -> None:  # fmt: skip
    """One row and one query head: the outputs of the splits, weighted by their sums."""
    out_ref = rest[-1]
    row, head = pl.program_id(0), pl.program_id(1)
    first, length = starts_ref[row], lens_ref[row]
    is_decode = (starts_ref[row + 1] - first == 1) & (length > 0)

    def merge() -> None:
        split = jnp.arange(pl.next_power_of_2(problem.splits))
        begin = split * problem.split_keys
        written = begin < length
        if problem.window is not None:
            written &= begin + problem.split_keys > length - problem.window
        lse = plgpu.load(lse_ref.at[split, row, head], mask=written, other=MASKED)
        top = lse.max()
        if problem.has_sinks:
            top = jnp.maximum(top, sinks_ref[head])
        weights = jnp.where(written, jnp.exp(lse - top), 0.0)
        total = weights.sum()
        if problem.has_sinks:
            total += jnp.exp(sinks_ref[head] - top)
        column = jnp.arange(problem.width)[None, :]
        mask = written[:, None] & (column < problem.head_dim)
        parts = plgpu.load(parts_ref.at[split[:, None], row, head, column], mask=mask, other=0.0)
        merged = (parts * weights[:, None]).sum(axis=0) / total
        column = jnp.arange(problem.width)
        plgpu.store(out_ref.at[first, head, column], merged.astype(out_ref.dtype), mask=column < problem.head_dim)

    pl.when(is_decode)(merge)


def _decode(problem: _Problem, given: _Given, out: Array | None, interpret: bool) -> Array:
    """The output of rows of one token. out: the result of `_prefill`, completed in place; None: only decodes."""
    num_rows, q_heads = given.lens.shape[0], given.q.shape[1]
    tiling = problem.tiling
    params = plgpu.CompilerParams(num_warps=tiling.decode_warps, num_stages=tiling.decode_stages)
    final = jax.ShapeDtypeStruct(given.q.shape, given.q.dtype)
    grid = (num_rows, q_heads // problem.q_per_kv, problem.splits)
    kernel = functools.partial(_decode_kernel, problem=problem)
    before = () if out is None else (out,)
    if problem.splits == 1:
        return pl.pallas_call(
            kernel, final, grid=grid, compiler_params=params, interpret=interpret, name="paged_decode",
            input_output_aliases={len(given): 0} if before else {},
        )(*given, *before)  # fmt: skip
    parts, lse = pl.pallas_call(
        kernel,
        (
            jax.ShapeDtypeStruct((problem.splits, num_rows, q_heads, problem.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((problem.splits, num_rows, q_heads), jnp.float32),
        ),
        grid=grid, compiler_params=params, interpret=interpret, name="paged_decode_splits",
    )(*given)  # fmt: skip
    arguments = (given.lens, given.starts, given.sinks, parts, lse)
    return pl.pallas_call(
        functools.partial(_merge_kernel, problem=problem), final, grid=(num_rows, q_heads),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1), interpret=interpret, name="paged_decode_merge",
        input_output_aliases={len(arguments): 0} if before else {},
    )(*arguments, *before)  # fmt: skip


# --- prefill: one KV head, one tile of a row's tokens -----------------------------------------------------------------


def _prefill_kernel(
    tile_row_ref: Ref, tile_first_ref: Ref, *refs: Ref, problem: _Problem, tile_tokens: int
) -> None:
    """One KV head and one tile of a row's tokens. Query rows: tokens times q_per_kv, padded to a power of two."""
    given, out_ref = _Given(*refs[:-1]), refs[-1]
    tile, head = pl.program_id(0), pl.program_id(1)
    row = tile_row_ref[tile]

    def attend() -> None:
        padded_heads = pl.next_power_of_2(problem.q_per_kv)
        first, length = given.starts[row], given.lens[row]
        count = given.starts[row + 1] - first
        line = jnp.arange(tile_tokens * padded_heads)
        token = tile_first_ref[tile] + line // padded_heads
        lane = line % padded_heads
        real = (token < count) & (lane < problem.q_per_kv)
        query_head = head * problem.q_per_kv + jnp.minimum(lane, problem.q_per_kv - 1)
        index = first + jnp.minimum(token, count - 1)
        column = jnp.arange(problem.width)[None, :]
        mask = real[:, None] & (column < problem.head_dim)
        q = plgpu.load(given.q.at[index[:, None], query_head[:, None], column], mask=mask, other=0.0)
        slope = plgpu.load(given.slopes.at[query_head]) if problem.has_slopes else None
        query_position = length - count + token
        begin = jnp.int32(0)
        end = jnp.minimum(length - count + tile_first_ref[tile] + tile_tokens, length)
        if problem.window is not None:
            begin = jnp.maximum(length - count + tile_first_ref[tile] - problem.window + 1, 0)
        size = problem.tiling.prefill_keys

        def next_keys(i: Array, carry: Carry) -> Carry:
            position = i * size + jnp.arange(size)
            # blocks before the window may be freed already, and their entries in the block table may be anything
            valid = (position >= begin) & (position < end)
            return _attend_keys(problem, given, carry, q, slope, query_position, row, head, position, valid)

        carry = _start(tile_tokens * padded_heads, problem.width)
        out, top, total = lax.fori_loop(begin // size, pl.cdiv(end, size), next_keys, carry)
        if problem.has_sinks:
            total += jnp.exp(plgpu.load(given.sinks.at[query_head]) - top)
        out /= jnp.where(total == 0, 1.0, total)[:, None]
        target = jnp.where(real, index, out_ref.shape[0])
        plgpu.store(
            out_ref.at[target[:, None], query_head[:, None], column], out.astype(out_ref.dtype), mask=mask
        )

    pl.when(row >= 0)(attend)


def _prefill(problem: _Problem, given: _Given, interpret: bool) -> Array:
    """The output of rows of more than one token. Outputs of other rows are undefined."""
    q, starts = given.q, given.starts
    tiling = problem.tiling
    tile_tokens = max(1, tiling.prefill_rows // pl.next_power_of_2(problem.q_per_kv))
    tile_row, tile_first = prompt_tiles(starts, q.shape[0], tile_tokens)
    counts = starts[1:] - starts[:-1]
    # skip tiles without a row, and rows of one token, which `_decode` computes
    skipped = (tile_row < 0) | (jnp.take(counts, tile_row, mode="clip") < 2)
    tile_row = jnp.where(skipped, -1, tile_row).astype(jnp.int32)
    return pl.pallas_call(
        functools.partial(_prefill_kernel, problem=problem, tile_tokens=tile_tokens),
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(tile_row.shape[0], q.shape[1] // problem.q_per_kv),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.prefill_warps, num_stages=tiling.prefill_stages),
        interpret=interpret,
        name="paged_prefill",
    )(tile_row, tile_first, *given)
