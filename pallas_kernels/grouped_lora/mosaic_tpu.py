"""grouped_lora for TPU in Pallas, lowered through Mosaic: two kernels, which copy adapters from the pools in HBM.

A program has a block of rows. For each run of rows with one adapter, it copies the adapter and computes all rows of the
block, and keeps the rows that use it. Copies do not overlap with computation yet.

Grid of `shrink`: (blocks of rows, parts). Grid of `expand`: (blocks of rows, tiles of outputs).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_lora.pattern import Pattern, in_rank, part_of_outputs
from pallas_kernels.platforms import refuse_tpu

Ref = Any  # an array inside a kernel
BLOCK = 64          # most rows of a block: 3.5 MiB of x with 14,336 inputs in bfloat16, of 16 MiB of VMEM
LANES = 128         # outputs of a part are a multiple of it
MOST_OUTPUTS = 1024  # of a tile
MOST_BYTES = 4 << 20  # of a part's A


def refuse(device: Any, x: Any, base: Any, a: Any, pattern: Pattern) -> str | None:
    """Reason why the kernels cannot run; None if they can."""
    if refuse_tpu(device) is not None:
        return refuse_tpu(device)
    size = a.shape[3] * a.shape[4] * a.dtype.itemsize
    if size > MOST_BYTES:
        return f"A of rank {a.shape[3]} has {size} bytes, more than {MOST_BYTES}"
    return _refuse(x, base, pattern)


def refuse_expand(device: Any, h: Any, base: Any, b: Any) -> str | None:
    """Reason why the kernel cannot run `lora_expand`; None if it can."""
    del b
    return refuse_tpu(device) or _refuse(h, base, ((0, base.shape[1]),))


def _refuse(x: Any, base: Any, pattern: Pattern) -> str | None:
    for array in (x, base):
        if array.dtype not in (jnp.float32, jnp.bfloat16):
            return f"it computes bfloat16 or float32, not {array.dtype}"
    for _, width in pattern:
        if width % LANES:
            return f"{width} outputs are not a multiple of {LANES}"
    return None


def grouped_lora(
    x: Float[Array, "rows in"],
    base: Float[Array, "rows out"],
    a: Float[Array, "layers slots parts R in"],
    b: Float[Array, "layers slots R out"],
    ranks: Int[Array, "layers slots parts"],
    scales: Float[Array, "layers slots parts"],
    slot_of_row: Int[Array, " rows"],
    num_rows: Int[Array, ""],
    *,
    layer: Int[Array, ""],
    pattern: Pattern,
    interpret: Any = False,
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.grouped_lora`. interpret: as in `paged_attention`'s kernel."""
    rows, (_, _, parts, rank, inputs) = x.shape[0], a.shape
    block = min(rows, BLOCK)
    slots = jnp.where(jnp.arange(rows) < num_rows, slot_of_row, -1)
    h = pl.pallas_call(
        _shrink,
        jax.ShapeDtypeStruct((parts, rows, rank), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(rows, block), parts),
            in_specs=[
                pl.BlockSpec((block, 1), lambda i, part, *_: (i, 0)),
                pl.BlockSpec((block, inputs), lambda i, part, *_: (i, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((1, block, rank), lambda i, part, *_: (part, i, 0)),
            scratch_shapes=[pltpu.VMEM((rank, inputs), a.dtype), pltpu.SemaphoreType.DMA],
        ),
        interpret=interpret,
        name="lora_shrink_tpu",
    )(layer.reshape(1), slots, slots[:, None], x, a)
    return _expand_rows(h, base, b, ranks, scales, slots, layer, pattern, interpret)


def lora_expand(
    h: Float[Array, "rows R"],
    base: Float[Array, "rows out"],
    b: Float[Array, "layers slots R out"],
    ranks: Int[Array, "layers slots 1"],
    scales: Float[Array, "layers slots 1"],
    slot_of_row: Int[Array, " rows"],
    num_rows: Int[Array, ""],
    *,
    layer: Int[Array, ""],
    interpret: Any = False,
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.lora_expand`. interpret: as in `paged_attention`'s kernel."""
    slots = jnp.where(jnp.arange(h.shape[0]) < num_rows, slot_of_row, -1)
    return _expand_rows(h[None], base, b, ranks, scales, slots, layer, ((0, base.shape[1]),), interpret)


def _expand_rows(
    h: Float[Array, "parts rows R"], base: Array, b: Array, ranks: Array, scales: Array, slots: Array, layer: Array,
    pattern: Pattern, interpret: Any,
) -> Float[Array, "rows out"]:  # fmt: skip
    """Add B h to base, in place."""
    (rows, outputs), rank = base.shape, b.shape[2]
    own = jnp.maximum(slots, 0)
    rank_of_row, scale_of_row = ranks[layer, own].T, scales[layer, own].T  # [parts, rows]
    h = jnp.where(in_rank(rank_of_row, rank), h * scale_of_row[..., None], 0)
    tile = MOST_OUTPUTS
    while any(width % tile for _, width in pattern):  # a tile belongs to one part
        tile //= 2
    part_of_tile = jnp.asarray(np.ascontiguousarray(part_of_outputs(pattern)[::tile]))
    block = min(rows, BLOCK)
    place = pl.BlockSpec((block, tile), lambda i, n, *_: (i, n))
    return pl.pallas_call(
        functools.partial(_expand, rows=rows, tile=tile),
        jax.ShapeDtypeStruct(base.shape, base.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(rows, block), outputs // tile),
            in_specs=[
                pl.BlockSpec((block, 1), lambda i, n, *_: (i, 0)),
                pl.BlockSpec((1, block, rank), lambda i, n, layer, slots, ranks, part: (part[n], i, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
                place,
            ],
            out_specs=place,
            scratch_shapes=[pltpu.VMEM((rank, tile), b.dtype), pltpu.SemaphoreType.DMA],
        ),
        input_output_aliases={7: 0},
        interpret=interpret,
        name="lora_expand_tpu",
    )(layer.reshape(1), slots, rank_of_row.reshape(-1), part_of_tile, slots[:, None], h, b, base)


def _each_run(slots_ref: Ref, block: int, compute: Callable[[Array, Array], None]) -> None:
    """Call compute(row, slot) for the first row of each run of a block's rows with one adapter."""
    first = pl.program_id(0) * block
    rows = slots_ref.shape[0]

    def turn(index: Array, last: Array) -> Array:
        slot = slots_ref[jnp.minimum(first + index, rows - 1)]
        pl.when((slot >= 0) & (slot != last))(lambda: compute(first + index, slot))
        return slot

    lax.fori_loop(0, jnp.minimum(block, rows - first), turn, jnp.int32(-1))


def _shrink(
    layer_ref: Ref, slots_ref: Ref, own_ref: Ref, x_ref: Ref, a_ref: Ref, h_ref: Ref, adapter_ref: Ref, arrived: Ref
) -> None:
    part = pl.program_id(1)
    h_ref[...] = jnp.zeros_like(h_ref)

    def compute(_: Array, slot: Array) -> None:
        copy = pltpu.make_async_copy(a_ref.at[layer_ref[0], slot, part], adapter_ref, arrived)
        copy.start()
        copy.wait()
        dtype = jnp.promote_types(x_ref.dtype, adapter_ref.dtype)
        h = lax.dot_general(
            x_ref[...].astype(dtype), adapter_ref[...].astype(dtype), (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None, preferred_element_type=jnp.float32,
        )  # fmt: skip
        h_ref[0] = jnp.where(own_ref[...] == slot, h, h_ref[0])

    _each_run(slots_ref, x_ref.shape[0], compute)


def _expand(
    layer_ref: Ref, slots_ref: Ref, ranks_ref: Ref, part_ref: Ref, own_ref: Ref, h_ref: Ref, b_ref: Ref, base_ref: Ref,
    out_ref: Ref, adapter_ref: Ref, arrived: Ref, *, rows: int, tile: int,
) -> None:  # fmt: skip
    n = pl.program_id(1)
    out_ref[...] = base_ref[...]

    def compute(row: Array, slot: Array) -> None:
        columns = pl.ds(pl.multiple_of(n * tile, tile), tile)
        copy = pltpu.make_async_copy(b_ref.at[layer_ref[0], slot, :, columns], adapter_ref, arrived)
        copy.start()
        copy.wait()
        # numbers beyond the true rank may be NaN
        used = lax.broadcasted_iota(jnp.int32, adapter_ref.shape, 0) < ranks_ref[part_ref[n] * rows + row]
        adapter = jnp.where(used, adapter_ref[...].astype(jnp.float32), 0)
        added = jnp.dot(h_ref[0], adapter, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        total = (base_ref[...].astype(jnp.float32) + added).astype(out_ref.dtype)
        out_ref[...] = jnp.where(own_ref[...] == slot, total, out_ref[...])

    _each_run(slots_ref, out_ref.shape[0], compute)
