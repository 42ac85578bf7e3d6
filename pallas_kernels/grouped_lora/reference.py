"""The specification of grouped_lora in plain jnp. It gathers an adapter for every row."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_lora.pattern import Pattern, in_rank, part_of_outputs


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
    """See `pallas_kernels.grouped_lora`. Sums are float32, or float64 if x is. Allocates rows * parts * R * in."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    slot = jnp.maximum(slot_of_row, 0)
    used = in_rank(ranks[layer, slot], a.shape[3])
    own = jnp.where(used[..., None], a[layer, slot], 0).astype(wide)
    h = jnp.einsum("ni,npri->npr", x.astype(wide), own, precision="highest") * scales[layer, slot][..., None]
    return _expand(h, base, b, ranks, slot_of_row, num_rows, layer, pattern)


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
    scaled = h[:, None] * scales[layer, jnp.maximum(slot_of_row, 0)][..., None]
    return _expand(scaled, base, b, ranks, slot_of_row, num_rows, layer, ((0, base.shape[1]),))


def _expand(
    h: Float[Array, "rows parts R"], base: Array, b: Array, ranks: Array, slot_of_row: Array, num_rows: Array,
    layer: Int[Array, ""], pattern: Pattern,
) -> Float[Array, "rows out"]:  # fmt: skip
    """base + B h. h: times its scale."""
    slot, part = jnp.maximum(slot_of_row, 0), part_of_outputs(pattern)
    used = in_rank(ranks[layer, slot], h.shape[2])
    h = jnp.where(used, h, 0)[:, part]
    own = jnp.where(used[:, part].swapaxes(1, 2), b[layer, slot], 0).astype(h.dtype)
    added = jnp.einsum("nor,nro->no", h, own, precision="highest")
    has_one = (slot_of_row >= 0) & (jnp.arange(len(slot)) < num_rows)
    return jnp.where(has_one[:, None], (base.astype(h.dtype) + added).astype(base.dtype), base)
