"""The specification of causal_conv, in plain jnp: one token after the other."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.state_scan.call import written_slots


def causal_conv(
    x: Float[Array, "tokens channels"],
    weight: Float[Array, "width channels"],
    bias: Float[Array, " channels"],
    states: Float[Array, "slots width_minus_1 channels"],
    slots: Int[Array, " rows"],
    positions: Int[Array, " rows"],
    query_start_loc: Int[Array, " rows_plus_1"],
    targets: Int[Array, " rows"],
    *,
    max_query_len: int,
    activation: str | None,
) -> tuple[Float[Array, "tokens channels"], Float[Array, "slots width_minus_1 channels"]]:
    """See `pallas_kernels.causal_conv`."""
    del max_query_len
    starts = query_start_loc
    row_of = jnp.clip(jnp.searchsorted(starts, jnp.arange(x.shape[0]), side="right") - 1, 0, slots.shape[0] - 1)

    rows = jnp.where((positions == 0)[:, None, None], 0, states[slots])

    def add(rows: Array, t: Array) -> tuple[Array, Array]:
        row = row_of[t]
        inputs = jnp.concatenate([rows[row], x[t][None].astype(rows.dtype)])
        y = bias + (weight * inputs.astype(jnp.float32)).sum(0)
        y = jax.nn.silu(y) if activation == "silu" else y
        past_end = rows.shape[0]  # padding tokens change nothing
        rows = rows.at[jnp.where(t < starts[-1], row, past_end)].set(inputs[1:], mode="drop")
        return rows, y.astype(x.dtype)

    rows, y = jax.lax.scan(add, rows, jnp.arange(x.shape[0]))
    return y, states.at[written_slots(slots, targets, starts, states.shape[0])].set(rows, mode="drop")
