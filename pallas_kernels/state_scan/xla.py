"""state_scan in XLA operations, for every platform: one token of each row at a time, until the longest row ends."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.state_scan.call import ScanCall, written_slots
from pallas_kernels.state_scan.reference import l2_norm


def state_scan(
    call: ScanCall,
) -> tuple[Float[Array, "tokens heads v_dim"], Float[Array, "slots heads k_dim v_dim"]]:
    """See `pallas_kernels.state_scan`. Sums are reductions, not matmuls, so a row's bits depend on no other row."""
    tokens, heads, _ = call.v.shape
    begins, ends = call.query_start_loc[:-1], call.query_start_loc[1:]
    rows = jnp.take(call.states, call.slots, axis=0, mode="clip")
    rows = jnp.where((call.positions == 0)[:, None, None, None], 0.0, rows)
    skip = jnp.zeros(heads) if call.skip is None else call.skip

    def add(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        rows, out = carry
        t = begins + i
        live = t < ends
        at = jnp.minimum(t, tokens - 1)
        q, k = (jnp.repeat(x[at].astype(jnp.float32), call.v_per_k, axis=1) for x in (call.q, call.k))
        v, factor = call.v[at].astype(jnp.float32), call.factor[at][:, :, None]
        decay = call.decay[at][..., None] if call.by_channel else call.decay[at][..., None, None]
        new = jnp.exp(decay) * rows
        if call.is_delta:
            q, k = l2_norm(q), l2_norm(k)
            change = factor * (v - (k[..., None] * new).sum(2))
        else:
            change = factor * v
        new += k[..., None] * change[:, :, None, :]
        result = call.scale * (q[..., None] * new).sum(2) + skip[:, None] * v
        out = out.at[jnp.where(live, t, tokens)].set(result.astype(out.dtype), mode="drop")
        return jnp.where(live[:, None, None, None], new, rows), out

    begin = (rows, jnp.zeros(call.v.shape, call.v.dtype))
    if call.max_query_len == 1:
        rows, out = add(jnp.int32(0), begin)
    else:
        rows, out = lax.fori_loop(0, jnp.max(ends - begins), add, begin)
    written = written_slots(call.slots, call.targets, call.query_start_loc, call.states.shape[0])
    return out, call.states.at[written].set(rows, mode="drop")
