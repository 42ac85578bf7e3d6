"""The specification of state_scan, in plain jnp: one token after the other."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.state_scan.call import EPS, ScanCall, written_slots


def l2_norm(x: Float[Array, "*shape width"]) -> Float[Array, "*shape width"]:
    """x / sqrt(sum of squares + 1e-6), in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt((x * x).sum(-1, keepdims=True) + EPS)


def state_scan(
    call: ScanCall,
) -> tuple[Float[Array, "tokens heads v_dim"], Float[Array, "slots heads k_dim v_dim"]]:
    """See `pallas_kernels.state_scan`."""
    starts, (tokens, heads, _) = call.query_start_loc, call.v.shape
    row_of = jnp.clip(jnp.searchsorted(starts, jnp.arange(tokens), side="right") - 1, 0, call.slots.shape[0] - 1)
    skip = jnp.zeros(heads) if call.skip is None else call.skip
    rows = jnp.where((call.positions == 0)[:, None, None, None], 0.0, call.states[call.slots])

    def add(rows: Array, t: Array) -> tuple[Array, Array]:
        row = row_of[t]
        state = rows[row]
        q, k = (jnp.repeat(x[t].astype(jnp.float32), call.v_per_k, axis=0) for x in (call.q, call.k))
        v, factor = call.v[t].astype(jnp.float32), call.factor[t, :, None]
        decay = call.decay[t][:, :, None] if call.by_channel else call.decay[t][:, None, None]
        state = jnp.exp(decay) * state
        if call.is_delta:
            q, k = l2_norm(q), l2_norm(k)
            change = factor * (v - jnp.einsum("hk,hkv->hv", k, state, precision="highest"))
        else:
            change = factor * v
        state += k[:, :, None] * change[:, None, :]
        out = call.scale * jnp.einsum("hk,hkv->hv", q, state, precision="highest") + skip[:, None] * v
        past_end = rows.shape[0]  # padding tokens change nothing
        rows = rows.at[jnp.where(t < starts[-1], row, past_end)].set(state, mode="drop")
        return rows, out.astype(call.v.dtype)

    rows, out = jax.lax.scan(add, rows, jnp.arange(tokens))
    written = written_slots(call.slots, call.targets, starts, call.states.shape[0])
    return out, call.states.at[written].set(rows, mode="drop")
