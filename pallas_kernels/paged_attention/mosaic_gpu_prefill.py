"""Prefill of paged_attention for Hopper in Pallas, lowered through Mosaic GPU (Shah et al. 2024).

It computes rows of several tokens. A block has three warp groups. The third copies keys and values, the first two
attend, from the last tile of keys to the first. In each step a warp group issues two matmuls together: QK of the
step's keys, and PV of the step before. It waits for QK, computes its softmax while the tensor cores compute PV, and
then waits for PV. The two warp groups issue in turns, so the matmuls of one are queued while the other one computes
its softmax.

    warp group 0   QK1 PV0 │ softmax 1 │ QK2 PV1   │ softmax 2 …
    warp group 1           │ QK1 PV0   │ softmax 1 │ QK2 PV1 …      at every │ the other warp group gets the turn
    warp group 2   keys and values of the next tiles, as soon as a slot is free

A warp group passes the turn when it has issued its matmuls, not when they have ended. Turns change the speed and not
the result, with one exception: `clear_values` relies on their order.

A *unit* is the work of one warp group: 64 query rows, which are 1, 2, 4 or 8 query heads of a KV head times 64, 32, 16
or 8 tokens. A block has two units with successive tokens. A row's last unit begins earlier instead of being partly
empty. Its first tokens are then computed twice, with the same bits.

Pages are copied by the tensor memory accelerator, one box for the keys of each KV block. A thread issues it with one
instruction, for 4 KiB of heads of 128. `cp.async` takes an instruction and an address register for every 16 bytes, 256
times as many. The box is also written in the swizzled order that the matmuls read.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_attention.call import AttentionCall, StaticParameters
from pallas_kernels.paged_attention.tiles import prompt_tiles
from pallas_kernels.platforms import is_interpreted, nvidia_capability

Ref = Any  # an array inside a kernel, addressed by `.at`
MASKED = -1e30  # finite: -inf - -inf would be NaN
LOG2E = math.log2(math.e)
UNIT_ROWS = 64  # query rows of a warp group, and of a matmul
SHARED_BYTES = 224 * 1024  # of the 227 KiB that a block may have
REGISTERS, COPY_REGISTERS = 232, 40  # per thread that attends, and that copies: (2 * 232 + 40) * 128 fit


@dataclasses.dataclass(frozen=True)
class _Problem(StaticParameters):
    """Static parameters of a call to this kernel."""

    itemsize: int
    interpreted: bool

    @property
    def heads(self) -> int:
        """Query heads of a unit: they share a KV head."""
        return math.gcd(self.q_per_kv, 8)

    @property
    def tokens(self) -> int:
        """Tokens of a unit. A multiple of 8, the height of a swizzled piece of shared memory."""
        return UNIT_ROWS // self.heads

    @property
    def keys(self) -> int:
        return tile_keys(self.head_dim)

    @property
    def piece(self) -> int:
        """Keys of one copy."""
        return min(self.block_size, self.keys)

    @property
    def pieces(self) -> int:
        """Copies of a tile of keys, or of values."""
        return self.keys // self.piece

    @property
    def stages(self) -> int:
        """Tiles of keys and values in shared memory, at most 4."""
        queries = 2 * UNIT_ROWS * self.head_dim * self.itemsize
        tile = 2 * self.keys * self.head_dim * self.itemsize
        return min(4, (SHARED_BYTES - queries) // tile)

    def barrier(self, which: Any, slot: Array) -> Array:
        """Index of the barrier of a slot for keys (which=0) or values (which=1)."""
        return which * self.stages + slot

    @property
    def unit(self) -> float:
        """Factor from scores to exponents of two. In the plain case it is part of a multiply-add."""
        plain = self.softcap is None and not self.has_slopes and self.scale > 0
        return self.scale * LOG2E if plain else 1.0


def tile_keys(head_dim: int) -> int:
    """Keys of a tile. With heads of 256, the output takes 128 registers and the scores 32."""
    return 128 if head_dim <= 128 else 64


class _Given(NamedTuple):
    """References to the arrays of a call."""

    tile_row: Ref    # int32[tiles]: row of a tile; -1: no work
    tile_first: Ref  # int32[tiles]: first token of a tile, counted within the row
    tables: Ref
    lens: Ref
    starts: Ref
    sinks: Ref       # float32[head_blocks, 64], one number for each query row of a unit; slopes likewise
    slopes: Ref
    q: Ref
    data: Ref


class _Shared(NamedTuple):
    """References to a block's shared memory."""

    queries: Ref   # [2, 64, head_dim], and later the outputs
    boxes: Ref     # [2, 8, head_dim / 64, 8, 64]: the same bytes, as copies of 8 tokens see them
    outputs: Ref   # the same bytes, not swizzled: for units with tokens that are not stored
    tiles: Ref     # [2, stages, keys, head_dim]: keys, and values
    weights: Ref   # [2, 64, keys]; only for the interpreter
    queries_here: Ref
    here: Ref      # barriers of the tiles, see `barrier`
    free: Ref
    turn: Ref      # [2]: the matmuls of this unit come next


