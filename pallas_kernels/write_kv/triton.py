"""write_kv for NVIDIA in Pallas, lowered through Triton, and the parts that write_qkv shares.

Grid: (tiles of TILE_TOKENS tokens, KV heads). A program stores one tile's keys and values of one KV head, in place.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import FP8, INT8, KVPages, int8_scale, to_fp8, to_int8
from pallas_kernels.platforms import nvidia_capability, refuse_triton

Ref = Any  # an array inside a kernel, addressed by `.at`
TILE_TOKENS = 16  # per program: enough bytes to hide its launch, and enough programs to fill a GPU at 64 tokens


def refuse(device: Any, pages: KVPages) -> str | None:
    """Reason why the kernels cannot take pages on a jax Device; None if they can."""
    capability = nvidia_capability(device)
    if pages.dtype == FP8 and capability and capability < (8, 9):
        return f"pages of {FP8} need compute capability 8.9 (Ada) or newer"
    return refuse_triton(device)


def write_kv(
    pages: KVPages,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"] | None,
    slot_mapping: Int[Array, " tokens"],
    *,
    interpret: bool = False,
) -> KVPages:
    """See `pallas_kernels.write_kv`. interpret: run the kernel in XLA operations, on any platform."""
    new = (k,) if v is None else (k, v)
    _, written = call_with_pages(
        _kernel, "write_kv", pages, (slot_mapping, *new), grid=(-(-k.shape[0] // TILE_TOKENS), pages.num_kv_heads),
        interpret=interpret,
    )  # fmt: skip
    return written


def _kernel(slots_ref: Ref, *new: Ref, writer: "PageWriter") -> None:
    tokens, _, head_dim = new[0].shape
    token, head = pl.program_id(0) * TILE_TOKENS + jnp.arange(TILE_TOKENS), pl.program_id(1)
    slot = plgpu.load(slots_ref.at[token], mask=token < tokens, other=-1)
    column = jnp.arange(pl.next_power_of_2(head_dim))
    mask = (slot >= 0)[:, None] & (column < head_dim)
    for which, ref in enumerate(new):
        rows = plgpu.load(ref.at[token[:, None], head, column[None, :]], mask=mask, other=0.0)
        writer.store(which, head, slot, [Piece(rows, column, head_dim)])


# --- shared by the kernels that write pages ---------------------------------------------------------------------------


class Piece(NamedTuple):
    """Neighbouring columns of one head, for a tile of tokens. Columns from `end` on are zero."""

    x: Array       # [tokens, width]
    column: Array  # int32[width]
    end: int       # first column after the piece


@dataclasses.dataclass(frozen=True)
class PageWriter:
    """The pages inside a kernel. Stores tokens of one KV head in their slots, in the pages' dtype."""

    data_ref: Ref
    scales_ref: Ref

    def store(self, which: int, head: Array, slot: Array, pieces: Sequence[Piece]) -> None:
        """Store keys (which=0) or values (which=1) of one head.

        slot:   int32[tokens]; tokens with a negative slot are not stored.
        pieces: together all columns of the head.
        """
        num_blocks, _, _, block_size, _ = self.data_ref.shape
        # masked tokens point past the end as well, because interpret mode would write them to slot 0
        block = jnp.where(slot >= 0, slot // block_size, num_blocks)
        offset = jnp.where(slot >= 0, slot % block_size, 0)
        dtype = self.data_ref.dtype
        if dtype == INT8:
            largest = functools.reduce(jnp.maximum, [jnp.abs(p.x.astype(jnp.float32)).max(axis=1) for p in pieces])
            scale = int8_scale(largest)
            plgpu.store(self.scales_ref.at[block, which, head, offset], scale, mask=slot >= 0)
            pieces = [piece._replace(x=to_int8(piece.x, scale[:, None])) for piece in pieces]
        elif dtype == FP8:
            pieces = [piece._replace(x=to_fp8(piece.x, self.scales_ref[which, head])) for piece in pieces]
        for x, column, end in pieces:
            target = self.data_ref.at[block[:, None], which, head, offset[:, None], column[None, :]]
            plgpu.store(target, x.astype(dtype), mask=(slot >= 0)[:, None] & (column < end)[None, :])


def call_with_pages(
    kernel: Any,
    name: str,
    pages: KVPages,
    arguments: Sequence[Array],
    *,
    grid: tuple[int, ...],
    out: Sequence[jax.ShapeDtypeStruct] = (),
    interpret: bool,
) -> tuple[tuple[Array, ...], KVPages]:
    """Run `kernel(*arguments, *out, writer=PageWriter)` on references of these arrays. Pages change in place."""
    in_place = [pages.data, *([pages.scales] if pages.dtype == INT8 else [])]
    fixed = [pages.scales] if pages.dtype == FP8 else []

    def body(*refs: Ref) -> None:
        given, results = refs[: len(arguments) + len(fixed)], refs[-len(out) - len(in_place) :]
        scales = results[-1] if pages.dtype == INT8 else given[-1] if fixed else None
        kernel(*given[: len(arguments)], *results[: len(out)], writer=PageWriter(results[len(out)], scales))

    first = len(arguments) + len(fixed)
    results = pl.pallas_call(
        body,
        [*out, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in in_place)],
        grid=grid,
        input_output_aliases={first + i: len(out) + i for i in range(len(in_place))},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=name,
    )(*arguments, *fixed, *in_place)
    changed = dict(zip(("data", "scales"), results[len(out) :], strict=False))  # float pages have no scales
    return tuple(results[: len(out)]), dataclasses.replace(pages, **changed)
