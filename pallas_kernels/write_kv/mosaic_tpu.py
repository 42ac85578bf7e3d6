"""write_kv for TPU in Pallas, lowered through Mosaic.

A slab is the smallest part of a page that a TPU can copy (`_SLAB`), with the keys and values of all heads. Grid: (slabs
with new tokens,). A program reads one slab, fills the slots of its new tokens, and writes the slab back in place. The
tokens are sorted by slot, so each slab has exactly one program. Pallas fetches the next slab and writes the previous
one back while the program works.

int8 pages: the kernel computes the scales as well, and writes them into the page's scales. Programs of the same page
run one after the other, and share the page's scales in VMEM.
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

from pallas_kernels.kv_pages import FP8, INT8, KVPages, int8_scale, to_fp8, to_int8
from pallas_kernels.platforms import refuse_tpu

Ref = Any  # an array inside a kernel


# By the bytes of a number. _SLAB: tokens of a slab, the rows of a memory tile; (8, 128) with 16 bits, (32, 128) with 8.
# _BLOCK: block sizes must be multiples of it, the rows of a register.
_SLAB, _BLOCK = {4: 8, 2: 8, 1: 32}, {4: 8, 2: 16, 1: 32}


def refuse(device: Any, pages: KVPages) -> str | None:
    """Reason why the kernels for TPU cannot take pages on a jax Device; None if they can."""
    if pages.dtype not in (jnp.float32, jnp.bfloat16, INT8, FP8) or pages.v_dim is not None:
        latent = "" if pages.v_dim is None else ", latent"
        return f"pages are {pages.dtype}{latent}: it takes float32, bfloat16, int8 and {FP8}"
    multiple = _BLOCK[pages.dtype.itemsize]
    if pages.block_size % multiple:
        return f"block_size={pages.block_size}: it takes multiples of {multiple} for {pages.dtype}"
    return refuse_tpu(device)


@dataclasses.dataclass(frozen=True)
class PagePart:
    """The part of a stored page that some KV heads of a block have, as rows of heads and columns.

    For `KVPages.in_shape`: a TPU stores pages in tiles of several tokens, so a page of smaller layers is not contiguous
    memory. Here it has some of each token's numbers, in the order of heads: whole rows of heads, or columns of one. All
    kernels of an engine must agree on this; `KVPages.data` in XLA operations has another order.
    """

    data: Any   # [num_blocks, 2, heads, block_size, width], as stored
    rows: int   # heads of the part, as stored
    width: int  # columns of the part
    parts: int  # parts of a stored page
    of_block: int  # parts of a block

    @classmethod
    def of(cls, pages: KVPages, heads: int) -> "PagePart":
        """The parts of `heads` KV heads. Raises ValueError if they are no rectangle of whole registers."""
        data = pages.data if pages.whole is None else pages.whole
        stored, width = data.shape[2], data.shape[4]
        numbers = heads * pages.head_dim
        rows, columns = max(1, numbers // width), min(width, numbers)
        if rows * columns != numbers or stored % rows or width % columns or (columns < width and columns % 128):
            raise ValueError(
                f"pages of {pages.num_kv_heads} heads of {pages.head_dim}, stored as {stored} heads of {width}: the "
                "parts must be whole heads, or columns in multiples of 128"
            )
        return cls(data, rows, columns, stored * width // numbers, pages.num_kv_heads // heads)

    def without_data(self) -> "PagePart":
        """The same with the shape of the data, for a kernel."""
        return dataclasses.replace(self, data=jax.ShapeDtypeStruct(self.data.shape, self.data.dtype))

    def place(self, block: Any, index: Any) -> tuple[Any, Any, Any]:
        """Page, row and column of a part, each row and column counted in parts. index: of the part in its block."""
        page, inside, columns = block, index, self.data.shape[4] // self.width
        if self.parts > self.of_block:
            part = block * self.of_block + index
            page, inside = lax.div(part, self.parts), lax.rem(part, self.parts)
        return (page, inside, 0) if columns == 1 else (page, lax.div(inside, columns), lax.rem(inside, columns))


def write_kv(
    pages: KVPages,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slot_mapping: Int[Array, " tokens"],
    *,
    interpret: Any = False,
) -> KVPages:
    """See `pallas_kernels.write_kv`. Takes float32, bfloat16, int8 and fp8 pages.

    interpret: True to run the kernel in XLA operations, on any platform; `pltpu.InterpretParams` to check its DMAs.
    """
    tokens, block_size = k.shape[0], pages.block_size
    part = PagePart.of(pages, pages.num_kv_heads)
    data, heads, head_dim = part.data, part.rows, part.width
    size = _SLAB[data.dtype.itemsize]
    # --- tokens of each slab: the same for all layers of a step, so XLA computes this once ------------------------
    past_end = pages.num_blocks * block_size  # slot of padding
    slots = jnp.where((slot_mapping < 0) | (slot_mapping > past_end), past_end, slot_mapping).astype(jnp.int32)
    order = jnp.argsort(slots)
    slots = slots[order]
    slab = slots // size
    is_first = (slots < past_end) & (slab != jnp.roll(slab, 1).at[0].set(-1))
    used = jnp.sum(slots < past_end, dtype=jnp.int32)
    # first token of each slab, in order; then the number of tokens that are written
    starts = jnp.sort(jnp.where(is_first, jnp.arange(tokens, dtype=jnp.int32), used))
    starts = jnp.append(starts, used)
    new = jnp.stack([k, v], axis=1).reshape(tokens, 2, heads, head_dim)
    if pages.dtype == FP8:  # as bytes, which the kernel moves: a v5e has no instructions for fp8
        new = lax.bitcast_convert_type(to_fp8(new, pages.scales[..., None]), jnp.int8).astype(jnp.bfloat16)
    elif pages.dtype != INT8:
        new = new.astype(data.dtype)
    # a program reads `size` tokens, starting at its slab's first
    new = jnp.pad(new[order], ((0, size), (0, 0), (0, 0), (0, 0)))

    def slot_of(i: Array, slots: Ref, starts: Ref) -> Array:
        return jnp.minimum(slots[jnp.minimum(starts[i], tokens - 1)], past_end - 1)

    def slab_of(i: Array, slots: Ref, starts: Ref) -> tuple[Array, int, int, Array, int]:
        slot = slot_of(i, slots, starts)
        page, row, column = part.place(lax.div(slot, block_size), 0)
        return page, 0, row, lax.div(lax.rem(slot, block_size), size), column

    in_place = [data]
    specs = [pl.BlockSpec((1, 2, heads, size, head_dim), slab_of)]
    if pages.dtype == INT8:
        in_place.append(pages.scales)
        specs.append(
            pl.BlockSpec((1, 2, heads, block_size), lambda *args: (lax.div(slot_of(*args), block_size), 0, 0, 0))
        )
    own_tokens = pl.BlockSpec(  # indexed by token, not by blocks of `size` tokens
        tuple(pl.Element(n) for n in (size, 2, heads, head_dim)), lambda i, _, starts: (starts[i], 0, 0, 0)
    )
    # without these constraints XLA copies all scales to VMEM and back, if they fit: see paged_attention
    out_type: Any = jax.ShapeDtypeStruct
    if not interpret:
        out_type = pltpu.HBM
        in_place = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in in_place]
    written = pl.pallas_call(
        functools.partial(_kernel, block_size=block_size),
        [out_type(x.shape, x.dtype) for x in in_place],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            # at least one program; with nothing to write, it writes back the slab that it read
            grid=(jnp.maximum(jnp.sum(is_first, dtype=jnp.int32), 1),),
            in_specs=[own_tokens, *specs],
            out_specs=specs,
            scratch_shapes=[pltpu.VMEM((2, heads, size, head_dim), jnp.float32)],
        ),
        input_output_aliases={3 + i: i for i in range(len(in_place))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="write_kv_tpu",
    )(slots, starts, new, *in_place)
    if pages.whole is not None:
        return pages.with_data(written[0])
    return KVPages(written[0], written[1] if pages.dtype == INT8 else pages.scales)


def _kernel(slots_ref: Ref, starts_ref: Ref, new_ref: Ref, *refs: Ref, block_size: int) -> None:
    """One slab.

    new_ref: [size, 2, heads, head_dim] tokens; those of this slab come first.
    refs:    the slab and, for int8, the page's scales [1, 2, heads, block_size]; the same as results; a float32
             slab, because a single token cannot be stored in other types.
    """
    slab_ref, pages = refs[-1], refs[:-1]
    (old_ref, *old_scales), (out_ref, *scales) = pages[: len(pages) // 2], pages[len(pages) // 2 :]
    i = pl.program_id(0)
    start, size = starts_ref[i], slab_ref.shape[2]
    old, is_fp8 = old_ref[0], old_ref.dtype == FP8
    slab_ref[...] = (lax.bitcast_convert_type(old, jnp.int8) if is_fp8 else old).astype(jnp.float32)
    if scales:
        # scales that the previous program wrote for this page are in the result, not in the argument
        page, page_before = (lax.div(slots_ref[starts_ref[n]], block_size) for n in (i, jnp.maximum(i - 1, 0)))

        @pl.when((i == 0) | (page != page_before))
        def _first_of_page() -> None:
            scales[0][...] = old_scales[0][...]

    def put_token(token: Array, _: None) -> None:
        slot, new = slots_ref[start + token], new_ref[token]
        new = new.astype(jnp.float32)
        if scales:
            scale = int8_scale(jnp.abs(new).max(axis=-1, keepdims=True)).astype(jnp.float32)
            new = to_int8(new, scale).astype(jnp.float32)
            before = scales[0][0].astype(jnp.float32)
            here = lax.broadcasted_iota(jnp.int32, before.shape, 2) == lax.rem(slot, block_size)
            scales[0][0] = jnp.where(here, scale, before).astype(jnp.bfloat16)
        slab_ref[:, :, pl.ds(lax.rem(slot, size), 1)] = new[:, :, None]

    lax.fori_loop(0, starts_ref[i + 1] - start, put_token, None)
    slab = slab_ref[...].astype(jnp.int8 if is_fp8 else out_ref.dtype)
    out_ref[0] = lax.bitcast_convert_type(slab, FP8) if is_fp8 else slab
