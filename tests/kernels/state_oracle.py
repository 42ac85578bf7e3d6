"""Cases for the kernels with a state for each row, and independent recurrences in float64 numpy."""

import dataclasses
import functools

import jax
import numpy as np

from pallas_kernels.causal_conv import causal_conv
from pallas_kernels.gated_delta import gated_delta
from pallas_kernels.mamba2 import mamba2
from tests.support.device_arrays import device_array

# (tokens, position of the first token) of each row
RAGGED = ((1, 0), (0, 0), (17, 0), (5, 63), (1, 200), (2, 1))
CHUNKS = ((70, 0), (1, 0), (130, 62), (64, 64), (0, 0), (65, 100))
DECODES = ((1, 0), (1, 3), (0, 0), (1, 64), (1, 1), (1, 63))
# Largest absolute difference from float64, for outputs of size 1
TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-2, "float16": 4e-3}


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static facts of a call. Each shape needs one compiled program per implementation."""

    operation: str = "gated_delta"
    heads: int = 4        # of v in gated_delta, of x in mamba2
    k_heads: int = 2      # groups of mamba2
    k_dim: int = 16       # state_dim of mamba2, width of causal_conv
    v_dim: int = 16       # head_dim of mamba2; causal_conv has heads * v_dim channels
    dtype: str = "float32"
    rows: int = 6
    tokens: int = 32
    slots: int = 9
    bias: bool = True     # of causal_conv
    activation: str | None = "silu"
    by_channel: bool = False  # gated_delta with a decay for each channel
    targets: bool = False  # new states have other slots than the old ones, or none

    @property
    def channels(self) -> int:
        """Channels of causal_conv."""
        return self.heads * self.v_dim


def make_case(shape: Shape, rows=RAGGED, *, seed=0):
    """Arguments of a call, by name. What no row may read is NaN: states of other slots, and of rows at position 0."""
    rng = np.random.default_rng(seed)
    counts, positions = np.array(rows, np.int32).reshape(-1, 2).T
    counts, positions = (np.pad(a, (0, shape.rows - len(a))) for a in (counts, positions))
    order = rng.permutation(shape.slots)
    slots = order[: shape.rows]
    targets = np.concatenate([order[shape.rows :], [-1, shape.slots]])[: shape.rows]
    targets = np.pad(targets, (0, shape.rows - len(targets)), constant_values=-1)
    slots[counts == 0] = 0  # rows without tokens may name any slot
    normal, heads = rng.standard_normal, shape.heads
    count = shape.tokens
    if shape.operation == "causal_conv":
        case = {
            "x": device_array(normal((count, shape.channels)), shape.dtype),
            "weight": device_array(normal((shape.k_dim, shape.channels)) / 2, shape.dtype),
            "bias": device_array(normal(shape.channels), shape.dtype) if shape.bias else None,
        }
        states, dtype = normal((shape.slots, shape.k_dim - 1, shape.channels)), shape.dtype
    else:
        # decays over a few tokens, and over hundreds
        decay = -np.exp(rng.uniform(-7, 1, (count, heads, *[shape.k_dim] * shape.by_channel)))
        if shape.by_channel:
            # a chunk's decays add up to 640: float32 has no number exp(640), and exp(-640) is 0
            decay[..., 0], decay[::3, :, 1], decay[5:, :, 2], decay[..., 3] = -20, -20, -5, -1e-4
        grouped = [device_array(normal((count, shape.k_heads, shape.k_dim)), shape.dtype) for _ in range(2)]
        v = device_array(normal((count, heads, shape.v_dim)), shape.dtype)
        if shape.operation == "gated_delta":
            beta = rng.uniform(0, 1, (count, heads))
            case = {
                "q": grouped[0], "k": grouped[1], "v": v, "decay": device_array(decay, "float32"),
                "beta": device_array(beta, "float32"),
            }  # fmt: skip
        else:
            small = [device_array(np.asarray(x, np.float32) * shape.k_dim**-0.5, shape.dtype) for x in grouped]
            case = {
                "x": v, "dt": device_array(rng.uniform(0.001, 1, (count, heads)), "float32"),
                "a": device_array(-np.exp(rng.uniform(-3, 1, heads)), "float32"), "b": small[0], "c": small[1],
                "d": device_array(normal(heads), shape.dtype),
            }  # fmt: skip
        states, dtype = normal((shape.slots, heads, shape.k_dim, shape.v_dim)), "float32"
    poisoned = np.ones(shape.slots, bool)
    poisoned[slots[(counts > 0) & (positions > 0)]] = False
    states[poisoned] = np.nan
    starts = np.cumsum([0, *counts])
    index = {"slots": slots, "positions": positions, "query_start_loc": starts}
    index |= {"targets": rng.permutation(targets)} if shape.targets else {}
    return {
        **case, "states": device_array(states, dtype), **{n: device_array(x, "int32") for n, x in index.items()}
    }  # fmt: skip


def call_of(shape: Shape, implementation, max_query_len):
    """The operation as a function of arrays."""
    options = {"implementation": implementation, "max_query_len": max_query_len}
    if shape.operation == "causal_conv":
        return functools.partial(causal_conv, activation=shape.activation, **options)
    return functools.partial({"gated_delta": gated_delta, "mamba2": mamba2}[shape.operation], **options)


@functools.cache
def _program(shape: Shape, implementation, max_query_len):
    return jax.jit(call_of(shape, implementation, max_query_len))


def run(shape: Shape, case, implementation, *, max_query_len=None):
    """Outputs of all tokens but padding, and the states, in numpy."""
    most = max_query_len or shape.tokens
    out, states = _program(shape, implementation, most)(**case)
    return np.asarray(out)[: int(case["query_start_loc"][-1])], np.asarray(states)


def expected(shape: Shape, case):
    """The expected outputs and states, in float64. States that are not written keep their values, NaN included."""
    arrays = {name: None if x is None else np.asarray(x).astype(np.float64) for name, x in case.items()}
    starts, slots, positions = (np.asarray(case[n]) for n in ("query_start_loc", "slots", "positions"))
    first = arrays["x" if shape.operation != "gated_delta" else "v"]
    states, out = arrays["states"].copy(), np.zeros((starts[-1], *first.shape[1:]))
    step = {"causal_conv": _convolve, "gated_delta": _delta, "mamba2": _mamba2}[shape.operation]
    for row, slot in enumerate(slots):
        tokens = range(starts[row], starts[row + 1])
        if not tokens:
            continue
        state = np.zeros_like(states[slot]) if positions[row] == 0 else states[slot]
        for t in tokens:
            state, out[t] = step(shape, arrays, state, t)
        target = int(case["targets"][row]) if shape.targets else slot
        if 0 <= target < len(states):
            states[target] = state
    return out, states


def _convolve(shape, arrays, state, t):
    inputs = np.concatenate([state, arrays["x"][t][None]])
    y = (inputs * arrays["weight"]).sum(0) + (arrays["bias"] if shape.bias else 0)
    return inputs[1:], y / (1 + np.exp(-y)) if shape.activation else y


def _delta(shape, arrays, state, t):
    share = shape.heads // shape.k_heads
    q, k = (arrays[name][t].repeat(share, axis=0) for name in ("q", "k"))
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    state = state * np.exp(arrays["decay"][t]).reshape(shape.heads, -1, 1)
    change = arrays["beta"][t][:, None] * (arrays["v"][t] - np.einsum("hk,hkv->hv", k, state))
    state = state + np.einsum("hk,hv->hkv", k, change)
    return state, np.einsum("hk,hkv->hv", q, state) * shape.k_dim**-0.5


def _mamba2(shape, arrays, state, t):
    share = shape.heads // shape.k_heads
    b, c = (arrays[name][t].repeat(share, axis=0) for name in ("b", "c"))
    dt, x = arrays["dt"][t][:, None], arrays["x"][t]
    state = state * np.exp(dt * arrays["a"][:, None])[:, :, None] + np.einsum("hk,hv->hkv", b, dt * x)
    return state, np.einsum("hk,hkv->hv", c, state) + arrays["d"][:, None] * x


def check(shape: Shape, case, implementation, *, max_query_len=None, factor=1.0):
    """Assert that outputs and states are those of the oracle, and that other states are untouched."""
    out, states = run(shape, case, implementation, max_query_len=max_query_len)
    right, right_states = expected(shape, case)
    size = max(1.0, np.abs(right).max())
    np.testing.assert_allclose(out.astype(np.float64), right, atol=factor * TOLERANCE[shape.dtype] * size, rtol=0)
    tolerance = TOLERANCE["float32" if shape.operation != "causal_conv" else shape.dtype]
    np.testing.assert_allclose(states.astype(np.float64), right_states, atol=factor * tolerance * 4, rtol=0)
