"""paged_attention for TPU in Pallas, lowered through Mosaic: one kernel for decodes, chunks and any mix of them.

1. The tokens are cut into tiles, all of one row: 128 query rows (tokens times the heads of a group), or one token
   where every row is one (`max_query_len=1`).
2. A program is one tile and some KV heads. It goes through the row's keys, KEYS_PER_STEP at a time counted from
   position 0 of the sequence, with the online softmax (Milakov & Gimelshein 2018; Dao et al. 2022). Pages come into
   fast memory by DMA while those before them are computed on; the last step of a tile fetches the next tile's first.
3. The tiles' results are put back into token order.

Programs run one behind the other, so what a step starts a later one may wait for. What a row computes does not depend
on the others: its steps begin at position 0, or where its own window does.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_attention.tiles import (
    heads_of_tokens,
    place_in_tiles,
    prompt_tiles,
    queries_of_tiles,
    round_up,
    row_of_token,
    values_of_tiles,
)
from pallas_kernels.write_kv.mosaic_tpu import refuse as refuse_pages

Ref = Any  # an array inside a kernel
MASKED = -1e30  # finite: -inf - -inf would be NaN
LANES = 128  # the width of a register, to which everything is padded
KEYS_PER_STEP = 256  # 1 MiB of bf16 keys and values for 8 heads of 128: 1.3 us at the 819 GB/s of a v5e
TILE_ROWS = 128  # query rows of a prompt's tile, as many as a v5e's matrix unit has
# What a program may take of the 16 MiB of fast memory that a kernel gets by default; the rest is the compiler's.
VMEM_BYTES = 10 << 20
# Of 1 MiB of scalar memory on a v5e: block tables of two tiles, each twice, and three numbers a tile.
SMEM_BYTES = 768 << 10


def refuse(device: Any, q: Any, pages: KVPages, block_tables: Any, max_query_len: int) -> str | None:
    """Why the kernel cannot take a call on a jax Device; None where it can."""
    del max_query_len
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries are {q.dtype}: it takes float32 and bfloat16"
    if reason := refuse_pages(device, pages):
        return reason
    rows, width = block_tables.shape
    tile = max(1, TILE_ROWS // (q.shape[1] // pages.num_kv_heads))
    tiles = -(-q.shape[0] // tile) + min(rows, q.shape[0])
    used = 4 * (4 * round_up(width, LANES) + 3 * round_up(max(tiles, rows), LANES))
    if used > SMEM_BYTES:
        return (
            f"a block table {width} wide and {tiles} tiles take {used} bytes of scalar memory, of which it has "
            f"{SMEM_BYTES}: use larger blocks, or fewer tokens a step"
        )
    return None


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
    interpret: Any = False,
) -> Float[Array, "tokens q_heads head_dim"]:
    """As `pallas_kernels.paged_attention` says.

    interpret: True to run the kernel in XLA operations, on any platform; `pltpu.InterpretParams` to check its DMAs.
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads, width = pages.num_kv_heads, block_tables.shape[1]
    q_per_kv = q_heads // kv_heads
    tile = 1 if max_query_len == 1 else max(1, TILE_ROWS // q_per_kv)
    rows = round_up(tile * q_per_kv, 32 // q.dtype.itemsize)

    # --- tiles: which row, where its queries begin, where its keys end -------------------------------------------
    counts = query_start_loc[1:] - query_start_loc[:-1]
    if max_query_len == 1:
        tile_row = jnp.arange(context_lens.shape[0], dtype=jnp.int32)
        tile_first = jnp.zeros_like(tile_row)
    else:
        tile_row, tile_first = prompt_tiles(query_start_loc, tokens, tile)
        tile_first = jnp.where(tile_row < 0, tokens, tile_first)  # place `tokens` is no token of any row
        tile_row = jnp.maximum(tile_row, 0)
    past = (context_lens - counts)[tile_row].astype(jnp.int32)
    begin = past + tile_first
    end = past + jnp.minimum(tile_first + tile, counts[tile_row])
    end = jnp.where(tile_first < counts[tile_row], end, 0).astype(jnp.int32)  # 0: an empty tile
    place = query_start_loc[tile_row][:, None] + tile_first[:, None] + jnp.arange(tile)
    queries = queries_of_tiles(q, place, kv_heads, rows)  # [tiles, kv_heads, rows, head_dim]

    problem = _Problem(
        scale=scale,
        q_per_kv=q_per_kv,
        window=sliding_window,
        softcap=logit_softcap,
        has_sinks=sinks is not None,
        has_slopes=alibi_slopes is not None,
        heads=_heads(kv_heads, rows, head_dim, pages, q.dtype.itemsize),
        rows=rows,
        block_size=pages.block_size,
        step_pages=max(1, KEYS_PER_STEP // pages.block_size),
    )

    # --- the kernel ----------------------------------------------------------------------------------------------
    heads, tiles = problem.heads, tile_row.shape[0]

    def table_spec(later: int) -> pl.BlockSpec:
        """The block table of the tile that is `later` programs away."""
        return pl.BlockSpec(
            (1, 1, width), lambda _, t, row, *rest: (row[lax.rem(t + later, tiles)], 0, 0), memory_space=pltpu.SMEM
        )

    a_tile = pl.BlockSpec((1, heads, rows, head_dim), lambda h, t, *_: (t, h, 0, 0))
    a_head = pl.BlockSpec((heads, rows, 1), lambda h, *_: (h, 0, 0))
    own_numbers = [
        values_of_tiles(x, kv_heads, tile, rows)[..., None] for x in (sinks, alibi_slopes) if x is not None
    ]
    tables = block_tables.astype(jnp.int32)[:, None]  # rows are the outermost axis: a row of them is whole tiles
    state = pltpu.VMEM((heads, rows, 1), jnp.float32)
    result = pl.pallas_call(
        functools.partial(_kernel, problem=problem),
        jax.ShapeDtypeStruct(queries.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(kv_heads // heads, tiles),
            in_specs=[
                table_spec(0), table_spec(1), a_tile, pl.BlockSpec(memory_space=pltpu.HBM), *[a_head] * len(own_numbers)
            ],
            out_specs=a_tile,
            scratch_shapes=[
                pltpu.VMEM((2, 2, heads, problem.step_pages, pages.block_size, head_dim), pages.dtype),
                pltpu.VMEM((heads, rows, head_dim), jnp.float32), state, state,
                pltpu.SMEM((2,), jnp.int32), pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="paged_attention_tpu",
    )(tile_row, begin, end, tables, tables, queries, pages.data, *own_numbers)  # fmt: skip

    # --- back into token order -----------------------------------------------------------------------------------
    if max_query_len == 1:
        place = row_of_token(query_start_loc, tokens)
    else:
        place = place_in_tiles(query_start_loc, tokens, tile)
    return heads_of_tokens(result, place, tile, q_per_kv)


@dataclasses.dataclass(frozen=True)
class _Problem:
    """What is static in a call."""

    scale: float
    q_per_kv: int
    window: int | None
    softcap: float | None
    has_sinks: bool
    has_slopes: bool
    heads: int       # KV heads of a program
    rows: int        # query rows of a tile for each of them, padding included
    block_size: int
    step_pages: int  # pages that go through the softmax together

    @property
    def step_keys(self) -> int:
        """Keys that go through the softmax together."""
        return self.step_pages * self.block_size


def _heads(kv_heads: int, rows: int, head_dim: int, pages: KVPages, itemsize: int) -> int:
    """KV heads of a program: as many as fit, and divide them all. One head of 256 float32 numbers takes 3 MiB."""
    keys, wide = max(KEYS_PER_STEP, pages.block_size), round_up(head_dim, LANES)
    buffers = 2 * 2 * keys * wide * pages.dtype.itemsize
    queries_and_results = 2 * 2 * rows * wide * itemsize
    state = rows * (wide + 4 * LANES) * 4  # output, maximum, sum, and twice a number of the head
    scores = 3 * rows * keys * 4
    fitting = max(1, VMEM_BYTES // (buffers + queries_and_results + state + scores))
    return max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= fitting)


def _kernel(
    _: Ref, begin_ref: Ref, end_ref: Ref, table_ref: Ref, next_table_ref: Ref, q_ref: Ref, data_ref: Ref, *rest: Ref,
    problem: _Problem,
) -> None:  # fmt: skip
    """One tile and `problem.heads` KV heads.

    begin_ref, end_ref: [tiles] position of the first query, and how many keys the last one sees; 0 = empty tile.
    buffer_ref:         [2, keys and values, heads, pages, block_size, head_dim]: steps take turns in its halves.
    turn_ref:           [half that holds the tile's first step, whether the tile before has fetched it].
    """
    own_refs, (out_ref, buffer_ref, sum_ref, top_ref, total_ref, turn_ref, arrived) = rest[:-7], rest[-7:]
    group, tile = pl.program_id(0), pl.program_id(1)
    groups, tiles = pl.num_programs(0), pl.num_programs(1)

    def span(tile: Array) -> tuple[Array, Array]:
        """The keys that a tile needs: from the window of its first query to its last query."""
        if problem.window is None:
            return jnp.int32(0), end_ref[tile]
        return jnp.maximum(begin_ref[tile] - problem.window + 1, 0), end_ref[tile]

    def each_page(step: Array, keys: tuple[Array, Array], act: Any) -> None:
        """act(page of the row, page of the step) for every page of a step that has keys in the span."""
        first = jnp.maximum(step * problem.step_pages, keys[0] // problem.block_size)
        last = jnp.minimum((step + 1) * problem.step_pages, pl.cdiv(keys[1], problem.block_size))
        lax.fori_loop(first, last, lambda i, _: act(i, i - step * problem.step_pages), None)

    def fetch(table_ref: Ref, group: Array, step: Array, keys: tuple[Array, Array], half: Array) -> None:
        """Start the copies of a step's pages into a half of the buffer."""

        def start(page: Array, place: Array) -> None:
            source = data_ref.at[table_ref[0, 0, page], :, pl.ds(group * problem.heads, problem.heads)]
            pltpu.make_async_copy(source, buffer_ref.at[half, :, :, place], arrived.at[half]).start()

        each_page(step, keys, start)

    def wait(step: Array, keys: tuple[Array, Array], half: Array) -> None:
        """Until they are there."""

        def end(_: Array, place: Array) -> None:
            source = data_ref.at[0, :, pl.ds(0, problem.heads)]  # only its size matters
            pltpu.make_async_copy(source, buffer_ref.at[half, :, :, place], arrived.at[half]).wait()

        each_page(step, keys, end)

    @pl.when((group == 0) & (tile == 0))
    def _first_program() -> None:
        turn_ref[0] = 0
        turn_ref[1] = 0

    low, end = keys = span(tile)
    first_step, last_step = low // problem.step_keys, pl.cdiv(end, problem.step_keys)
    last_tile = tile + 1 == tiles
    next_tile, next_group = jnp.where(last_tile, 0, tile + 1), jnp.where(last_tile, group + 1, group)
    next_keys = span(next_tile)
    next_needs = (next_group < groups) & (next_keys[1] > 0)
    first_half = turn_ref[0]

    @pl.when((end > 0) & (turn_ref[1] == 0))
    def _nobody_fetched() -> None:
        fetch(table_ref, group, first_step, keys, first_half)

    def over_keys(step: Array, _: None) -> None:
        half = (first_half + step - first_step) & 1

        @pl.when(step + 1 < last_step)
        def _fetch_next_step() -> None:
            fetch(table_ref, group, step + 1, keys, 1 - half)

        @pl.when((step + 1 == last_step) & next_needs)
        def _fetch_next_tile() -> None:
            fetch(next_table_ref, next_group, next_keys[0] // problem.step_keys, next_keys, 1 - half)

        wait(step, keys, half)
        _attend(problem, step, begin_ref[tile], keys, q_ref, buffer_ref.at[half], own_refs, sum_ref, top_ref, total_ref)

    @pl.when(end > 0)
    def _tokens() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)
        # a sink is a key of its own with a value of 0
        top_ref[...] = own_refs[0][...] if problem.has_sinks else jnp.full_like(top_ref, MASKED)
        total_ref[...] = jnp.full_like(total_ref, 1.0 if problem.has_sinks else 0.0)
        lax.fori_loop(first_step, last_step, over_keys, None)
        out_ref[0] = (sum_ref[...] / total_ref[...]).astype(out_ref.dtype)
        turn_ref[0] = (first_half + last_step - first_step) & 1
        turn_ref[1] = next_needs.astype(jnp.int32)

    @pl.when(end == 0)
    def _empty() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)
        # the tile before fetched nothing for this one, and this one nothing for the next
        turn_ref[1] = 0


def _attend(
    problem: _Problem, step: Array, begin: Array, keys: tuple[Array, Array], q_ref: Ref, pages_ref: Ref,
    own_refs: tuple[Ref, ...], sum_ref: Ref, top_ref: Ref, total_ref: Ref,
) -> None:  # fmt: skip
    """The online softmax over the keys of one step: sum, maximum and total after them."""
    low, end = keys
    heads, size = problem.heads, problem.step_keys
    head_dim = q_ref.shape[-1]
    position = step * size

    # Pages that were not fetched, and places beyond the row's end, may hold anything, NaN included: 0 * NaN is NaN.
    @pl.when((position < low) | (position + size > end))
    def _clean() -> None:
        values = pages_ref[1].astype(jnp.float32).reshape(heads, size, head_dim)
        at = position + lax.broadcasted_iota(jnp.int32, values.shape, 1)
        values = jnp.where((at >= low) & (at < end), values, 0.0)
        pages_ref[1] = values.reshape(pages_ref.shape[1:]).astype(pages_ref.dtype)

    q = q_ref[0]
    key, value = (pages_ref[i].reshape(heads, size, head_dim).astype(q.dtype) for i in range(2))
    scores = _product("hqd,hkd->hqk", q, key) * problem.scale
    if problem.softcap is not None:
        scores = problem.softcap * jnp.tanh(scores / problem.softcap)
    line, column = (lax.broadcasted_iota(jnp.int32, (problem.rows, size), axis) for axis in range(2))
    # padding behind the tile's last token counts as that token
    distance = jnp.minimum(begin + lax.div(line, problem.q_per_kv), end - 1) - (position + column)
    if problem.has_slopes:
        scores -= own_refs[-1][...] * distance.astype(jnp.float32)[None]
    seen = distance >= 0
    if problem.window is not None:
        seen &= distance < problem.window
    # A query that sees no key of its first steps (they are before its window) has all weights 1 there; `shrink` is 0
    # when it sees one, and every query sees itself.
    scores = jnp.where(seen[None], scores, MASKED)
    top = top_ref[...]
    new_top = jnp.maximum(top, scores.max(axis=2, keepdims=True))
    weights = jnp.exp(scores - new_top)
    shrink = jnp.exp(top - new_top)
    sum_ref[...] = sum_ref[...] * shrink + _product("hqk,hkd->hqd", weights.astype(q.dtype), value)
    total_ref[...] = total_ref[...] * shrink + weights.sum(axis=2, keepdims=True)
    top_ref[...] = new_top


def _product(pattern: str, a: Array, b: Array) -> Array:
    """A batched product with float32 sums; float32 operands are multiplied as such, not as bfloat16."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(pattern, a, b, precision=exact, preferred_element_type=jnp.float32)
