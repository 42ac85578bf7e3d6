"""grouped_lora in XLA operations: a loop over the adapters of the batch. Each step computes all rows.

A step reads one adapter and adds its result to the rows that use it. So a batch of many adapters computes many times
what it needs, but no adapter is read twice, and none is gathered for each row.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_lora.pattern import Pattern, in_rank, part_of_outputs

NONE = 2**31 - 1  # larger than any slot


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
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.grouped_lora`."""
    dtype = jnp.promote_types(x.dtype, a.dtype)
    exact = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    rows, (_, _, parts, rank, width) = x.astype(dtype), a.shape

    def shrink(slot: Array) -> Float[Array, "rows parts R"]:
        used = in_rank(ranks[layer, slot], rank)
        own = jnp.where(used[..., None], _of_slot(a, layer, slot), 0).astype(dtype)
        h = lax.dot_general(
            rows, own.reshape(-1, width), (((1,), (1,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
        )
        return h.reshape(-1, parts, rank) * scales[layer, slot][:, None]

    return _add(shrink, base, b, ranks, slot_of_row, num_rows, layer, pattern)


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
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.lora_expand`."""

    def scaled(slot: Array) -> Float[Array, "rows 1 R"]:
        return jnp.where(in_rank(ranks[layer, slot], h.shape[1]), h[:, None] * scales[layer, slot][:, None], 0)

    return _add(scaled, base, b, ranks, slot_of_row, num_rows, layer, ((0, base.shape[1]),))


def _of_slot(pool: Array, layer: Array, slot: Array) -> Array:
    """An adapter's numbers in a pool. The layer is not sliced first, which could copy it."""
    return lax.dynamic_slice(pool, (layer, slot, *[0] * (pool.ndim - 2)), (1, 1, *pool.shape[2:]))[0, 0]


def _add(
    shrink: Callable[[Array], Array], base: Array, b: Array, ranks: Array, slot_of_row: Array, num_rows: Array,
    layer: Int[Array, ""], pattern: Pattern,
) -> Float[Array, "rows out"]:  # fmt: skip
    """base + B h. shrink(slot): h [rows, parts, R] of all rows with the adapter of a slot, times its scale."""
    part, rank = part_of_outputs(pattern), b.shape[2]
    needed = (slot_of_row >= 0) & (jnp.arange(base.shape[0]) < num_rows)
    slots = jnp.where(needed, slot_of_row, NONE)

    def add_adapter(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        slot, out = carry
        h = shrink(slot)
        used = in_rank(ranks[layer, slot], rank)
        own = jnp.where(used[part].T, _of_slot(b, layer, slot), 0).astype(jnp.float32)
        # a part's outputs see only its own h: the others are zeros of a block matrix [parts * R, out]
        blocks = jnp.where(np.arange(h.shape[1])[:, None, None] == part, own, 0).reshape(-1, own.shape[1])
        added = jnp.dot(h.reshape(h.shape[0], -1), blocks, precision=lax.Precision.HIGHEST)
        out = jnp.where((slots == slot)[:, None], (base.astype(jnp.float32) + added).astype(base.dtype), out)
        return jnp.min(jnp.where(slots > slot, slots, NONE)), out

    first = jnp.min(slots, initial=NONE)
    return lax.while_loop(lambda carry: carry[0] < NONE, add_adapter, (first, base))[1]
