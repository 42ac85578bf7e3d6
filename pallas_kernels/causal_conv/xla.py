"""causal_conv in XLA operations, for every platform: all tokens at once."""

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
    """See `pallas_kernels.causal_conv`. Inputs are added from the oldest to the newest, whatever their source."""
    del max_query_len
    tokens, before = x.shape[0], weight.shape[0] - 1
    begins, ends = query_start_loc[:-1], query_start_loc[1:]
    earlier = jnp.take(states, slots, axis=0, mode="clip")
    earlier = jnp.where((positions == 0)[:, None, None], 0, earlier)
    rounded = x.astype(states.dtype)
    # the default method is a loop: 4 passes for 8 rows, with launches of their own on a GPU
    row_of = jnp.searchsorted(ends, jnp.arange(tokens), side="right", method="compare_all")
    row_of = jnp.clip(row_of, 0, slots.shape[0] - 1)
    offset = jnp.arange(tokens) - begins[row_of]

    def inputs(back: int) -> Array:
        """The inputs that are `back` tokens before each token."""
        own = jnp.roll(rounded, back, axis=0)
        state = earlier[row_of, jnp.clip(before + offset - back, 0, before - 1)]
        return jnp.where((offset >= back)[:, None], own, state).astype(jnp.float32)

    y = jnp.broadcast_to(bias, x.shape)
    for j in range(before + 1):
        y = y + weight[j] * inputs(before - j)
    y = jax.nn.silu(y) if activation == "silu" else y
    # --- the last inputs of each row: index `before` of its earlier inputs is its first token ----------------------
    last = (ends - begins)[:, None] + jnp.arange(before)
    own = rounded[jnp.clip(begins[:, None] + last - before, 0, tokens - 1)]
    state = jnp.take_along_axis(earlier, jnp.clip(last, 0, before - 1)[:, :, None], axis=1)
    new = jnp.where((last >= before)[:, :, None], own, state)
    written = written_slots(slots, targets, query_start_loc, states.shape[0])
    return y.astype(x.dtype), states.at[written].set(new, mode="drop")
