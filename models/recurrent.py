"""Layers with a state of fixed size per request: gated DeltaNet, with one decay a head or one a channel (Kimi Linear),
short convolutions (LFM2), and Mamba-2.

A layer's state is a tuple of arrays with one slot per request (`Recurrence.state_shapes`). A step reads and writes the
slots of its rows, in place.

1. `token_inputs` multiplies the hidden states with weights: what each token adds to the state, and gates.
2. `advance` computes the tokens of each row in order. It alone reads and writes states.
3. `_output` applies gates and the output matrix.

A step with drafts does not write states (`StateRows.writes`). It returns the inputs of its tokens. When the accepted
drafts are known, `advance` computes the states from the inputs of the kept tokens. `mamba2` has the three parts of
Mamba-2.
"""

import dataclasses
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.models.layers import normalise_heads
from jpaged.models.linear import LayerContext, linear, linear_with_bias
from jpaged.models.mamba2 import advance_mamba2, mamba2_inputs, mamba2_output
from jpaged.models.recurrent_spec import GatedDelta, KimiDelta, Mamba2, Recurrence, ShortConv
from jpaged.models.spec import Params
from pallas_kernels.causal_conv import causal_conv
from pallas_kernels.gated_delta import gated_delta

# Arrays of a layer, each [slots, ...]; the first has inputs of a convolution. None for training
State: TypeAlias = Any
Inputs: TypeAlias = tuple[Array, ...]  # of `Recurrence.input_shapes`, each [tokens, ...]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["slots", "positions", "query_start_loc", "targets"], meta_fields=["max_query_len", "writes"],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class StateRows:
    """The rows of a step, as a recurrent layer needs them. Padding rows have no tokens."""

    slots: Int[Array, " rows"]      # slot of each row's state
    positions: Int[Array, " rows"]  # position of each row's first token; at 0, the state before it is zeros
    query_start_loc: Int[Array, " rows_plus_1"]
    max_query_len: int              # upper bound of the tokens of a row
    targets: Int[Array, " rows"] | None = None  # slot of each row's new state; None: its own
    writes: bool = True             # False: states stay as they are, and inputs of tokens are returned

    def of_kernel(self) -> dict[str, Any]:
        """Arguments of a kernel with states."""
        targets = self.targets if self.writes else jnp.full_like(self.slots, -1)
        return {
            "slots": self.slots, "positions": self.positions, "query_start_loc": self.query_start_loc,
            "max_query_len": self.max_query_len, "targets": targets,
        }  # fmt: skip


def mix_by_state(
    recurrence: Recurrence, x: Float[Array, "tokens hidden"], context: LayerContext, state: State, rows: Any
) -> tuple[Float[Array, "tokens hidden"], State]:
    """A recurrent layer, from the normalised hidden states to the output matrix. Returns (output, state).

    rows: StateRows. Without a state (None) it is any array [batch, length]: sequences of equal length from position 0.
    If it does not write, the returned state is (state, Inputs).
    """
    if state is None:
        return _from_zeros(recurrence, x, context, *rows.shape), None
    inputs, gate = token_inputs(recurrence, x, context)
    mixed, state = advance(recurrence, context.params, inputs, state, rows)
    return _output(recurrence, mixed, gate, context), state if rows.writes else (state, inputs)


def token_inputs(
    recurrence: Recurrence, x: Float[Array, "tokens hidden"], context: LayerContext
) -> tuple[Inputs, Float[Array, "tokens ..."]]:
    """Inputs of the state for each token, and gates of the output."""
    match recurrence:
        case KimiDelta():
            return _kimi_inputs(recurrence, x, context)
        case GatedDelta():
            return _delta_inputs(recurrence, x, context)
        case ShortConv():
            b, c, values = jnp.split(linear_with_bias("conv_in", x, context), 3, axis=1)
            return (b * values,), c
        case Mamba2():
            return mamba2_inputs(recurrence, x, context)
    raise TypeError(f"{type(recurrence).__name__}: not a kind of recurrent layer")


def advance(
    recurrence: Recurrence, params: Params, inputs: Inputs, state: State, rows: StateRows
) -> tuple[Float[Array, "tokens ..."], State]:
    """Compute tokens in order. Returns their outputs before the gates, and the states. params: `state_leaves`."""
    match recurrence:
        case GatedDelta():
            return _advance_delta(recurrence, params, inputs, state, rows)
        case ShortConv():
            (x,), (earlier,) = inputs, state
            kernel, bias = params["conv_kernel"], params.get("conv_kernel_bias")
            mixed, earlier = causal_conv(x, kernel, bias, earlier, **rows.of_kernel())
            return mixed, (earlier,)
        case Mamba2():
            return advance_mamba2(recurrence, params, inputs, state, rows)
    raise TypeError(f"{type(recurrence).__name__}: not a kind of recurrent layer")


def _output(
    recurrence: Recurrence, mixed: Float[Array, "tokens ..."], gate: Float[Array, "tokens ..."], context: LayerContext
) -> Float[Array, "tokens hidden"]:
    """Gate the outputs of `advance`, and multiply them with the output matrix."""
    match recurrence:
        case KimiDelta():
            return _kimi_output(mixed, gate, context)
        case GatedDelta():
            out = _gated_norm(mixed, gate.reshape(mixed.shape), context)
            return linear_with_bias("delta_o", out.reshape(out.shape[0], -1), context)
        case ShortConv():
            return linear_with_bias("conv_out", gate * mixed, context)
        case Mamba2():
            return mamba2_output(recurrence, mixed, gate, context)
    raise TypeError(f"{type(recurrence).__name__}: not a kind of recurrent layer")