@dataclasses.dataclass(frozen=True)
class _Span:
    """The keys of a block's two units. Both units go through the same tiles, from the last tile to the first."""

    row: Array
    tile_first: Array    # the block's first token, counted within the row
    begin: Array         # keys [begin, end) are seen by some query
    end: Array
    last_tile: Array     # step i computes tile last_tile - i
    steps: Array
    inside_begin: Array  # in steps [inside_begin, inside_end), every query sees every key
    inside_end: Array
    token: Array         # of q: the row's first token
    count: Array         # tokens of the row
    length: Array


def refuse(device: Any, q: Any, pages: KVPages) -> str | None:
    """Reason why the kernel cannot take a call on a jax Device; None if it can."""
    if jax.__version_info__ < (0, 11):
        return f"its prefill needs JAX 0.11 or newer, this is {jax.__version__}"
    if device.platform != "cpu" and (nvidia_capability(device) or (0, 0))[0] != 9:
        return f"it is for NVIDIA's Hopper (compute capability 9), not for {device.device_kind}"
    if q.dtype != pages.dtype or q.dtype not in (jnp.bfloat16, jnp.float16) or pages.v_dim is not None:
        return f"q {q.dtype}, pages {pages.dtype}: must both be bfloat16, or both float16"
    if pages.head_dim not in (64, 128, 256):
        return f"head_dim={pages.head_dim}: must be 64, 128 or 256"
    keys = tile_keys(pages.head_dim)
    if pages.block_size % 8 or (keys % pages.block_size and pages.block_size % keys):
        return f"block_size={pages.block_size}: must be 8, 16, 32, 64, or a multiple of {keys}"
    return None


