"""The specification of causal_conv, in plain jnp: one token after the other."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def causal_conv(
    x: Float[Array, "tokens channels"],
    weight: Float[Array, "width channels"],
    bias: Float[Array, " channels"],
    states: Float[Array, "slots width_minus_1 channels"],
    slots: Int[Array, " rows"],
    positions: Int[Array, " rows"],
    query_start_loc: Int[Array, " rows_plus_1"],
    *,
    max_query_len: int,
    activation: str | None,
) -> tuple[Float[Array, "tokens channels"], Float[Array, "slots width_minus_1 channels"]]:
    """See `pallas_kernels.causal_conv`."""
    del max_query_len
    starts = query_start_loc
    row_of = jnp.clip(jnp.searchsorted(starts, jnp.arange(x.shape[0]), side="right") - 1, 0, slots.shape[0] - 1)

    def add(states: Array, t: Array) -> tuple[Array, Array]:
        row = row_of[t]
        state = jnp.where((t == starts[row]) & (positions[row] == 0), 0, states[slots[row]])
        inputs = jnp.concatenate([state, x[t][None].astype(state.dtype)])
        y = bias + (weight * inputs.astype(jnp.float32)).sum(0)
        y = jax.nn.silu(y) if activation == "silu" else y
        past_end = states.shape[0]  # padding tokens write nothing
        states = states.at[jnp.where(t < starts[-1], slots[row], past_end)].set(inputs[1:], mode="drop")
        return states, y.astype(x.dtype)

    states, y = jax.lax.scan(add, states, jnp.arange(x.shape[0]))
    return y, states
