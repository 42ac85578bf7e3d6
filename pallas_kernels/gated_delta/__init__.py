"""gated_delta: gated DeltaNet over ragged rows (arXiv:2412.06464; Qwen3-Next, Qwen3.5).

With a decay for each channel it is Kimi Delta Attention (arXiv:2510.26692; Kimi Linear).
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.state_scan import state_scan
from pallas_kernels.state_scan.call import ScanCall, expect_call, expect_rows

_NAMES = {
    "q": "q", "k": "k", "v": "v", "decay": "decay", "factor": "beta",
    "k_heads": "k_heads", "k_dim": "k_dim", "heads": "v_heads", "v_dim": "v_dim",
}  # fmt: skip


def gated_delta(
    q: Float[Array, "tokens k_heads k_dim"],
    k: Float[Array, "tokens k_heads k_dim"],
    v: Float[Array, "tokens v_heads v_dim"],
    decay: Float[Array, "tokens v_heads *channels"],
    beta: Float[Array, "tokens v_heads"],
    states: Float[Array, "slots v_heads k_dim v_dim"],
    slots: Int[Array, " rows"],
    positions: Int[Array, " rows"],
    query_start_loc: Int[Array, " rows_plus_1"],
    *,
    max_query_len: int,
    targets: Int[Array, " rows"] | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens v_heads v_dim"], Float[Array, "slots v_heads k_dim v_dim"]]:
    """Outputs of all tokens, and the states after the last token of each row. In place if the states are donated.

    For each token of a row, in order, with a state S [k_dim, v_dim] for each value head:

        S = exp(decay) * S;  S = S + k (outer) beta * (v - k . S);  out = scale * q . S

    Row i has the tokens query_start_loc[i] to query_start_loc[i + 1] - 1. Tokens from query_start_loc[-1] on are
    padding, with undefined results.

    q, k:          before their norm: both are divided by sqrt(sum of squares + 1e-6). Value head h uses key head
                   h // (v_heads // k_heads).
    decay:         float32, at most 0: the logarithm of the factor. [tokens, v_heads, k_dim]: each row of S has its own.
    beta:          float32.
    states:        float32. slots: int32, the slot of each row's state. No two rows with tokens may share a slot.
    positions:     int32, position in its sequence of each row's first token. At 0 the row's state starts as zeros,
                   whatever the slot holds. Rows without tokens write no state.
    max_query_len: static upper bound of the tokens per row.
    targets:       int32, the slot that the state after each row's tokens is written to; None: the row's own. A number
                   outside the array: it is not written. No two rows may share a target, and none may be the slot of
                   another row with tokens.
    scale:         of q; None: k_dim ** -0.5.
    implementation: None: the best one for the platform that the call is lowered for. "reference" is one token after the
                   other, "xla" one token of each row at a time, "cpu" a native kernel for CPU. A row's bits on CPU
                   depend on its own tokens only, not on how they are divided into calls. "triton" are kernels for
                   NVIDIA and "mosaic_tpu" for TPU: rows of up to 32 tokens one after the other, longer rows in chunks
                   that are counted from position 0. On CPU these run in interpret mode.

    Sums are float32. out has v's dtype. Raises ValueError, which names the argument, if shapes or dtypes do not fit, or
    if the implementation refuses the call.
    """
    wanted: Any = k.shape[-1] ** -0.5 if scale is None else scale
    number, most = expect_call(_NAMES, q, k, v, decay, beta, states, wanted, max_query_len)
    expect_rows(slots, positions, query_start_loc, targets)
    index = (x.astype(jnp.int32) for x in (slots, positions, query_start_loc))
    call = ScanCall(
        q, k, v, decay, beta, None, states, *index, scale=number, is_delta=True, max_query_len=most,
        targets=None if targets is None else targets.astype(jnp.int32),
    )  # fmt: skip
    return state_scan(call, implementation)
