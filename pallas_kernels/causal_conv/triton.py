"""causal_conv for NVIDIA in Pallas, lowered through Triton: one kernel, which updates the states in place.

A program has a row and a block of channels. Its earlier inputs stay in registers while it adds one token after the
other. So it is for rows of few tokens: a decode, or drafts that are checked.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.platforms import refuse_triton

Ref = Any  # an array inside a kernel, addressed by `.at`
MOST_TOKENS = 32   # of a row
BLOCK = 512        # channels of a program: 4 for each thread
MOST_NUMBERS = 64  # earlier inputs and weights of a thread


def refuse(device: Any, x: Array, states: Array, max_query_len: int) -> str | None:
    """Reason why the kernel cannot run; None if it can."""
    if max_query_len > MOST_TOKENS:
        return f"rows with {max_query_len} tokens: it takes up to {MOST_TOKENS}"
    if 2 * states.shape[1] * BLOCK // 128 > MOST_NUMBERS:
        return f"{states.shape[1]} earlier inputs: it takes up to {MOST_NUMBERS * 64 // BLOCK}"
    if not x.size or not states.size:
        return "there is nothing to compute"
    return refuse_triton(device)


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
    interpret: bool = False,
) -> tuple[Float[Array, "tokens channels"], Float[Array, "slots width_minus_1 channels"]]:
    """See `pallas_kernels.causal_conv`. interpret: run the kernel in XLA operations, on any platform."""
    channels = x.shape[1]
    block = min(BLOCK, pl.next_power_of_2(channels))
    given = (x, weight, bias, slots, positions, query_start_loc, targets)
    out, states = pl.pallas_call(
        functools.partial(_kernel, block=block, max_query_len=max_query_len, activation=activation),
        [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (x, states)],
        grid=(slots.shape[0], pl.cdiv(channels, block)), interpret=interpret, name="causal_conv",
        input_output_aliases={len(given): 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
    )(*given, states)  # fmt: skip
    return out, states


def _kernel(
    x_ref: Ref, weight_ref: Ref, bias_ref: Ref, slots_ref: Ref, positions_ref: Ref, starts_ref: Ref, targets_ref: Ref,
    _: Ref, out_ref: Ref, states_ref: Ref, *, block: int, max_query_len: int, activation: str | None,
) -> None:  # fmt: skip
    """One row and block of channels."""
    row = pl.program_id(0)
    channel = pl.program_id(1) * block + jnp.arange(block)
    real = channel < x_ref.shape[1]
    begin, end = starts_ref[row], starts_ref[row + 1]
    before = states_ref.shape[1]

    def load(ref: Ref, *index: Any, mask: Array) -> Array:
        return plgpu.load(ref.at[(*index, channel)], mask=mask, other=0.0).astype(jnp.float32)

    @pl.when(end > begin)
    def _compute() -> None:
        weights = [load(weight_ref, jnp.int32(j), mask=real) for j in range(before + 1)]
        bias = load(bias_ref, mask=real)
        is_continued = real & (positions_ref[row] > 0)
        slot, target = slots_ref[row], targets_ref[row]
        earlier = tuple(load(states_ref, slot, jnp.int32(j), mask=is_continued) for j in range(before))

        def add(t: Array, earlier: tuple[Array, ...]) -> tuple[Array, ...]:
            inputs = (*earlier, load(x_ref, t, mask=real).astype(states_ref.dtype).astype(jnp.float32))
            y = bias
            for weight, each in zip(weights, inputs, strict=True):
                y = y + weight * each
            y = y * lax.logistic(y) if activation == "silu" else y
            plgpu.store(out_ref.at[t, channel], y.astype(out_ref.dtype), mask=real)
            return inputs[1:]

        earlier = add(begin, earlier) if max_query_len == 1 else lax.fori_loop(begin, end, add, earlier)
        is_written = real & (target >= 0) & (target < states_ref.shape[0])
        for j, each in enumerate(earlier):
            plgpu.store(states_ref.at[target, jnp.int32(j), channel], each.astype(states_ref.dtype), mask=is_written)
