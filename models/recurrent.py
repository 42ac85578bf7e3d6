"""Layers with a state of fixed size per request: gated DeltaNet (Qwen3-Next, Qwen3.5) and short convolutions (LFM2).

A layer's state is a tuple of arrays with one slot per request (`Recurrence.state_shapes`). A step reads and writes the
slots of its rows, in place.
"""

import dataclasses
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jpaged.models.linear import LayerContext, linear, linear_with_bias
from jpaged.models.recurrent_spec import GatedDelta, Recurrence, ShortConv
from pallas_kernels.causal_conv import causal_conv
from pallas_kernels.gated_delta import gated_delta

# Arrays of a layer, each [slots, ...]; the first has inputs of a convolution. None for training
State: TypeAlias = Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["slots", "positions", "query_start_loc"], meta_fields=["max_query_len"],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class StateRows:
    """The rows of a step, as a recurrent layer needs them. Padding rows have no tokens."""

    slots: Int[Array, " rows"]      # slot of each row's state
    positions: Int[Array, " rows"]  # position of each row's first token; at 0, the state before it is zeros
    query_start_loc: Int[Array, " rows_plus_1"]
    max_query_len: int              # upper bound of the tokens of a row


def mix_by_state(
    recurrence: Recurrence, x: Float[Array, "tokens hidden"], context: LayerContext, state: State, rows: Any
) -> tuple[Float[Array, "tokens hidden"], State]:
    """A recurrent layer, from the normalised hidden states to the output matrix. Returns (output, state).

    rows: StateRows. Without a state (None) it is any array [batch, length]: sequences of equal length from position 0.
    """
    if state is None:
        return _from_zeros(recurrence, x, context, *rows.shape), None
    match recurrence:
        case GatedDelta():
            return _gated_delta(recurrence, x, context, state, rows)
        case ShortConv():
            return _short_conv(recurrence, x, context, state, rows)
    raise TypeError(f"{type(recurrence).__name__}: not a kind of recurrent layer")


def _gated_delta(
    delta: GatedDelta, x: Float[Array, "tokens hidden"], context: LayerContext, state: State, rows: StateRows
) -> tuple[Float[Array, "tokens hidden"], State]:
    """Gated DeltaNet (arXiv:2412.06464) with Qwen3-Next's convolution, norm and gate."""
    params, tokens, per_k = context.params, x.shape[0], delta.v_per_k
    qkvz = linear("delta_qkvz", x, context).reshape(tokens, delta.k_heads, -1, delta.head_dim)
    mixed, z = qkvz[:, :, : 2 + per_k], qkvz[:, :, 2 + per_k :]
    of_rows = (rows.slots, rows.positions, rows.query_start_loc)
    inputs, matrices = state
    mixed, inputs = causal_conv(
        mixed.reshape(tokens, -1), params["delta_conv"].reshape(delta.conv_width, -1), None, inputs, *of_rows,
        max_query_len=rows.max_query_len, activation="silu",
    )  # fmt: skip
    mixed = mixed.reshape(tokens, delta.k_heads, -1, delta.head_dim)
    ba = linear("delta_ba", x, context, dtype=jnp.float32).reshape(tokens, delta.k_heads, 2, per_k)
    b, a = ba[:, :, 0].reshape(tokens, -1), ba[:, :, 1].reshape(tokens, -1)
    decay = -jnp.exp(params["delta_a_log"]) * jax.nn.softplus(a + params["delta_dt_bias"])
    out, matrices = gated_delta(
        mixed[:, :, 0], mixed[:, :, 1], mixed[:, :, 2:].reshape(tokens, delta.v_heads, -1), decay, jax.nn.sigmoid(b),
        matrices, *of_rows, max_query_len=rows.max_query_len,
    )  # fmt: skip
    out = _gated_norm(out, z.reshape(out.shape), params["delta_norm"], context.spec.norm_eps)
    return linear("delta_o", out.reshape(tokens, -1), context), (inputs, matrices)


def _short_conv(
    conv: ShortConv, x: Float[Array, "tokens hidden"], context: LayerContext, state: State, rows: StateRows
) -> tuple[Float[Array, "tokens hidden"], State]:
    """LFM2's gated short convolution."""
    params, (inputs,) = context.params, state
    b, c, values = jnp.split(linear_with_bias("conv_in", x, context), 3, axis=1)
    mixed, inputs = causal_conv(
        b * values, params["conv_kernel"], params.get("conv_kernel_bias"), inputs, rows.slots, rows.positions,
        rows.query_start_loc, max_query_len=rows.max_query_len,
    )  # fmt: skip
    return linear_with_bias("conv_out", c * mixed, context), (inputs,)


def _from_zeros(
    recurrence: Recurrence, x: Float[Array, "tokens hidden"], context: LayerContext, batch: int, length: int
) -> Float[Array, "tokens hidden"]:
    """`mix_by_state` for sequences of equal length, which are concatenated."""
    state = tuple(jnp.zeros((batch, *array.shape), array.dtype) for array in recurrence.state_shapes(x.dtype))
    starts = jnp.arange(batch + 1, dtype=jnp.int32) * length
    rows = StateRows(jnp.arange(batch, dtype=jnp.int32), jnp.zeros(batch, jnp.int32), starts, length)
    return mix_by_state(recurrence, x, context, state, rows)[0]


def _gated_norm(
    x: Float[Array, "tokens heads head_dim"], gate: Float[Array, "tokens heads head_dim"],
    weight: Float[Array, " head_dim"], eps: float,
) -> Float[Array, "tokens heads head_dim"]:  # fmt: skip
    """RMS norm over each head, times silu(gate). The norm is rounded to x's dtype before the gate, as in Qwen3-Next."""
    y = x.astype(jnp.float32)
    y *= jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    y = (weight * y.astype(x.dtype)).astype(jnp.float32)
    return (y * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
