"""Decode of paged_attention for Hopper in Pallas, lowered through Mosaic GPU: rows of one token.

1. `_decode_kernel`, grid (splits, KV heads, rows): a block of 128 threads attends with the query heads of one KV head
   over one split of a row's keys. All rows have splits of one length, chosen for the longest row. It copies tiles of
   TILE_KEYS keys to shared memory with the tensor memory accelerator, STAGES tiles ahead, and writes its output and the
   logarithm of its sum.
2. `_merge`, in XLA operations, combines a row's splits and adds the sinks.

A matmul takes 64 query rows, and q_per_kv is smaller. The other rows compute garbage, which stays in those rows. With
64 rows, each byte of keys or values costs 64 operations. An H200 does 200 while it fetches a byte (data sheet). The
weights go through shared memory, because the interpreter of the tests cannot multiply from registers.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_attention.call import AttentionCall, StaticParameters
from pallas_kernels.paged_attention.tiling import Tiling
from pallas_kernels.platforms import nvidia_capability

Ref = Any  # an array inside a kernel, addressed by `.at`
MASKED = -1e30  # finite: -inf - -inf would be NaN
PRODUCT_ROWS = 64  # query rows of a matmul
TILE_KEYS = 64  # keys of a tile
STAGES = 2  # tiles in shared memory: 90 KiB in all with head_dim 128, so two blocks fit on a multiprocessor


def decode(call: AttentionCall, *, tiling: Tiling | None = None) -> Float[Array, "rows q_heads head_dim"]:
    """float32 output of rows of one token. Outputs of other rows are undefined.

    tiling: only its split sizes are used; None: chosen by device and shape.
    """
    if call.alibi_slopes is not None and jax.__version_info__ < (0, 11):
        raise ValueError("alibi_slopes: the decode through Mosaic GPU needs JAX 0.11 for them, 'triton' does not")
    _, q_heads, head_dim = call.q.shape
    rows, kv_heads, q_per_kv = call.context_lens.shape[0], call.pages.num_kv_heads, call.q_per_kv
    tiling = tiling or Tiling.choose(call.q, call.pages)
    split_keys = max([tiling.min_split_keys, *tiling.longer_splits(call.table_keys, kv_heads)])
    splits = -(-call.table_keys // split_keys)
    problem = _Problem.of(call, lanes=-(-q_per_kv // 8) * 8, split_keys=split_keys, splits=splits)
    # query heads of a KV head, padded to a multiple of 8 rows, the unit of tiles in shared memory
    q = jnp.take(call.q, call.query_start_loc[:-1], axis=0, mode="clip")
    lanes = jnp.pad(
        q.reshape(rows, kv_heads, q_per_kv, head_dim), ((0, 0), (0, 0), (0, problem.lanes - q_per_kv), (0, 0))
    )
    slopes = jnp.zeros((kv_heads, q_per_kv)) if call.alibi_slopes is None else call.alibi_slopes
    slopes = slopes.astype(jnp.float32).reshape(kv_heads, q_per_kv)
    slopes = jnp.pad(slopes, ((0, 0), (0, PRODUCT_ROWS - q_per_kv)))
    parts, lse = _decode(problem, lanes, call, slopes)
    parts = parts[:, :, :, :q_per_kv].reshape(problem.splits, rows, q_heads, head_dim)
    lse = lse[:, :, :, :q_per_kv].reshape(problem.splits, rows, q_heads)
    return _merge(problem, parts, lse, call.context_lens, call.sinks)


@dataclasses.dataclass(frozen=True)
class _Problem(StaticParameters):
    """Static parameters of a call to this kernel."""

    lanes: int       # query heads of a KV head, padded to a multiple of 8
    split_keys: int
    splits: int


def refuse(device: Any, q: Any, pages: KVPages) -> str | None:
    """Reason why the kernel cannot take a call on a jax Device; None if it can."""
    q_per_kv = q.shape[1] // pages.num_kv_heads
    if device.platform != "cpu" and (nvidia_capability(device) or (0, 0))[0] != 9:
        return f"it is for NVIDIA's Hopper (compute capability 9), not for {device.device_kind}"
    if q.dtype != pages.dtype or q.dtype not in (jnp.bfloat16, jnp.float16) or pages.v_dim is not None:
        return f"q {q.dtype}, pages {pages.dtype}: must both be bfloat16, or both float16"
    if pages.head_dim not in (64, 128):
        return f"head_dim={pages.head_dim}: must be 64 or 128"
    if pages.block_size % 8 or (TILE_KEYS % pages.block_size and pages.block_size % TILE_KEYS):
        return f"block_size={pages.block_size}: must be 8, 16, 32, or a multiple of {TILE_KEYS}"
    if q_per_kv > PRODUCT_ROWS:
        return f"{q_per_kv} query heads per KV head: must be at most {PRODUCT_ROWS}"
    return None


def _decode_kernel(
    tables_ref: Ref, lens_ref: Ref, starts_ref: Ref, slopes_ref: Ref, q_ref: Ref, data_ref: Ref,
    out_ref: Ref, lse_ref: Ref, q_smem: Ref, keys_or_out: Ref, v_smem: Ref, weights_smem: Ref, lse_smem: Ref,
    q_barrier: Ref, k_barriers: Ref, v_barriers: Ref, *, problem: _Problem,
) -> None:  # fmt: skip
    """One row, one KV head, one split."""
    row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    length = lens_ref[row]
    is_decode = starts_ref[row + 1] - starts_ref[row] == 1
    begin = split * problem.split_keys
    end = jnp.minimum(begin + problem.split_keys, length)
    if problem.window is not None:
        begin = jnp.maximum(begin, length - problem.window)
    piece = min(problem.block_size, TILE_KEYS)
    k_smem, out_smem = keys_or_out  # the output reuses the memory of the keys

    def attend() -> None:
        first_tile, last_tile = lax.div(begin, TILE_KEYS), lax.div(end + TILE_KEYS - 1, TILE_KEYS)
        first_block, last_block = (lax.div(position, problem.block_size) for position in (begin, end - 1))

        def fetch(tile: Array) -> None:
            slot = lax.rem(tile - first_tile, STAGES)
            for i in range(TILE_KEYS // piece):
                position = tile * TILE_KEYS + i * piece
                # a tile may extend beyond the split: read a block of the split instead, and mask its scores
                block = jnp.clip(lax.div(position, problem.block_size), first_block, last_block)
                page = data_ref.at[tables_ref[row, block]]
                for which, smem, barriers in ((0, k_smem, k_barriers), (1, v_smem, v_barriers)):
                    plgpu.copy_gmem_to_smem(
                        page.at[which, head, pl.ds(lax.rem(position, problem.block_size), piece)],
                        smem.at[slot, pl.ds(i * piece, piece)],
                        barriers.at[slot],
                    )

        plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_smem.at[pl.ds(0, problem.lanes)], q_barrier)
        for i in range(STAGES):
            pl.when(first_tile + i < last_tile)(functools.partial(fetch, first_tile + i))
        plgpu.barrier_wait(q_barrier)
        slope = None
        if problem.has_slopes:  # JAX 0.10, which the type checker sees, has another signature
            slope = plgpu.load(slopes_ref.at[head], layout=_ROWS, optimized=False)  # ty: ignore[missing-argument]

        def next_tile(tile: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            out, top, total = carry
            slot = lax.rem(tile - first_tile, STAGES)
            plgpu.barrier_wait(k_barriers.at[slot])
            scores = _product(q_smem, k_smem.at[slot].transpose((1, 0)), TILE_KEYS) * problem.scale
            if problem.softcap is not None:
                scores = problem.softcap * jnp.tanh(scores / problem.softcap)
            position = tile * TILE_KEYS + _iota((PRODUCT_ROWS, TILE_KEYS), 1)
            if slope is not None:
                distance = (length - 1 - position).astype(jnp.float32)
                scores -= lax.broadcast_in_dim(slope, scores.shape, [0]) * distance
            seen = (position >= begin) & (position < end)
            scores = jnp.where(seen, scores, MASKED)
            new_top = jnp.maximum(top, scores.max(axis=1))
            weights = jnp.where(seen, jnp.exp(scores - lax.broadcast_in_dim(new_top, scores.shape, [0])), 0.0)
            shrink = jnp.exp(top - new_top)
            weights_smem[...] = weights.astype(weights_smem.dtype)
            plgpu.barrier_wait(v_barriers.at[slot])

            @pl.when((tile * TILE_KEYS < begin) | (tile * TILE_KEYS + TILE_KEYS > end))
            def _clear_values() -> None:
                # a value that no query sees may be NaN, and 0 * NaN is NaN
                values = v_smem[slot]
                position = tile * TILE_KEYS + _iota((TILE_KEYS, problem.head_dim), 0)
                seen = (position >= begin) & (position < end)
                v_smem[slot] = jnp.where(seen, values.astype(jnp.float32), 0.0).astype(v_smem.dtype)

            plgpu.commit_smem()
            more = _product(weights_smem, v_smem.at[slot], problem.head_dim)
            pl.when(tile + STAGES < last_tile)(functools.partial(fetch, tile + STAGES))
            out = out * lax.broadcast_in_dim(shrink, out.shape, [0]) + more
            return out, new_top, total * shrink + weights.sum(axis=1)

        start = (
            plgpu.layout_cast(jnp.zeros((PRODUCT_ROWS, problem.head_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((PRODUCT_ROWS,), MASKED, jnp.float32), _ROWS),
            plgpu.layout_cast(jnp.zeros((PRODUCT_ROWS,), jnp.float32), _ROWS),
        )
        out, top, total = lax.fori_loop(first_tile, last_tile, next_tile, start)
        out_smem[...] = out / lax.broadcast_in_dim(total, out.shape, [0])
        lse_smem[...] = top + jnp.log(total)
        plgpu.commit_smem()
        lanes = pl.ds(0, problem.lanes)
        plgpu.copy_smem_to_gmem(out_smem.at[lanes], out_ref.at[split, row, head])
        plgpu.copy_smem_to_gmem(lse_smem.at[lanes], lse_ref.at[split, row, head])
        plgpu.wait_smem_to_gmem(0)

    # a split after the row's end, or before its window, has no keys, and the merge does not read it
    pl.when(is_decode & (begin < end))(attend)


_ROWS = plgpu.Layout.WGMMA.reduce(1)  # layout of one number per query row


def _iota(shape: tuple[int, int], dimension: int) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)


def _product(a: Ref, b: Ref, columns: int) -> Array:
    """a @ b of two matrices in shared memory. Waits for the result."""

    def multiply(sums: Ref) -> Array:
        plgpu.wgmma(sums, a, b)
        return sums[...]

    return pl.run_scoped(multiply, plgpu.ACC((PRODUCT_ROWS, columns), jnp.float32))


def _decode(problem: _Problem, q: Array, call: AttentionCall, slopes: Array) -> tuple[Array, Array]:
    """Outputs [splits, rows, kv_heads, lanes, head_dim] and logarithms of sums. Splits without keys are undefined.

    q: [rows, kv_heads, lanes, head_dim], the query heads of each KV head.
    """
    num_rows, kv_heads, lanes, head_dim = q.shape
    dtype = call.pages.dtype
    swizzle = plgpu.SwizzleTransform(128)
    transforms = (plgpu.TilingTransform((8, 64)), swizzle)
    tile = plgpu.SMEM((STAGES, TILE_KEYS, head_dim), dtype, transforms=transforms)
    out = plgpu.SMEM((PRODUCT_ROWS, head_dim), jnp.float32, transforms=(plgpu.TilingTransform((8, 32)), swizzle))
    pieces = max(1, TILE_KEYS // problem.block_size)
    return plgpu.kernel(
        functools.partial(_decode_kernel, problem=problem),
        out_type=(
            jax.ShapeDtypeStruct((problem.splits, num_rows, kv_heads, lanes, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((problem.splits, num_rows, kv_heads, lanes), jnp.float32),
        ),
        grid=(problem.splits, kv_heads, num_rows),
        grid_names=("split", "head", "row"),
        scratch_types=(
            plgpu.SMEM((PRODUCT_ROWS, head_dim), dtype, transforms=transforms),
            plgpu.RefUnion(tile, out),
            tile,
            plgpu.SMEM((PRODUCT_ROWS, TILE_KEYS), dtype, transforms=transforms),
            plgpu.SMEM((PRODUCT_ROWS,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=pieces, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=pieces, num_barriers=STAGES),
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="paged_decode_mosaic",
    )(call.block_tables, call.context_lens, call.query_start_loc, slopes, q, call.pages.data)


def _merge(
    problem: _Problem,
    parts: Float[Array, "splits rows q_heads head_dim"],
    lse: Float[Array, "splits rows q_heads"],
    length: Int[Array, " rows"],
    sinks: Float[Array, " q_heads"] | None,
) -> Float[Array, "rows q_heads head_dim"]:
    """The outputs of the splits, weighted by their sums. Zeros for a row without keys."""
    begin = jnp.arange(problem.splits)[:, None] * problem.split_keys
    written = begin < length
    if problem.window is not None:
        written &= begin + problem.split_keys > length - problem.window
    written = written[:, :, None]
    lse = jnp.where(written, lse, MASKED)
    top = lse.max(axis=0)
    if sinks is not None:
        top = jnp.maximum(top, sinks.astype(jnp.float32))
    weights = jnp.where(written, jnp.exp(lse - top), 0.0)
    total = weights.sum(axis=0)
    if sinks is not None:
        total += jnp.exp(sinks.astype(jnp.float32) - top)
    parts = jnp.where(written[:, :, :, None], parts, 0.0)
    return (parts * weights[:, :, :, None]).sum(axis=0) / jnp.where(total == 0, 1.0, total)[:, :, None]