def _delta_inputs(
    delta: GatedDelta, x: Float[Array, "tokens hidden"], context: LayerContext
) -> tuple[Inputs, Float[Array, "tokens ..."]]:
    """`token_inputs` of gated DeltaNet (arXiv:2412.06464)."""
    params, tokens, per_k = context.params, x.shape[0], delta.v_per_k
    qkvz = linear("delta_qkvz", x, context).reshape(tokens, -1, 2 + 2 * per_k, delta.head_dim)  # of this device
    mixed, z = qkvz[:, :, : 2 + per_k], qkvz[:, :, 2 + per_k :]
    ba = linear("delta_ba", x, context, dtype=jnp.float32).reshape(tokens, -1, 2, per_k)
    b, a = ba[:, :, 0].reshape(tokens, -1), ba[:, :, 1].reshape(tokens, -1)
    decay = -jnp.exp(params["delta_a_log"]) * jax.nn.softplus(a + params["delta_dt_bias"])
    numbers = (decay, jax.nn.sigmoid(b))
    if context.shards.count > 1:  # `delta_ba` is whole: a device's part would be too small for whole tiles
        heads = mixed.shape[1] * per_k
        first = context.shards.first(heads)
        numbers = (lax.dynamic_slice_in_dim(each, first, heads, axis=1) for each in numbers)
    return (mixed.reshape(tokens, -1), *numbers), z


def _advance_delta(
    delta: GatedDelta, params: Params, inputs: Inputs, state: State, rows: StateRows
) -> tuple[Float[Array, "tokens heads head_dim"], State]:
    """`advance` of gated DeltaNet and of Kimi Delta Attention, with a convolution over q, k and v."""
    (mixed, decay, beta), (earlier, matrices) = inputs, state
    kernel = params["delta_conv"].reshape(delta.conv_width, -1)
    mixed, earlier = causal_conv(mixed, kernel, None, earlier, activation="silu", **rows.of_kernel())
    mixed = mixed.reshape(len(mixed), -1, 2 + delta.v_per_k, delta.head_dim)
    values = mixed[:, :, 2:].reshape(len(mixed), -1, delta.head_dim)
    out, matrices = gated_delta(mixed[:, :, 0], mixed[:, :, 1], values, decay, beta, matrices, **rows.of_kernel())
    return out, (earlier, matrices)


def _from_zeros(
    recurrence: Recurrence, x: Float[Array, "tokens hidden"], context: LayerContext, batch: int, length: int
) -> Float[Array, "tokens hidden"]:
    """`mix_by_state` for sequences of equal length, which are concatenated."""
    state = tuple(jnp.zeros((batch, *array.shape), array.dtype) for array in recurrence.state_shapes(x.dtype))
    starts = jnp.arange(batch + 1, dtype=jnp.int32) * length
    rows = StateRows(jnp.arange(batch, dtype=jnp.int32), jnp.zeros(batch, jnp.int32), starts, length)
    return mix_by_state(recurrence, x, context, state, rows)[0]


def _gated_norm(
    x: Float[Array, "tokens heads head_dim"], gate: Float[Array, "tokens heads head_dim"], context: LayerContext
) -> Float[Array, "tokens heads head_dim"]:
    """RMS norm over each head, times silu(gate). The norm is rounded to x's dtype before the gate, as in Qwen3-Next."""
    y = normalise_heads(x, context.params["delta_norm"], context).astype(jnp.float32)
    return (y * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


# -- Kimi Delta Attention (arXiv:2510.26692) ------------------------------------------------------------------------
# Decays and output gates have matrices of low rank. The norm of the output has a sigmoid gate, not SiLU.


def _kimi_inputs(
    delta: KimiDelta, x: Float[Array, "tokens hidden"], context: LayerContext
) -> tuple[tuple[Array, ...], Float[Array, "tokens heads head_dim"]]:
    """`token_inputs`: input of the convolution, decays and beta; gates."""
    params, tokens, head_dim = context.params, x.shape[0], delta.head_dim
    mixed = linear("delta_qkv", x, context)
    compressed = linear("delta_low", x, context)
    forget = linear("delta_forget", compressed[:, :head_dim], context, dtype=jnp.float32)
    gate = linear("delta_gate", compressed[:, head_dim:], context).reshape(tokens, -1, head_dim)
    # these three are whole on every device: a device's part would be too small for whole tiles
    beta = jax.nn.sigmoid(linear("delta_beta", x, context, dtype=jnp.float32))
    rate, bias = -jnp.exp(params["delta_a_log"]), params["delta_dt_bias"]
    if context.shards.count > 1:
        heads = gate.shape[1]
        first = context.shards.first(heads)
        beta = lax.dynamic_slice_in_dim(beta, first, heads, axis=1)
        rate, bias = (lax.dynamic_slice_in_dim(each, first, heads, axis=0) for each in (rate, bias))
    decay = rate[:, None] * jax.nn.softplus(forget.reshape(gate.shape) + bias)
    return (mixed, decay, beta), gate


def _kimi_output(
    mixed: Float[Array, "tokens heads head_dim"], gate: Float[Array, "tokens heads head_dim"], context: LayerContext
) -> Float[Array, "tokens hidden"]:
    """Norm over each head, gate, and the output matrix. Norm and gate are in float32."""
    weight = context.params["delta_norm"].astype(jnp.float32)
    y = normalise_heads(mixed.astype(jnp.float32), weight, context) * jax.nn.sigmoid(gate.astype(jnp.float32))
    return linear_with_bias("delta_o", y.astype(mixed.dtype).reshape(mixed.shape[0], -1), context)
