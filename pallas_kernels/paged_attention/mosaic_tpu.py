"""paged_attention for TPU in Pallas, lowered through Mosaic: one kernel for decodes, chunks and any mix of them.

1. The tokens are split into tiles, each of one row: about TILE_ROWS query rows (tokens times q_per_kv), or one token
   per tile with `max_query_len=1`.
2. `_kernel`, grid (blocks of KV heads, tiles): a program attends with one tile and `_Problem.heads` KV heads. It loops
   over the row's keys with the online softmax (Milakov & Gimelshein 2018; Dao et al. 2022), KEYS_PER_STEP at a time,
   counted from position 0 of the sequence. DMAs bring pages into VMEM one step ahead. The last step of a tile
   fetches the first pages of the next tile. A tile of several tokens is read directly from q, and its axes are swapped
   in VMEM.
3. The results of the tiles are put in token order.

Programs run one after the other, so a program may wait for a DMA that an earlier program started. A row's result does
not depend on other rows: its steps begin at position 0, or at the start of its window.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.kv_pages import FP8, INT8, KVPages
from pallas_kernels.paged_attention.call import AttentionCall, StaticParameters
from pallas_kernels.paged_attention.tiles import (
    heads_of_tokens,
    index_in_tiles,
    prompt_tiles,
    queries_of_tiles,
    round_up,
    row_of_token,
    values_of_tiles,
)
from pallas_kernels.write_kv.mosaic_tpu import PagePart
from pallas_kernels.write_kv.mosaic_tpu import refuse as refuse_pages

Ref = Any  # an array inside a kernel
MASKED = -1e30  # finite: -inf - -inf would be NaN
LANES = 128  # width of a register, to which all arrays are padded
KEYS_PER_STEP = 256  # 1 MiB of bf16 keys and values for 8 heads of 128: 1.3 us at the 819 GB/s of a v5e
TILE_ROWS = 128  # query rows of a prompt's tile: the rows of a v5e's matrix unit
# VMEM that a program may use. A kernel has 16 MiB by default; the compiler uses the rest.
VMEM_BYTES = 10 << 20
# Scalar memory (SMEM) for the block tables of two tiles, each twice, and four numbers per tile. A v5e has 1 MiB.
SMEM_BYTES = 768 << 10


def refuse(device: Any, q: Any, pages: KVPages, block_tables: Any, max_query_len: int) -> str | None:
    """Reason why the kernel cannot take a call on a jax Device; None if it can."""
    del max_query_len
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries are {q.dtype}: it takes float32 and bfloat16"
    if reason := refuse_pages(device, pages):
        return reason
    rows, width = block_tables.shape
    tiles = -(-q.shape[0] // _tile(q.shape[1] // pages.num_kv_heads)) + min(rows, q.shape[0])
    used = 4 * (4 * round_up(width, LANES) + 4 * round_up(max(tiles, rows), LANES))
    if used > SMEM_BYTES:
        return (
            f"a block table of {width} entries and {tiles} tiles need {used} bytes of scalar memory, at most "
            f"{SMEM_BYTES} are available: use larger blocks, or fewer tokens per step"
        )
    return None


def paged_attention(call: AttentionCall, *, interpret: Any = False) -> Float[Array, "tokens q_heads head_dim"]:
    """See `pallas_kernels.paged_attention`.

    interpret: True to run the kernel in XLA operations, on any platform; `pltpu.InterpretParams` to check its DMAs.
    """
    q, pages, starts = call.q, call.pages, call.query_start_loc
    tokens, q_heads, head_dim = q.shape
    kv_heads, q_per_kv, width = pages.num_kv_heads, call.q_per_kv, call.block_tables.shape[1]
    tile = 1 if call.max_query_len == 1 else _tile(q_per_kv)
    rows = round_up(tile * q_per_kv, 32 // q.dtype.itemsize) if tile == 1 else tile * q_per_kv

    # --- tiles: row, first query and end of the keys of each -----------------------------------------------------
    counts = starts[1:] - starts[:-1]
    if call.max_query_len == 1:
        tile_row = jnp.arange(call.context_lens.shape[0], dtype=jnp.int32)
        tile_first, used = jnp.zeros_like(tile_row), jnp.int32(tile_row.size)
    else:
        tile_row, tile_first = prompt_tiles(starts, tokens, tile)
        # an empty tile follows the used ones: its zeros are the results of padding
        used = jnp.sum(tile_row >= 0, dtype=jnp.int32) + 1
        tile_first = jnp.where(tile_row < 0, tokens, tile_first)  # offset `tokens` is past the end of every row
        tile_row = jnp.maximum(tile_row, 0)
    past = (call.context_lens - counts)[tile_row].astype(jnp.int32)
    begin = past + tile_first
    end = past + jnp.minimum(tile_first + tile, counts[tile_row])
    end = jnp.where(tile_first < counts[tile_row], end, 0).astype(jnp.int32)  # 0: an empty tile
    token = jnp.minimum(starts[tile_row] + tile_first, tokens).astype(jnp.int32)  # first of each tile

    problem = _Problem.of(
        call,
        tile=tile,
        scales={INT8: "token", FP8: "head"}.get(pages.dtype),
        heads=_heads(kv_heads, rows, head_dim, pages, q.dtype),
        rows=rows,
        step_pages=max(1, KEYS_PER_STEP // pages.block_size),
    )

    # --- the kernel ----------------------------------------------------------------------------------------------
    heads, tiles = problem.heads, tile_row.shape[0]
    part = PagePart.of(pages, heads)

    def table_spec(later: int) -> pl.BlockSpec:
        """The block table of the tile that runs `later` programs after this one."""
        return pl.BlockSpec(
            (1, 1, width), lambda _, t, used, row, *rest: (row[lax.rem(t + later, used[0])], 0, 0),
            memory_space=pltpu.SMEM,
        )  # fmt: skip

    given = [x.astype(jnp.float32) for x in (call.sinks, call.alibi_slopes) if x is not None]
    if tile == 1:
        queries = queries_of_tiles(q, token[:, None], kv_heads, rows)  # [tiles, kv_heads, rows, head_dim]
        out_shape = queries.shape
        tile_spec = out_spec = pl.BlockSpec((1, heads, rows, head_dim), lambda h, t, *_: (t, h, 0, 0))
        per_head = [values_of_tiles(x, kv_heads, tile, rows)[..., None] for x in given]
    else:
        q_block = heads * q_per_kv  # query heads of a program
        queries = jnp.moveaxis(q.reshape(tokens, -1, q_block, head_dim), 1, 0)
        queries = jnp.pad(queries, ((0, 0), (0, tile), (0, 0), (0, 0)))
        out_shape = (tiles, q_heads // q_block, tile, q_block, head_dim)
        tile_spec = pl.BlockSpec(  # indexed by token, not by blocks of `tile` tokens
            tuple(pl.Element(n) for n in (1, tile, q_block, head_dim)),
            lambda h, t, used, row, begin, end, token: (h, token[t], 0, 0),
        )
        out_spec = pl.BlockSpec((1, 1, tile, q_block, head_dim), lambda h, t, *_: (t, h, 0, 0, 0))
        per_head = [jnp.repeat(x.reshape(kv_heads, q_per_kv, 1), tile, axis=1) for x in given]
    a_head = pl.BlockSpec((heads, rows, 1), lambda h, *_: (h, 0, 0))
    tables = call.block_tables[:, None]  # [rows, 1, width]: one row is a whole block of memory
    state = pltpu.VMEM((heads, rows, 1), jnp.float32)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    data, page_scales, scales_spec, scales_buffer = _in_hbm(part.data, interpret), [], [], []
    if problem.scales == "token":
        page_scales, scales_spec = [_in_hbm(pages.scales, interpret)], [hbm]
        scales_buffer = [pltpu.VMEM((2, 2, problem.step_pages, kv_heads, pages.block_size), pages.scales.dtype)]
    elif problem.scales == "head":
        page_scales = [pages.scales[..., None, None]]
        scales_spec = [pl.BlockSpec((2, heads, 1, 1), lambda h, *_: (0, h, 0, 0))]
    result = pl.pallas_call(
        functools.partial(_kernel, problem=problem, part=part.without_data()),
        jax.ShapeDtypeStruct(out_shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(kv_heads // heads, used),
            in_specs=[
                table_spec(0), table_spec(1), tile_spec, hbm, *scales_spec, *[a_head] * len(per_head)
            ],
            out_specs=out_spec,
            scratch_shapes=[
                pltpu.VMEM((2, 2, part.rows, problem.step_pages, pages.block_size, part.width), pages.dtype),
                pltpu.VMEM((heads, rows, head_dim), q.dtype),
                pltpu.VMEM((heads, rows, head_dim), jnp.float32), state, state,
                pltpu.SMEM((2,), jnp.int32), pltpu.SemaphoreType.DMA((2,)),
                *scales_buffer,
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="paged_attention_tpu",
    )(used[None], tile_row, begin, end, token, tables, tables, queries, data, *page_scales, *per_head)  # fmt: skip

    # --- results in token order ----------------------------------------------------------------------------------
    if call.max_query_len == 1:
        return heads_of_tokens(result, row_of_token(starts, tokens), tile, q_per_kv)
    index = index_in_tiles(starts, tokens, tile)
    index = jnp.where(jnp.arange(tokens) < starts[-1], index, (used - 1) * tile)
    return jnp.take(jnp.moveaxis(result, 1, 2).reshape(tiles * tile, q_heads, head_dim), index, axis=0, mode="clip")


def _tile(q_per_kv: int) -> int:
    """Tokens of a tile, if rows may have several: a multiple of 8, so that swapping axes moves whole registers."""
    return max(8, TILE_ROWS // q_per_kv // 8 * 8)


@dataclasses.dataclass(frozen=True)
class _Problem(StaticParameters):
    """Static parameters of a call to this kernel."""

    tile: int        # tokens per tile
    scales: str | None  # of 8-bit pages: one per "token" and KV head (int8), or one per KV "head" (fp8)
    heads: int       # KV heads per program
    rows: int        # query rows of a tile per KV head, with padding
    step_pages: int  # pages per step of the loop over keys

    @property
    def step_keys(self) -> int:
        """Keys per step of the loop over keys."""
        return self.step_pages * self.block_size


def _in_hbm(x: Array, interpret: Any) -> Array:
    """x, which XLA must leave in HBM.

    Without this, XLA copies an array that fits into VMEM there before every call: 32 MiB of int8 pages' scales for
    8,192 blocks of 64 tokens and 8 KV heads.
    """
    return x if interpret else pltpu.with_memory_space_constraint(x, pltpu.HBM)


def _heads(kv_heads: int, rows: int, head_dim: int, pages: KVPages, dtype: Any) -> int:
    """KV heads per program: the largest divisor of kv_heads that fits. One head of 256 float32 numbers takes 3 MiB."""
    keys, wide = max(KEYS_PER_STEP, pages.block_size), round_up(head_dim, LANES)
    buffers = 2 * 2 * keys * wide * pages.dtype.itemsize
    if pages.dtype.itemsize == 1:  # keys and values in the queries' dtype
        buffers += 2 * keys * wide * dtype.itemsize
    queries_and_results = rows * wide * (5 * dtype.itemsize + 2 * 4)  # two of each in flight; axes swapped in float32
    state = rows * (wide + 4 * LANES) * 4  # output, maximum, sum, sink and slope
    scores = 3 * rows * keys * 4
    fitting = max(1, VMEM_BYTES // (buffers + queries_and_results + state + scores))
    return max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= fitting)


def _kernel(
    _used: Ref, _row: Ref, begin_ref: Ref, end_ref: Ref, _token: Ref, table_ref: Ref, next_table_ref: Ref,
    tile_ref: Ref, data_ref: Ref, *rest: Ref, problem: _Problem, part: PagePart,
) -> None:  # fmt: skip
    """One tile and `problem.heads` KV heads.

    begin_ref, end_ref: [tiles] position of the first query; number of keys that the last query sees, 0 = empty tile.
    tile_ref, out_ref:  queries and results: of one token [1, heads, rows, head_dim], of more [..., tile, q_heads of the
                        program, head_dim].
    buffer_ref:         [2, keys and values, part.rows, pages, block_size, part.width], which are the heads and their
                        numbers in another shape if pages are parts of larger ones; steps alternate between the halves.
    turn_ref:           [half of the tile's first step, 1 if the previous program has started to fetch it].
    rest:               scales of 8-bit pages (int8: those of all pages; fp8: [2, heads, 1, 1]), sinks, slopes, result,
                        scratch. For int8 the last is a buffer for scales: [2, keys and values, pages, KV heads,
                        block_size]. It has all KV heads, because a copy of some must begin at a multiple of 8.
    """
    scales_ref: Ref = None
    scales_buffer_ref: Ref = None
    if problem.scales is not None:
        scales_ref, rest = rest[0], rest[1:]
    if problem.scales == "token":
        scales_buffer_ref, rest = rest[-1], rest[:-1]
    head_refs, (out_ref, buffer_ref, q_ref, sum_ref, top_ref, total_ref, turn_ref, arrived) = rest[:-8], rest[-8:]
    head_block, tile = pl.program_id(0), pl.program_id(1)
    head_blocks, tiles = pl.num_programs(0), pl.num_programs(1)

    def span(tile: Array) -> tuple[Array, Array]:
        """Range of keys that a tile needs: from the window of its first query to its last query."""
        if problem.window is None:
            return jnp.int32(0), end_ref[tile]
        return jnp.maximum(begin_ref[tile] - problem.window + 1, 0), end_ref[tile]

    def each_page(step: Array, keys: tuple[Array, Array], act: Any) -> None:
        """Call act(page of the row, page of the step) for every page of the step with keys in this range."""
        first = jnp.maximum(step * problem.step_pages, keys[0] // problem.block_size)
        last = jnp.minimum((step + 1) * problem.step_pages, pl.cdiv(keys[1], problem.block_size))
        lax.fori_loop(first, last, lambda i, _: act(i, i - step * problem.step_pages), None)

    def fetch(table_ref: Ref, head_block: Array, step: Array, keys: tuple[Array, Array], half: Array) -> None:
        """Start the copies of a step's pages into one half of the buffer."""

        def start(page: Array, index: Array) -> None:
            block = table_ref[0, 0, page]
            page, row, column = part.place(block, head_block)
            source = data_ref.at[page, :, pl.ds(row * part.rows, part.rows)]
            if part.width < data_ref.shape[4]:
                source = source.at[..., pl.ds(pl.multiple_of(column * part.width, LANES), part.width)]
            pltpu.make_async_copy(source, buffer_ref.at[half, :, :, index], arrived.at[half]).start()
            if scales_buffer_ref is not None:
                target = scales_buffer_ref.at[half, :, index]
                pltpu.make_async_copy(scales_ref.at[block], target, arrived.at[half]).start()

        each_page(step, keys, start)

    def wait(step: Array, keys: tuple[Array, Array], half: Array) -> None:
        """Wait for the copies that `fetch` started."""

        def end(_: Array, index: Array) -> None:
            source = data_ref.at[0, :, pl.ds(0, part.rows), :, pl.ds(0, part.width)]  # only its size matters
            pltpu.make_async_copy(source, buffer_ref.at[half, :, :, index], arrived.at[half]).wait()
            if scales_buffer_ref is not None:
                target = scales_buffer_ref.at[half, :, index]
                pltpu.make_async_copy(scales_ref.at[0], target, arrived.at[half]).wait()

        each_page(step, keys, end)

    @pl.when((head_block == 0) & (tile == 0))
    def _first_program() -> None:
        turn_ref[0] = 0
        turn_ref[1] = 0

    low, end = keys = span(tile)
    first_step, last_step = low // problem.step_keys, pl.cdiv(end, problem.step_keys)
    last_tile = tile + 1 == tiles
    next_tile = jnp.where(last_tile, 0, tile + 1)
    next_head_block = jnp.where(last_tile, head_block + 1, head_block)
    next_keys = span(next_tile)
    next_needs = (next_head_block < head_blocks) & (next_keys[1] > 0)
    first_half = turn_ref[0]

    @pl.when((end > 0) & (turn_ref[1] == 0))
    def _not_fetched() -> None:
        fetch(table_ref, head_block, first_step, keys, first_half)

    def over_keys(step: Array, _: None) -> None:
        half = (first_half + step - first_step) & 1

        @pl.when(step + 1 < last_step)
        def _fetch_next_step() -> None:
            fetch(table_ref, head_block, step + 1, keys, 1 - half)

        @pl.when((step + 1 == last_step) & next_needs)
        def _fetch_next_tile() -> None:
            next_step = next_keys[0] // problem.step_keys
            fetch(next_table_ref, next_head_block, next_step, next_keys, 1 - half)

        wait(step, keys, half)
        scales = None
        if scales_buffer_ref is not None:
            key_scales, value_scales = scales_buffer_ref.at[half, 0], scales_buffer_ref.at[half, 1]
            scales = (
                _scales_of_step(problem, key_scales, head_block), _scales_of_step(problem, value_scales, head_block)
            )  # fmt: skip
        elif scales_ref is not None:
            scales = scales_ref[0], None  # the result takes the values' scale
        _attend(
            problem, step, begin_ref[tile], keys, q_ref, buffer_ref.at[half], scales, head_refs, sum_ref, top_ref,
            total_ref,
        )  # fmt: skip

    @pl.when(end > 0)
    def _tokens() -> None:
        if problem.tile == 1:
            q_ref[...] = tile_ref[0]
        else:  # rows of a KV head: its query heads, each with all tokens
            queries = jnp.swapaxes(tile_ref[0].astype(jnp.float32), 0, 1)
            q_ref[...] = queries.reshape(q_ref.shape).astype(q_ref.dtype)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        # a sink is an extra key whose value is 0
        top_ref[...] = head_refs[0][...] if problem.has_sinks else jnp.full_like(top_ref, MASKED)
        total_ref[...] = jnp.full_like(total_ref, 1.0 if problem.has_sinks else 0.0)
        lax.fori_loop(first_step, last_step, over_keys, None)
        result = sum_ref[...] / total_ref[...]
        if problem.scales == "head":
            result *= scales_ref[1]
        if problem.tile > 1:
            result = jnp.swapaxes(result.reshape(-1, problem.tile, result.shape[-1]), 0, 1)[None]
        out_ref[0] = result.astype(out_ref.dtype)
        turn_ref[0] = (first_half + last_step - first_step) & 1
        turn_ref[1] = next_needs.astype(jnp.int32)

    @pl.when(end == 0)
    def _empty() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)
        # the previous program fetched nothing for this tile, and this one fetches nothing for the next
        turn_ref[1] = 0