def prefill(call: AttentionCall) -> Float[Array, "tokens q_heads head_dim"]:
    """The output of rows of more than one token. Outputs of other rows are undefined."""
    q, pages, starts = call.q, call.pages, call.query_start_loc
    tokens, q_heads, head_dim = q.shape
    problem = _Problem.of(call, itemsize=q.dtype.itemsize, interpreted=is_interpreted())
    # a unit reads `problem.tokens` tokens, even where the call has fewer
    q = jnp.pad(q, ((0, max(0, problem.tokens - tokens)), (0, 0), (0, 0)))
    tile_row, tile_first = prompt_tiles(starts, tokens, 2 * problem.tokens)
    counts = starts[1:] - starts[:-1]
    # skip tiles without a row, and rows of one token, which the decode kernel computes
    skipped = (tile_row < 0) | (jnp.take(counts, tile_row, mode="clip") < 2)
    tile_row = jnp.where(skipped, -1, tile_row).astype(jnp.int32)

    def of_rows(a_head: Array | None) -> Array:
        """[head_blocks, 64]: for each query row of a unit, the value of its head in `a_head`."""
        given = jnp.zeros(q_heads, jnp.float32) if a_head is None else a_head.astype(jnp.float32)
        return jnp.repeat(given.reshape(-1, problem.heads), problem.tokens, axis=1)

    swizzle = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    rows = plgpu.SMEM((2, UNIT_ROWS, head_dim), q.dtype, transforms=swizzle)
    boxes = plgpu.SMEM((2, UNIT_ROWS // 8, head_dim // 64, 8, 64), q.dtype, transforms=swizzle[1:])
    tiles = plgpu.SMEM((2, problem.stages, problem.keys, head_dim), q.dtype, transforms=swizzle)
    weights = plgpu.SMEM((2, UNIT_ROWS, problem.keys), q.dtype, transforms=swizzle)
    here = plgpu.Barrier(num_arrivals=problem.pieces, num_barriers=2 * problem.stages)
    free = plgpu.Barrier(num_arrivals=2, num_barriers=2 * problem.stages)
    out = plgpu.kernel(
        functools.partial(_kernel, problem=problem),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        # heads vary fastest, so that blocks of one tile, of equal length, run at the same time
        grid=(tile_row.shape[0], q_heads // problem.heads),
        grid_names=("tile", "heads"),
        num_threads=3,
        thread_name="warp_group",
        scratch_types=(
            plgpu.RefUnion(rows, boxes, plgpu.SMEM((2, UNIT_ROWS, head_dim), q.dtype)),
            tiles,
            *((weights,) if problem.interpreted else ()),
            plgpu.Barrier(num_arrivals=UNIT_ROWS // 8 * head_dim // 64, num_barriers=2),
            here,
            free,
            plgpu.Barrier(num_arrivals=1, num_barriers=2),
        ),
        # Automatic barriers cost registers, which are then spilled. They protect memory that one warp group reads and
        # writes: the values in `_clear_values`, where each warp touches its own rows only.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="paged_prefill_mosaic",
    )(
        tile_row, tile_first, call.block_tables, call.context_lens, starts, of_rows(call.sinks),
        of_rows(call.alibi_slopes), q, pages.data,
    )  # fmt: skip
    return out[:tokens]


def _kernel(*refs: Ref, problem: _Problem) -> None:
    """One tile of a row's tokens and the query heads of one head block."""
    num_given = len(_Given._fields)
    given, out_ref = _Given(*refs[:num_given]), refs[num_given]
    (queries, boxes, outputs), tiles, *rest = refs[num_given + 1 :]
    weights, barriers = (rest[0], rest[1:]) if problem.interpreted else (None, rest)
    shared = _Shared(queries, boxes, outputs, tiles, weights, *barriers)
    warp_group = lax.axis_index("warp_group")

    # Each warp group reads its tile here: values from before `set_max_registers` are spilled.
    def work(*, attends: bool) -> None:
        tile = given.tile_row.shape[0] - 1 - lax.axis_index("tile")  # a row's last tiles see most keys: they go first
        row = given.tile_row[tile]

        @pl.when(row >= 0)
        def _work() -> None:
            span = _span(problem, given, row, given.tile_first[tile])
            if attends:
                _attend(problem, given, shared, out_ref, span, warp_group)
            else:
                _copy_pages(problem, given, shared, span)

    @pl.when(warp_group < 2)
    def _attending() -> None:
        plgpu.set_max_registers(REGISTERS, action="increase")
        work(attends=True)

    @pl.when(warp_group == 2)
    def _copying() -> None:
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        work(attends=False)


def _span(problem: _Problem, given: _Given, row: Array, tile_first: Array) -> _Span:
    token, length = given.starts[row], given.lens[row]
    count = given.starts[row + 1] - token
    latest = jnp.maximum(count - problem.tokens, 0)
    low, high = (length - count + jnp.minimum(tile_first + i * problem.tokens, latest) for i in (0, 1))
    end = jnp.minimum(high + problem.tokens, length)
    begin = jnp.int32(0)
    after = _divide_up(end, problem.keys)  # the tile after the last one
    steps = after
    # The last tile always has an edge: a row has two tokens or more, so its first query does not see its last key.
    inside_begin = jnp.maximum(after - lax.div(low + 1, problem.keys), 1)
    inside_end = steps
    if problem.window is not None:
        begin = jnp.maximum(low - problem.window + 1, 0)
        steps = after - lax.div(begin, problem.keys)
        # before this tile, some query's window has not begun
        inside_end = after - jnp.minimum(_divide_up(jnp.maximum(end - problem.window, 0), problem.keys), after)
        inside_end = jnp.maximum(inside_end, 1)
        inside_begin = jnp.minimum(inside_begin, inside_end)
    return _Span(row, tile_first, begin, end, after - 1, steps, inside_begin, inside_end, token, count, length)


def _copy_pages(problem: _Problem, given: _Given, shared: _Shared, span: _Span) -> None:
    """Copy the tiles of keys and values. A copy waits until both units have used the tile before it in its slot.

    Warp 0 copies keys, and warp 1 values. With several pieces, warps 2 and 3 copy half of them. Each warp issues on
    another of the multiprocessor's four schedulers, so none has much more to issue than the others.
    """
    head = lax.div(lax.axis_index("heads") * problem.heads, problem.q_per_kv)
    first_block, last_block = (lax.div(position, problem.block_size) for position in (span.begin, span.end - 1))
    copiers = min(problem.pieces, 2)

    def copy_all(warp: Array) -> None:
        which, part = lax.rem(warp, 2), lax.div(warp, 2)
        starts = [(part * (problem.pieces // copiers) + i) * problem.piece for i in range(problem.pieces // copiers)]

        def pages_of(tile: Array) -> tuple[Array, ...]:
            """The page of each piece. A piece that no query sees reads another page, and is masked."""
            blocks = (lax.div(tile * problem.keys + start, problem.block_size) for start in starts)
            return tuple(given.tables[span.row, jnp.clip(block, first_block, last_block)] for block in blocks)

        def copy(step: Array, pages: tuple[Array, ...]) -> tuple[Array, ...]:
            tile = span.last_tile - step
            following = pages_of(jnp.maximum(tile - 1, 0))  # loaded while waiting
            slot = lax.rem(step, problem.stages)
            barrier = problem.barrier(which, slot)
            offset = lax.rem(tile * problem.keys, problem.block_size)  # of blocks larger than a tile; else 0
            pl.when(step >= problem.stages)(functools.partial(plgpu.barrier_wait, shared.free.at[barrier]))
            for start, page in zip(starts, pages, strict=True):
                plgpu.copy_gmem_to_smem(
                    given.data.at[page, which, head, pl.ds(offset, problem.piece)],
                    shared.tiles.at[which, slot, pl.ds(start, problem.piece)],
                    shared.here.at[barrier],
                )
            return following

        lax.fori_loop(0, span.steps, copy, pages_of(span.last_tile))
        if problem.interpreted:  # it demands that a warp sees every phase of a barrier

            def drain(step: Array, _: None) -> None:
                plgpu.barrier_wait(shared.free.at[problem.barrier(which, lax.rem(step, problem.stages))])

            lax.fori_loop(jnp.maximum(span.steps - problem.stages, 0), span.steps, drain, None)

    plgpu.warp_map(lambda warp: pl.when(warp < 2 * copiers)(functools.partial(copy_all, warp)))


def _attend(
    problem: _Problem, given: _Given, shared: _Shared, out_ref: Ref, span: _Span, warp_group: Array
) -> None:
    """Compute one unit."""
    head_block = lax.axis_index("heads")
    tokens = problem.tokens
    # a row's last unit ends with the row
    first = jnp.minimum(span.tile_first + warp_group * tokens, jnp.maximum(span.count - tokens, 0))
    # a unit must not end after q, so at its end the unit of a short row begins before the row
    index = jnp.minimum(span.token + first, given.q.shape[0] - tokens)
    queries = shared.queries.at[warp_group]
    for box, part in _boxes(problem, shared, given.q, index, warp_group):
        plgpu.copy_gmem_to_smem(part, box, shared.queries_here.at[warp_group])
    # position of each query: row r is token r % tokens of head r // tokens
    token = plgpu.broadcasted_iota(jnp.int32, (UNIT_ROWS,), 0, layout=_ROWS) & (tokens - 1)
    query = lax.optimization_barrier(span.length - span.count + index - span.token + token)
    slope = None
    if problem.has_slopes:  # JAX 0.10, which the type checker sees, has another signature
        slope = plgpu.load(given.slopes.at[head_block], layout=_ROWS, optimized=False)  # ty: ignore[missing-argument]
    # the second unit gives the first turn to the first unit
    pl.when(warp_group == 1)(functools.partial(plgpu.barrier_arrive, shared.turn.at[0]))
    plgpu.barrier_wait(shared.queries_here.at[warp_group])

    def multiply_keys(scores: Ref, slot: Array) -> None:
        plgpu.wgmma(scores, queries, shared.tiles.at[0, slot].transpose((1, 0)))

    def multiply_values(sums: Ref, weights: Array, slot: Array) -> None:
        """Add weights @ values. Weights stay in registers; the interpreter supports only shared memory."""
        if problem.interpreted:
            rows = shared.weights.at[warp_group]
            rows[...] = weights
            plgpu.commit_smem()
        plgpu.wgmma(sums, rows if problem.interpreted else weights, shared.tiles.at[1, slot])

    def pass_turn() -> None:
        plgpu.barrier_arrive(shared.turn.at[1 - warp_group])

    def attention_of(step: Array, scores: Array, top: Array, total: Array, *, at_edge: bool) -> tuple[Array, ...]:
        """Weights of a step's keys, the largest score and the sum of the weights so far, factor of earlier weights."""
        scores = _changed(problem, scores)
        position = (span.last_tile - step) * problem.keys + _iota(scores.shape, 1)
        if slope is not None:
            distance = (_across(query, scores) - position).astype(jnp.float32)
            scores -= _across(slope * LOG2E, scores) * distance
        if at_edge:
            seen = position <= _across(query, scores)
            if problem.window is not None:
                seen &= position > _across(query - problem.window, scores)
            scores = jnp.where(seen, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(axis=1))
        # a query that has seen no key yet must not count hidden ones: 2 ** (MASKED - MASKED) is 1
        base = jnp.where(new_top == MASKED, 0.0, new_top) if at_edge else new_top
        weights = jnp.exp2(scores * problem.unit - _across(base * problem.unit, scores))
        shrink = jnp.exp2((top - base) * problem.unit)
        return weights, new_top, total * shrink + weights.sum(axis=1), shrink

    def clear_values(step: Array, needed: Array | bool) -> None:
        """Clear the values of a step that no query sees: after the last key, or before a window.

        The first unit clears, and then takes its turn. The second one has its turn later, and sees the zeros.
        """
        tile = span.last_tile - step
        values = shared.tiles.at[1, lax.rem(step, problem.stages)]
        hidden = (tile * problem.keys < span.begin) | (tile * problem.keys + problem.keys > span.end)
        pl.when((warp_group == 0) & needed & hidden)(functools.partial(_clear_values, problem, values, span, tile))

    def begin(scores: Ref) -> tuple[Array, ...]:
        """The first step. It has no earlier weights."""
        plgpu.barrier_wait(shared.here.at[problem.barrier(0, 0)])
        multiply_keys(scores, 0)
        found = scores[...]
        plgpu.barrier_arrive(shared.free.at[problem.barrier(0, 0)])
        top = plgpu.layout_cast(jnp.full((UNIT_ROWS,), MASKED, jnp.float32), _ROWS)
        weights, top, total, _ = attention_of(jnp.int32(0), found, top, jnp.zeros_like(top), at_edge=True)
        return top, total, weights.astype(given.q.dtype)

    def continue_(step: Array, carry: _Carry, *, at_edge: bool) -> _Carry:
        out, top, total, narrow = carry
        slot, earlier = lax.rem(step, problem.stages), lax.rem(step - 1, problem.stages)

        def multiply(scores: Ref, sums: Ref) -> _Carry:
            # Both matmuls are issued together: the tensor cores compute the second one during the softmax.
            if not problem.interpreted:
                sums[...] = out
            multiply_keys(scores, slot)
            multiply_values(sums, narrow, earlier)
            pass_turn()
            found = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            plgpu.barrier_arrive(shared.free.at[problem.barrier(0, slot)])
            weights, new_top, new_total, shrink = attention_of(step, found, top, total, at_edge=at_edge)
            weights, new_top, new_total, shrink = lax.optimization_barrier((weights, new_top, new_total, shrink))
            # The assembler would move the wait for the sums up, before the softmax, but not across this loop.
            plgpu.barrier_wait(shared.here.at[problem.barrier(1, slot)])
            product = sums[...]
            plgpu.barrier_arrive(shared.free.at[problem.barrier(1, earlier)])
            if problem.interpreted:  # it has no initial sums
                product += out
            # Weights are narrowed after the wait: ptxas serialises matmuls when registers that a later one reads are
            # written while one is in flight (its note C7513).
            return product * _across(shrink, product), new_top, new_total, weights.astype(given.q.dtype)

        plgpu.barrier_wait(shared.here.at[problem.barrier(0, slot)])
        plgpu.barrier_wait(shared.turn.at[warp_group])
        return pl.run_scoped(
            multiply, plgpu.ACC((UNIT_ROWS, problem.keys), jnp.float32),
            plgpu.ACC((UNIT_ROWS, problem.head_dim), jnp.float32),
        )  # fmt: skip

    def end(sums: Ref) -> Array:
        """The second matmul of the last step."""
        out, _, _, narrow = carry
        if not problem.interpreted:
            sums[...] = out
        slot = lax.rem(span.steps - 1, problem.stages)
        multiply_values(sums, narrow, slot)
        pl.when(warp_group == 0)(pass_turn)
        product = sums[...]
        plgpu.barrier_arrive(shared.free.at[problem.barrier(1, slot)])
        return product + out if problem.interpreted else product

    top, total, narrow = pl.run_scoped(begin, plgpu.ACC((UNIT_ROWS, problem.keys), jnp.float32))
    plgpu.barrier_wait(shared.here.at[problem.barrier(1, 0)])
    clear_values(jnp.int32(0), True)
    out = plgpu.layout_cast(jnp.zeros((UNIT_ROWS, problem.head_dim), jnp.float32), plgpu.Layout.WGMMA)
    at_edge, inside = (functools.partial(continue_, at_edge=edge) for edge in (True, False))
    carry = lax.fori_loop(1, span.inside_begin, at_edge, (out, top, total, narrow))
    carry = lax.fori_loop(span.inside_begin, span.inside_end, inside, carry)
    if problem.window is not None:
        carry = lax.fori_loop(span.inside_end, span.steps, at_edge, carry)
        clear_values(span.steps - 1, span.steps > 1)
    _, top, total, _ = carry
    plgpu.barrier_wait(shared.turn.at[warp_group])
    out = pl.run_scoped(end, plgpu.ACC((UNIT_ROWS, problem.head_dim), jnp.float32))
    if problem.has_sinks:
        sink = plgpu.load(given.sinks.at[head_block], layout=_ROWS, optimized=False)  # ty: ignore[missing-argument]
        total += jnp.exp2(sink * LOG2E - top * problem.unit)
    out = (out / _across(total, out)).astype(given.q.dtype)
    _store(problem, shared, out_ref, out, index, span, warp_group)


# Output [64, head_dim] without the last step's values, largest score [64], sum of the weights [64], all float32; the
# last step's weights [64, keys] in q's dtype. Weights are 2 ** (unit * (score - largest score)).
_Carry = tuple[Array, Array, Array, Array]
_ROWS = plgpu.Layout.WGMMA.reduce(1)  # layout of one number per query row


def _changed(problem: _Problem, scores: Array) -> Array:
    """Scores in units of `problem.unit`: scaled, and with the soft cap."""
    if problem.softcap is not None:
        # tanh by the exact identity: the GPU's approximation of tanh has 11 bits
        power = jnp.exp2(scores * (2 * LOG2E * problem.scale / problem.softcap))
        # a division would be 5 instructions. 1 + power is at least 1, and may be infinite: then the root is 0
        root = lax.rsqrt(1.0 + power)
        return problem.softcap * LOG2E - (2 * problem.softcap * LOG2E) * (root * root)
    factor = problem.scale * LOG2E / problem.unit
    return scores if factor == 1.0 else scores * factor


def _clear_values(problem: _Problem, values: Ref, span: _Span, tile: Array) -> None:
    """Zeros for values that no query sees: they may be NaN, and 0 * NaN is NaN."""
    for begin in range(0, problem.keys, 64):
        part = values.at[pl.ds(begin, 64)]
        position = tile * problem.keys + begin + _iota((64, problem.head_dim), 0)
        seen = (position >= span.begin) & (position < span.end)
        part[...] = jnp.where(seen, part[...].astype(jnp.float32), 0.0).astype(values.dtype)
    plgpu.commit_smem()


def _store(
    problem: _Problem, shared: _Shared, out_ref: Ref, out: Array, index: Array, span: _Span, warp_group: Array
) -> None:
    """Store the unit's tokens that belong to the row. index: the unit's first token in q."""
    heads, tokens = problem.heads, problem.tokens
    head = lax.axis_index("heads") * heads
    begin, end = (jnp.clip(token - index, 0, tokens) for token in (span.token, span.token + span.count))
    whole = end - begin == tokens

    @pl.when(whole)
    def _store_unit() -> None:
        rows = shared.queries.at[warp_group]
        rows[...] = out
        plgpu.commit_smem()
        for box, part in _boxes(problem, shared, out_ref, index, warp_group):
            plgpu.copy_smem_to_gmem(box, part)

    @pl.when(~whole)
    def _store_tokens() -> None:
        rows = shared.outputs.at[warp_group]
        if problem.interpreted or jax.__version_info__ < (0, 12):
            rows[...] = out
        else:  # without a swizzle, banks of shared memory conflict: JAX 0.12 wants that said
            plgpu.store(rows, out, optimized=False)  # ty: ignore[missing-attribute]
        plgpu.commit_smem()

        def store(token: Array, _: None) -> None:
            for i in range(heads):
                plgpu.copy_smem_to_gmem(rows.at[i * tokens + token], out_ref.at[index + token, head + i])

        lax.fori_loop(begin, end, store, None)

    plgpu.wait_smem_to_gmem(0)


def _boxes(
    problem: _Problem, shared: _Shared, array: Ref, index: Array, warp_group: Array
) -> Iterator[tuple[Ref, Ref]]:
    """The pieces of a unit in shared memory, each with its 8 tokens and 64 columns of `array`: q or the output.

    A copy to or from *tiled* shared memory tiles the whole array too: token i is token i % 8 of tile i // 8. A box that
    begins inside a tile ends with the tile, but units begin at any token. A box of one piece needs no tiles. The
    interpreter supports neither tiles nor two views of memory.
    """
    head = lax.axis_index("heads") * problem.heads
    for row in range(0, UNIT_ROWS, 8):
        i, token = divmod(row, problem.tokens)
        for column in range(0, problem.head_dim, 64):
            if problem.interpreted:
                box = shared.queries.at[warp_group, pl.ds(row, 8), pl.ds(column, 64)]
            else:
                box = shared.boxes.at[warp_group, row // 8, column // 64]
            yield box, array.at[pl.ds(index + token, 8), head + i, pl.ds(column, 64)]


def _iota(shape: tuple[int, ...], dimension: int) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)


def _across(x: Array, of: Array) -> Array:
    """A number per query row, in the shape of `of`."""
    return lax.broadcast_in_dim(x, of.shape, [0])


def _divide_up(x: Array, n: int) -> Array:
    """The smallest whole number that is at least x / n, for x >= 0."""
    return lax.div(x + (n - 1), n)
