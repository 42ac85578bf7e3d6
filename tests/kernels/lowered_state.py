"""Calls of the kernels with a state that must lower and compile for accelerators: real models' shapes, without data."""

import functools

from pallas_kernels.causal_conv import causal_conv
from pallas_kernels.gated_delta import gated_delta
from pallas_kernels.mamba2 import mamba2
from tests.kernels.lowered import array

ROWS, TOKENS, SLOTS = 8, 512, 64
# name: operation, heads, heads of q and k or groups, k_dim or state_dim, v_dim or head_dim, dtype
SCANS = {
    "qwen3-next-80b": ("gated_delta", 32, 16, 128, 128, "bfloat16"),
    "qwen3.5-float32": ("gated_delta", 16, 16, 128, 128, "float32"),
    "kimi-linear-48b": ("gated_delta", 32, 32, 128, 128, "bfloat16"),
    "nemotron-h-8b": ("mamba2", 128, 8, 128, 64, "bfloat16"),
    "granite-4-h-small": ("mamba2", 128, 1, 128, 64, "bfloat16"),
    "falcon-h1-34b": ("mamba2", 32, 2, 256, 128, "bfloat16"),
}
BY_CHANNEL = ("kimi-linear-48b",)  # with a decay for each channel
# name: channels, width, dtype
CONVOLUTIONS = {
    "qwen3-next-80b": (8192, 4, "bfloat16"), "lfm2-1.2b": (2048, 3, "bfloat16"), "float32": (1792, 4, "float32"),
}  # fmt: skip


def scan(name, max_query_len, implementation):
    """A function of arrays, and ShapeDtypeStructs as its arguments. The states are argument STATES[operation]."""
    operation, heads, k_heads, k_dim, v_dim, dtype = SCANS[name]
    tokens = ROWS if max_query_len == 1 else TOKENS
    options = {"max_query_len": max_query_len, "implementation": implementation}
    grouped, whole = array((tokens, k_heads, k_dim), dtype), array((tokens, heads, v_dim), dtype)
    numbers, each = array((tokens, heads), "float32"), array((heads,), "float32")
    states = array((SLOTS, heads, k_dim, v_dim), "float32")
    if operation == "gated_delta":
        decay = array((tokens, heads, k_dim), "float32") if name in BY_CHANNEL else numbers
        return functools.partial(gated_delta, **options), (grouped, grouped, whole, decay, numbers, states, *_index())
    return functools.partial(mamba2, **options), (whole, numbers, each, grouped, grouped, each, states, *_index())


def to_targets(name, max_query_len, implementation):
    """`scan` with another slot for each new state."""
    call, arguments = scan(name, max_query_len, implementation)
    return lambda *given: call(*given[:-1], targets=given[-1]), (*arguments, array((ROWS,), "int32"))


STATES = {"gated_delta": 5, "mamba2": 6}


def convolution(name, max_query_len, implementation):
    """As `scan`; the states are argument 3."""
    channels, width, dtype = CONVOLUTIONS[name]
    tokens = ROWS if max_query_len == 1 else TOKENS
    call = functools.partial(
        causal_conv, max_query_len=max_query_len, activation="silu", implementation=implementation
    )
    return call, (
        array((tokens, channels), dtype), array((width, channels), dtype), array((channels,), dtype),
        array((SLOTS, width - 1, channels), dtype), *_index(),
    )  # fmt: skip


def _index():
    return array((ROWS,), "int32"), array((ROWS,), "int32"), array((ROWS + 1,), "int32")