def _scales_of_step(problem: _Problem, scales_ref: Ref, head_block: Array) -> Array:
    """Scales of one step for the heads of a program, [heads, 1, keys]. scales_ref: [pages, KV heads, block_size]."""
    scales = jnp.concatenate([scales_ref[page].astype(jnp.float32) for page in range(problem.step_pages)], axis=1)
    own, *others = (scales[i : i + problem.heads] for i in range(0, scales.shape[0], problem.heads))
    for i, heads in enumerate(others):
        own = jnp.where(head_block == i + 1, heads, own)
    return own[:, None]


def _attend(
    problem: _Problem, step: Array, begin: Array, keys: tuple[Array, Array], q_ref: Ref, pages_ref: Ref,
    scales: tuple[Array, Array | None] | None, head_refs: tuple[Ref, ...], sum_ref: Ref, top_ref: Ref, total_ref: Ref,
) -> None:  # fmt: skip
    """Online softmax over the keys of one step. Updates the output, the maximum and the sum of the weights.

    scales: float32 factors of the keys and of the values, broadcast to [heads, rows, keys]; None: 1.
    """
    low, end = keys
    heads, size = problem.heads, problem.step_keys
    head_dim = q_ref.shape[-1]
    position = step * size

    # Pages that were not fetched, and slots after the row's end, may hold NaN, and 0 * NaN is NaN. In int8 pages, only
    # scales can be NaN.
    if pages_ref.dtype != INT8:

        @pl.when((position < low) | (position + size > end))
        def _clean() -> None:
            values, number, wide = pages_ref[1], pages_ref.dtype, jnp.float32
            if number == FP8:  # its bytes: 273 instructions for 256 keys of 8 heads on a v5e, instead of 1,247
                values, number, wide = lax.bitcast_convert_type(values, jnp.int8), INT8, jnp.int32
            values = values.astype(wide).reshape(values.shape[0], size, values.shape[-1])
            key_position = position + lax.broadcasted_iota(jnp.int32, values.shape, 1)
            values = jnp.where((key_position >= low) & (key_position < end), values, 0)
            values = values.reshape(pages_ref.shape[1:]).astype(number)
            pages_ref[1] = lax.bitcast_convert_type(values, FP8) if pages_ref.dtype == FP8 else values

    q = q_ref[...]
    key, value = (_in_heads(pages_ref[i], heads, size, head_dim).astype(q.dtype) for i in range(2))
    key_scale, value_scale = (None, None) if scales is None else scales
    scores = _product("hqd,hkd->hqk", q, key)
    scores *= problem.scale if key_scale is None else key_scale * problem.scale
    if problem.softcap is not None:
        scores = problem.softcap * jnp.tanh(scores / problem.softcap)
    line, column = (lax.broadcasted_iota(jnp.int32, (problem.rows, size), axis) for axis in range(2))
    # padding after the tile's last token counts as that token
    distance = jnp.minimum(begin + lax.rem(line, problem.tile), end - 1) - (position + column)
    if problem.has_slopes:
        scores -= head_refs[-1][...] * distance.astype(jnp.float32)[None]
    seen = distance >= 0
    if problem.window is not None:
        seen &= distance < problem.window
    # In steps before its window, a query sees no key and all its weights are 1. `shrink` is 0 in the first step with a
    # key that it sees, which removes them. Every query sees its own key.
    scores = jnp.where(seen[None], scores, MASKED)
    top = top_ref[...]
    new_top = jnp.maximum(top, scores.max(axis=2, keepdims=True))
    weights = jnp.exp(scores - new_top)
    shrink = jnp.exp(top - new_top)
    total_ref[...] = total_ref[...] * shrink + weights.sum(axis=2, keepdims=True)
    if value_scale is not None:
        key_position = position + lax.broadcasted_iota(jnp.int32, value_scale.shape, 2)
        weights *= jnp.where((key_position >= low) & (key_position < end), value_scale, 0.0)
    sum_ref[...] = sum_ref[...] * shrink + _product("hqk,hkd->hqd", weights.astype(q.dtype), value)
    top_ref[...] = new_top


def _in_heads(pages: Array, heads: int, size: int, head_dim: int) -> Array:
    """Keys or values of a step as [heads, size, head_dim], from [rows, pages, block_size, width].

    A head is a whole row, some columns of a row, or several rows.
    """
    rows, width = pages.shape[0], pages.shape[-1]
    pages = pages.reshape(rows, size, width)
    if width == head_dim:
        return pages
    if width > head_dim:
        pieces = [pages[:, :, i : i + head_dim] for i in range(0, width, head_dim)]
        return jnp.stack(pieces, axis=1).reshape(heads, size, head_dim)
    each = head_dim // width
    return jnp.stack([jnp.concatenate([pages[h * each + i] for i in range(each)], axis=-1) for h in range(heads)])


def _product(pattern: str, a: Array, b: Array) -> Array:
    """A batched matmul with float32 sums. float32 operands have full float32 precision, not bfloat16."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(pattern, a, b, precision=exact, preferred_element_type=jnp.float32)
