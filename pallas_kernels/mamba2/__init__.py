"""mamba2: the state space model of Mamba-2 over ragged rows (arXiv:2405.21060; Nemotron-H, Granite 4, Falcon-H1)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.state_scan import state_scan
from pallas_kernels.state_scan.call import ScanCall, expect_call, expect_rows

_NAMES = {
    "q": "c", "k": "b", "v": "x", "decay": "dt", "factor": "dt",
    "k_heads": "groups", "k_dim": "state_dim", "heads": "heads", "v_dim": "head_dim",
}  # fmt: skip


def mamba2(
    x: Float[Array, "tokens heads head_dim"],
    dt: Float[Array, "tokens heads"],
    a: Float[Array, " heads"],
    b: Float[Array, "tokens groups state_dim"],
    c: Float[Array, "tokens groups state_dim"],
    d: Float[Array, " heads"],
    states: Float[Array, "slots heads state_dim head_dim"],
    slots: Int[Array, " rows"],
    positions: Int[Array, " rows"],
    query_start_loc: Int[Array, " rows_plus_1"],
    *,
    max_query_len: int,
    targets: Int[Array, " rows"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "slots heads state_dim head_dim"]]:
    """Outputs of all tokens, and the states after the last token of each row. In place if the states are donated.

    For each token of a row, in order, with a state S [state_dim, head_dim] for each head:

        S = exp(dt * a) * S + b (outer) dt * x;  y = c . S + d * x

    dt:     float32, time step, after softplus and limits. a: float32, negative.
    b, c:   head h uses group h // (heads // groups).
    d:      factor of x in the output. It may have another dtype.
    states: float32, the transpose of Transformers' states.

    The other arguments, the dtypes, and the errors are those of `gated_delta`.
    """
    scale, most = expect_call(_NAMES, c, b, x, dt, dt, states, 1.0, max_query_len)
    expect_rows(slots, positions, query_start_loc, targets)
    for name, array in (("a", a), ("d", d)):
        if array.shape != x.shape[1:2]:
            raise ValueError(f"{name} {array.shape}: must be [{x.shape[1]}], one per head of x")
    if a.dtype != jnp.float32:
        raise ValueError(f"a of {a.dtype}: must be float32")
    index = (array.astype(jnp.int32) for array in (slots, positions, query_start_loc))
    call = ScanCall(
        c, b, x, dt * a, dt, d.astype(jnp.float32), states, *index,
        scale=scale, is_delta=False, max_query_len=most, targets=None if targets is None else targets.astype(jnp.int32),
    )  # fmt: skip
    return state_scan(call, implementation)
