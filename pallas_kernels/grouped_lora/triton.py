"""grouped_lora for NVIDIA in Pallas, lowered through Triton: two kernels, without a sort and without metadata.

`shrink` computes h for a split of the inputs, and `expand` adds the splits and writes the outputs. A program has a
block of rows. It computes one adapter of the block after the other, for all rows of the block, and keeps the rows that
use it. A row of the block stands for its adapter if it is the first row that uses it. So a run of rows with one adapter
reads it once in a block, and a block of many adapters is right too.

Up to FEW rows, blocks are small, each adapter of a block has its own program, and the inputs have many splits: decodes
are spread over the multiprocessors. Adapters are read up to their true rank.

With few rows, `expand` writes what is added to base, and XLA adds it in the operation that follows. If the kernel
changed base itself, the sum over the splits of the matmul would be a kernel of its own: two more in a layer of Llama.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_lora.pattern import Pattern, part_of_outputs
from pallas_kernels.platforms import refuse_triton

Ref = Any  # an array inside a kernel, addressed by `.at`
FEW = 256  # most rows of a call with the tiling for decodes
LEAST = 16  # least rows, inputs and outputs of a Triton matmul
TILE_IN, TILE_OUT = 64, 128  # numbers of A and B at a time; not tuned on a GPU yet
MOST_RANK = 256  # more ranks than this do not fit into registers


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Blocks and splits of a call."""

    rows: int      # of a block
    programs: int  # of a block: each computes some of its adapters
    splits: int    # of the inputs
    inputs: int    # of a split

    @classmethod
    def of(cls, rows: int, inputs: int) -> "Tiling":
        """The tiling for a number of rows. Neither tiling depends on the rows in any other way."""
        few = rows <= FEW
        most, least = (32, 256) if few else (2, 2048)
        width = max(least, -(-inputs // most))
        width = -(-width // TILE_IN) * TILE_IN
        block = LEAST if few else 64
        return cls(block, min(block, rows) if few else 8, -(-inputs // width), width)


def refuse(device: Any, x: Any, base: Any, a: Any, pattern: Pattern) -> str | None:
    """Reason why the kernels cannot run; None if they can."""
    del x, base
    return refuse_triton(device) or _refuse(a.shape[3], pattern)


def refuse_expand(device: Any, h: Any, base: Any, b: Any) -> str | None:
    """Reason why the kernel cannot run `lora_expand`; None if it can."""
    del h
    return refuse_triton(device) or _refuse(b.shape[2], ((0, base.shape[1]),))


def _refuse(rank: int, pattern: Pattern) -> str | None:
    for _, width in pattern:
        if width % LEAST:
            return f"{width} outputs are not a multiple of {LEAST}"
    return f"rank {rank} is larger than {MOST_RANK}" if rank > MOST_RANK else None


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
    interpret: bool = False,
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.grouped_lora`. interpret: run the kernels in XLA operations, on any platform."""
    rows, (_, _, parts, rank, inputs) = x.shape[0], a.shape
    tiling = Tiling.of(rows, inputs)
    h = pl.pallas_call(
        functools.partial(_shrink, tiling=tiling),
        jax.ShapeDtypeStruct((tiling.splits, rows, parts, rank), jnp.float32),
        grid=(tiling.programs, pl.cdiv(rows, tiling.rows), parts * tiling.splits),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="lora_shrink",
    )(layer.reshape(1), num_rows.reshape(1), slot_of_row, ranks, x, a)
    return _expand_rows(h, base, b, ranks, scales, slot_of_row, num_rows, layer, pattern, tiling, interpret)


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
    interpret: bool = False,
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.lora_expand`. interpret: run the kernel in XLA operations, on any platform."""
    pattern = ((0, base.shape[1]),)
    tiling = Tiling.of(h.shape[0], 1)
    return _expand_rows(
        h[None, :, None], base, b, ranks, scales, slot_of_row, num_rows, layer, pattern, tiling, interpret
    )


def _expand_rows(
    h: Float[Array, "splits rows parts R"], base: Array, b: Array, ranks: Array, scales: Array, slot_of_row: Array,
    num_rows: Array, layer: Array, pattern: Pattern, tiling: Tiling, interpret: bool,
) -> Float[Array, "rows out"]:  # fmt: skip
    """base + B h. In place with many rows: a float32 copy of the sum of 2,048 rows would be much to write and read."""
    rows, outputs = base.shape
    apart = rows <= FEW
    tile = TILE_OUT
    while any(width % tile for _, width in pattern):  # a tile belongs to one part
        tile //= 2
    part_of_tile = jnp.asarray(np.ascontiguousarray(part_of_outputs(pattern)[::tile]))
    operands = (layer.reshape(1), num_rows.reshape(1), slot_of_row, ranks, scales, part_of_tile, h, b)
    found = pl.pallas_call(
        functools.partial(_expand, tiling=tiling, tile=tile, apart=apart, base_dtype=base.dtype),
        jax.ShapeDtypeStruct(base.shape, jnp.float32 if apart else base.dtype),
        grid=(tiling.programs, outputs // tile, pl.cdiv(rows, tiling.rows)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        input_output_aliases={} if apart else {len(operands): 0},
        interpret=interpret,
        name="lora_expand",
    )(*operands, *(() if apart else (base,)))
    return (base.astype(jnp.float32) + found).astype(base.dtype) if apart else found


def _each_adapter(
    first: Array, tiling: Tiling, layer_ref: Ref, num_rows_ref: Ref, slots_ref: Ref, ranks_ref: Ref, part: Array,
    compute: Callable[[Array, Array, Array, Array], None], unchanged: Callable[[Array], None] = lambda own: None,
) -> None:  # fmt: skip
    """Call compute(layer, slot, rank, own) for the adapters of this program. own: the rows of the block that use it.

    unchanged: called with rows of the block that have no adapter for this part.
    """
    rows, program = slots_ref.shape[0], pl.program_id(0)
    index = jnp.arange(tiling.rows)
    last = jnp.minimum(num_rows_ref[0], rows)
    slots = plgpu.load(slots_ref.at[first + index], mask=first + index < last, other=-1)

    def turn(i: Array, _: None) -> None:
        row = i * tiling.programs + program

        def of_row() -> None:
            slot = slots_ref[first + row]
            own = slots == slot
            before = jnp.sum(jnp.where(own & (index < row), 1, 0))

            def of_adapter() -> None:
                layer = layer_ref[0]
                rank = ranks_ref[layer, slot, part]
                pl.when(rank > 0)(lambda: compute(layer, slot, rank, own))
                pl.when(rank <= 0)(lambda: unchanged(own))

            pl.when((slot >= 0) & (before == 0))(of_adapter)

        pl.when(first + row < last)(of_row)

    def block() -> None:
        pl.when(program == 0)(lambda: unchanged((slots < 0) & (first + index < last)))
        lax.fori_loop(0, pl.cdiv(tiling.rows, tiling.programs), turn, None)

    pl.when(first < last)(block)


def _padded(rank: int) -> int:
    return max(LEAST, pl.next_power_of_2(rank))


def _shrink(
    layer_ref: Ref, num_rows_ref: Ref, slots_ref: Ref, ranks_ref: Ref, x_ref: Ref, a_ref: Ref, h_ref: Ref,
    *, tiling: Tiling,
) -> None:  # fmt: skip
    _, _, parts, most, width = a_ref.shape
    first = pl.program_id(1) * tiling.rows
    part, split = lax.rem(pl.program_id(2), parts), lax.div(pl.program_id(2), parts)
    start = split * tiling.inputs
    row, r = first + jnp.arange(tiling.rows), jnp.arange(_padded(most))
    dtype = jnp.promote_types(x_ref.dtype, a_ref.dtype)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None

    def compute(layer: Array, slot: Array, rank: Array, own: Array) -> None:
        def add_tile(i: Array, total: Array) -> Array:
            k = start + i * TILE_IN + jnp.arange(TILE_IN)
            inside = k < width
            x = plgpu.load(x_ref.at[row[:, None], k[None, :]], mask=own[:, None] & inside[None, :], other=0.0)
            a = plgpu.load(
                a_ref.at[layer, slot, part, r[:, None], k[None, :]], mask=(r < rank)[:, None] & inside[None, :],
                other=0.0,
            )  # fmt: skip
            return total + plgpu.dot(x.astype(dtype), a.astype(dtype).T, precision=precision)

        zeros = jnp.zeros((tiling.rows, _padded(most)), jnp.float32)
        h = lax.fori_loop(0, tiling.inputs // TILE_IN, add_tile, zeros)
        plgpu.store(
            h_ref.at[split, row[:, None], part, r[None, :]], h, mask=own[:, None] & (r < rank)[None, :]
        )  # fmt: skip

    _each_adapter(first, tiling, layer_ref, num_rows_ref, slots_ref, ranks_ref, part, compute)


def _expand(
    layer_ref: Ref, num_rows_ref: Ref, slots_ref: Ref, ranks_ref: Ref, scales_ref: Ref, part_of_tile_ref: Ref,
    h_ref: Ref, b_ref: Ref, *base_and_out: Ref, tiling: Tiling, tile: int, apart: bool, base_dtype: Any,
) -> None:  # fmt: skip
    """apart: write what is added to base. Else add it to base, which is the memory of the output."""
    out_ref = base_and_out[-1]
    splits, _, _, most = h_ref.shape
    first = pl.program_id(2) * tiling.rows
    part = part_of_tile_ref[pl.program_id(1)]
    column = pl.program_id(1) * tile + jnp.arange(tile)
    row, r = first + jnp.arange(tiling.rows), jnp.arange(_padded(most))

    def compute(layer: Array, slot: Array, rank: Array, own: Array) -> None:
        mask = own[:, None] & (r < rank)[None, :]

        def add_split(split: Array, total: Array) -> Array:
            return total + plgpu.load(h_ref.at[split, row[:, None], part, r[None, :]], mask=mask, other=0.0)

        zeros = jnp.zeros((tiling.rows, _padded(most)), jnp.float32)
        h = lax.fori_loop(0, splits, add_split, zeros) * scales_ref[layer, slot, part]
        b = plgpu.load(
            b_ref.at[layer, slot, r[:, None], column[None, :]], mask=(r < rank)[:, None], other=0.0
        )  # fmt: skip
        place, stored = out_ref.at[row[:, None], column[None, :]], jnp.broadcast_to(own[:, None], (tiling.rows, tile))
        total = jnp.zeros((tiling.rows, tile), jnp.float32)
        if not apart:
            total = plgpu.load(place, mask=stored, other=0.0).astype(jnp.float32)
        if jnp.float32 in (b.dtype, base_dtype):
            total += plgpu.dot(h, b.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        else:  # h in two numbers of b's dtype: one would have 8 bits
            high = h.astype(b.dtype)
            low = (h - high.astype(jnp.float32)).astype(b.dtype)
            total += plgpu.dot(high, b) + plgpu.dot(low, b)
        plgpu.store(place, total.astype(out_ref.dtype), mask=stored)

    def unchanged(own: Array) -> None:
        mask = jnp.broadcast_to(own[:, None], (tiling.rows, tile))
        plgpu.store(out_ref.at[row[:, None], column[None, :]], jnp.zeros(mask.shape, out_ref.dtype), mask=mask)

    keeps = {"unchanged": unchanged} if apart else {}
    _each_adapter(first, tiling, layer_ref, num_rows_ref, slots_ref, ranks_ref, part, compute, **keeps)
