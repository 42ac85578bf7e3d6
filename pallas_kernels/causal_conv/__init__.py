"""causal_conv: a depthwise convolution over the last few tokens of ragged rows, with the earlier inputs as state."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.causal_conv import cpu, reference, xla
from pallas_kernels.checks import expect_floats, expect_static
from pallas_kernels.platforms import Implementation, pick, takes_native
from pallas_kernels.state_scan.call import expect_rows

ACTIVATIONS = (None, "silu")
# `Implementation.refuse` takes (device, x, states, max_query_len)
IMPLEMENTATIONS = {
    "reference": Implementation(reference.causal_conv),
    "xla": Implementation(xla.causal_conv),
    "cpu": Implementation(cpu.causal_conv, cpu.refuse),
}


def causal_conv(
    x: Float[Array, "tokens channels"],
    weight: Float[Array, "width channels"],
    bias: Float[Array, " channels"] | None,
    states: Float[Array, "slots width_minus_1 channels"],
    slots: Int[Array, " rows"],
    positions: Int[Array, " rows"],
    query_start_loc: Int[Array, " rows_plus_1"],
    *,
    max_query_len: int,
    targets: Int[Array, " rows"] | None = None,
    activation: str | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens channels"], Float[Array, "slots width_minus_1 channels"]]:
    """Outputs of all tokens, and each row's last width - 1 inputs as its state. In place if the states are donated.

    y[t, c] = activation(bias[c] + sum over j of weight[j, c] * x[t - width + 1 + j, c]), within a row

    Row i has the tokens query_start_loc[i] to query_start_loc[i + 1] - 1. Tokens from query_start_loc[-1] on are
    padding, with undefined results. Inputs before a row's first token are its state, oldest first.

    weight:        width is at least 2. A checkpoint has [channels, 1, width]: transpose it once.
    bias:          None: zeros.
    states:        x is rounded to their dtype.
    slots:         int32, the slot of each row's state. No two rows with tokens may share a slot.
    positions:     int32, position in its sequence of each row's first token. At 0 the row's state starts as zeros,
                   whatever the slot holds. Rows without tokens write no state.
    max_query_len: static upper bound of the tokens per row.
    targets:       int32, the slot that the state after each row's tokens is written to; None: the row's own. A number
                   outside the array: it is not written. No two rows may share a target, and none may be the slot of
                   another row with tokens.
    activation:    None or "silu".
    implementation: None: the best one for the platform that the call is lowered for. "reference" is one token after the
                   other, "xla" all tokens at once, "cpu" a native kernel for CPU. A row's bits on CPU depend on its
                   own tokens only, not on how they are divided into calls.

    Sums are float32, and rounded once, to x's dtype. Raises ValueError, which names the argument, if shapes or dtypes
    do not fit, or if the implementation refuses the call.
    """
    most = _expect(x, weight, bias, states, max_query_len, activation)
    expect_rows(slots, positions, query_start_loc, targets)
    bias = jnp.zeros(x.shape[1], jnp.float32) if bias is None else bias.astype(jnp.float32)
    rows = (slots, positions, query_start_loc, slots if targets is None else targets)
    index = (array.astype(jnp.int32) for array in rows)
    call = (x, weight.astype(jnp.float32), bias, states, *index)
    options: dict[str, Any] = {"max_query_len": most, "activation": activation}
    if implementation is not None:
        return pick(IMPLEMENTATIONS, implementation, x, states, most)(*call, **options)
    by_xla = functools.partial(xla.causal_conv, **options)
    if not takes_native(cpu.refuse, x, states, most):
        return by_xla(*call)
    return lax.platform_dependent(*call, cpu=functools.partial(cpu.causal_conv, **options), default=by_xla)


def _expect(x: Any, weight: Any, bias: Any, states: Any, max_query_len: Any, activation: str | None) -> int:
    """max_query_len as a number. Raises ValueError unless the arguments of `causal_conv` fit."""
    expect_floats("x", x, "[tokens, channels]")
    expect_floats("weight", weight, "[width, channels]")
    expect_floats("states", states, "[slots, width - 1, channels]")
    width, channels = weight.shape
    if channels != x.shape[1] or width < 2:
        raise ValueError(f"weight {weight.shape}: must be [width, {x.shape[1]}] with a width of at least 2")
    if states.shape[1:] != (width - 1, channels):
        raise ValueError(f"states {states.shape}: must be [slots, {width - 1}, {channels}]")
    if bias is not None:
        expect_floats("bias", bias, "[channels]")
        if bias.shape != (channels,):
            raise ValueError(f"bias {bias.shape}: must be [{channels}]")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: must be None or 'silu'")
    return expect_static("max_query_len", max_query_len, 1)
