"""write_qkv for NVIDIA in Pallas, lowered through Triton: bias, norm, rope and write in one pass.

Grid: (tiles of TILE_TOKENS tokens, KV heads, q_per_kv + 2). A program handles one head (a query head, the key or the
value of a KV head) of one tile of tokens. It writes queries to the output, and keys and values into the pages.

A head is loaded as up to three pieces: the two halves that are rotated together, and the rest (partial rotary
embedding, or no rope). Triton's lowering slices references, not arrays, so a loaded head could not be split.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.raw_qkv import RawQKV
from pallas_kernels.write_kv.triton import TILE_TOKENS, PageWriter, Piece, call_with_pages

Ref = Any  # an array inside a kernel, addressed by `.at`


def write_qkv(
    pages: KVPages, raw: RawQKV, slot_mapping: Int[Array, " tokens"], *, interpret: bool = False
) -> tuple[Float[Array, "tokens q_heads head_dim"], KVPages]:
    """See `pallas_kernels.write_qkv`. interpret: run the kernel in XLA operations, on any platform."""
    tokens, kv_heads, lanes, head_dim = raw.qkv.shape
    optional = {name: getattr(raw, name) for name in ("bias", "cos", "sin", "q_norm", "k_norm")}
    given = {name: value for name, value in optional.items() if value is not None}
    half = 0 if raw.cos is None else raw.cos.shape[1]
    (q,), pages = call_with_pages(
        functools.partial(_kernel, names=tuple(given), half=half, norm_eps=raw.norm_eps),
        "write_qkv", pages, (slot_mapping, raw.qkv, *given.values()), interpret=interpret,
        grid=(-(-tokens // TILE_TOKENS), kv_heads, lanes),
        out=[jax.ShapeDtypeStruct((tokens, kv_heads * (lanes - 2), head_dim), raw.qkv.dtype)],
    )  # fmt: skip
    return q, pages


def _kernel(
    slots_ref: Ref, qkv_ref: Ref, *refs: Ref, writer: PageWriter, names: tuple[str, ...], half: int, norm_eps: float
) -> None:
    *rest, out_ref = refs
    given = dict(zip(names, rest, strict=True))
    tokens, _, heads, head_dim = qkv_ref.shape
    q_per_kv = heads - 2
    token, kv_head, lane = pl.program_id(0) * TILE_TOKENS + jnp.arange(TILE_TOKENS), pl.program_id(1), pl.program_id(2)
    real = token < tokens
    slot = plgpu.load(slots_ref.at[token], mask=real, other=-1)
    dtype = qkv_ref.dtype

    def load(begin: int, end: int) -> Piece:
        column = begin + jnp.arange(pl.next_power_of_2(end - begin))
        mask = real[:, None] & (column < end)[None, :]
        x = plgpu.load(qkv_ref.at[token[:, None], kv_head, lane, column[None, :]], mask=mask, other=0.0)
        if "bias" in given:
            added = plgpu.load(given["bias"].at[kv_head, lane, column], mask=column < end, other=0.0)
            x = (x + added[None, :]).astype(dtype)
        return Piece(x, column, end)

    def normed(pieces: list[Piece], weight_ref: Ref) -> list[Piece]:
        squares = sum((piece.x.astype(jnp.float32) ** 2).sum(axis=1) for piece in pieces)
        factor = lax.rsqrt(squares / head_dim + norm_eps)[:, None]

        def scaled(piece: Piece) -> Piece:
            weight = plgpu.load(weight_ref.at[piece.column], mask=piece.column < piece.end, other=0.0)
            x = (piece.x.astype(jnp.float32) * factor).astype(dtype) * weight[None, :].astype(dtype)
            return piece._replace(x=x)

        return [scaled(piece) for piece in pieces]

    def finished(norm: str) -> list[Piece]:
        pieces = [load(0, half), load(half, 2 * half)] if half else []
        if 2 * half < head_dim:
            pieces.append(load(2 * half, head_dim))
        if norm in given:
            pieces = normed(pieces, given[norm])
        if half:
            first, second, *unrotated = pieces
            index = token[:, None], first.column[None, :]
            mask = real[:, None] & (first.column < half)[None, :]
            cos, sin = (plgpu.load(given[name].at[index], mask=mask, other=0.0) for name in ("cos", "sin"))
            a, b = first.x.astype(jnp.float32), second.x.astype(jnp.float32)
            rotated = [
                first._replace(x=(a * cos - b * sin).astype(dtype)),
                second._replace(x=(b * cos + a * sin).astype(dtype)),
            ]
            pieces = rotated + unrotated
        return pieces

    def query() -> None:
        # masked tokens point past the end, because interpret mode would write them over the last token
        row = jnp.where(real, token, tokens)[:, None]
        for x, column, end in finished("q_norm"):
            target = out_ref.at[row, kv_head * q_per_kv + lane, column[None, :]]
            plgpu.store(target, x, mask=real[:, None] & (column < end)[None, :])

    pl.when(lane < q_per_kv)(query)
    pl.when(lane == q_per_kv)(lambda: writer.store(0, kv_head, slot, finished("k_norm")))
    pl.when(lane == q_per_kv + 1)(lambda: writer.store(1, kv_head, slot, [load(0, head_dim)]))
