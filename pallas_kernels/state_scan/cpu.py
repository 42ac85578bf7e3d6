"""state_scan for CPUs: calls the kernel of `cpu_kernel.py` through XLA's foreign function interface."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.native import library
from pallas_kernels.native.kinds import KINDS
from pallas_kernels.platforms import refuse_cpu
from pallas_kernels.state_scan.call import EPS, ScanCall

# indices of the int32 options; SCALE has the bits of a float32
OPTION_KIND, OPTION_DELTA, OPTION_SCALE, OPTION_CHANNELS = range(4)
MULTIPLE = 16  # k_dim and v_dim are multiples of it: whole vectors on every processor
KERNEL = "pallas_kernels.state_scan.cpu_kernel"


def refuse(device: Any, call: ScanCall) -> str | None:
    """Reason why the kernel cannot run; None if it can."""
    if refuse_cpu(device) is not None:
        return refuse_cpu(device)
    if not call.q.dtype == call.k.dtype == call.v.dtype:
        return f"q, k and v of {call.q.dtype}, {call.k.dtype} and {call.v.dtype}: it takes one dtype"
    if call.by_channel and not call.is_delta:
        return "a decay for each channel without the delta rule: it takes one decay for each head"
    sizes = call.states.shape[2:]
    if any(size % MULTIPLE for size in sizes):
        return f"states of {sizes[0]} x {sizes[1]} numbers: it takes multiples of {MULTIPLE}"
    return kernel().reason if call.v.size and call.states.size else "there is nothing to compute"


def kernel() -> library.Native:
    """The kernel in this process. Compiled or loaded at the first call."""
    return library.native(KERNEL, _check)


def state_scan(
    call: ScanCall,
) -> tuple[Float[Array, "tokens heads v_dim"], Float[Array, "slots heads k_dim v_dim"]]:
    """See `pallas_kernels.state_scan`. Results of padding tokens are zero."""
    name = kernel().name
    assert name is not None, "refuse() comes first"
    return _call(name, call)


def _call(name: str, call: ScanCall) -> Any:
    out, states = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (call.v, call.states))
    scale = np.float32(call.scale).view(np.int32)
    options = np.array([KINDS[call.v.dtype], call.is_delta, scale, call.by_channel], np.int32)
    skip = np.zeros(call.v.shape[1], np.float32) if call.skip is None else call.skip
    return jax.ffi.ffi_call(name, (out, states), input_output_aliases={7: 1})(
        options, call.q, call.k, call.v, call.decay, call.factor, skip, call.states, call.slots, call.positions,
        call.query_start_loc, call.slots if call.targets is None else call.targets,
    )  # fmt: skip


def _check(name: str) -> None:
    """Compare the kernel with float64. Raises ValueError. Called while a program is traced."""
    rng = np.random.default_rng(0)
    rows, tokens, slots = ((0, 0), (5, 7), (1, 3)), 8, 4  # tokens and position of each row
    starts, positions = np.cumsum([0, *(n for n, _ in rows)]), np.array([p for _, p in rows])
    for is_delta, by_channel in ((True, False), (True, True), (False, False)):
        q, k, v = (rng.standard_normal((tokens, heads, 48)).astype(np.float32) for heads in (1, 1, 2))
        decay, factor = -rng.uniform(0, 2, (tokens, 2, *[48] * by_channel)), rng.uniform(0, 1, (tokens, 2))
        skip, states = rng.standard_normal(2), rng.standard_normal((slots, 2, 48, 48))
        given = (q, k, v, *(x.astype(np.float32) for x in (decay, factor, skip, states)))
        with jax.ensure_compile_time_eval():
            call = ScanCall(
                *map(jnp.asarray, given), *(jnp.asarray(x, jnp.int32) for x in ((2, 0, 3), positions, starts)),
                scale=0.5, is_delta=is_delta, max_query_len=5,
            )  # fmt: skip
            found = [np.asarray(x) for x in _call(name, call)]
        expected = np.zeros((tokens, 2, 48))
        if is_delta:
            q, k = (x / np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True) + EPS) for x in (q, k))
        for slot, begin, end in ((0, starts[1], starts[2]), (3, starts[2], starts[3])):
            for t in range(begin, end):
                state = states[slot] * np.exp(decay[t]).reshape(2, -1, 1)
                predicted = np.einsum("k,hkv->hv", k[t, 0], state) if is_delta else 0
                states[slot] = state + k[t, 0][:, None] * (factor[t][:, None] * (v[t] - predicted))[:, None]
                expected[t] = 0.5 * np.einsum("k,hkv->hv", q[t, 0], states[slot]) + skip[:, None] * v[t]
        for what, right, wrong in (("outputs", expected, found[0]), ("states", states, found[1])):
            error = np.abs(wrong - right).max() / np.abs(right).max()
            if not error <= 1e-5:  # also if it is NaN
                kind = f"with {is_delta=}, {by_channel=}"
                raise ValueError(f"{what} of float32 differ from float64 by {error:.2g}, {kind}")
