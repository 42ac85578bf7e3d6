"""causal_conv for CPUs: calls the kernel of `cpu_kernel.py` through XLA's foreign function interface."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.native import library
from pallas_kernels.native.kinds import KINDS
from pallas_kernels.platforms import refuse_cpu

OPTION_KIND, OPTION_STATE_KIND, OPTION_SILU = range(3)  # indices of the int32 options
MULTIPLE = 16  # channels are a multiple of it: whole vectors on every processor
KERNEL = "pallas_kernels.causal_conv.cpu_kernel"


def refuse(device: Any, x: Any, states: Any, max_query_len: int) -> str | None:
    """Reason why the kernel cannot run; None if it can."""
    del max_query_len
    if refuse_cpu(device) is not None:
        return refuse_cpu(device)
    if states.dtype not in (x.dtype, jnp.float32):
        return f"states of {states.dtype}: it takes {x.dtype}, as x, or float32"
    if x.shape[1] % MULTIPLE:
        return f"{x.shape[1]} channels are not a multiple of {MULTIPLE}"
    return kernel().reason if x.size and states.size else "there is nothing to compute"


def kernel() -> library.Native:
    """The kernel in this process. Compiled or loaded at the first call."""
    return library.native(KERNEL, _check)


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
) -> tuple[Float[Array, "tokens channels"], Float[Array, "slots width_minus_1 channels"]]:
    """See `pallas_kernels.causal_conv`. Results of padding tokens are zero."""
    del max_query_len
    name = kernel().name
    assert name is not None, "refuse() comes first"
    return _call(name, (x, weight, bias, states, slots, positions, query_start_loc, targets), activation)


def _call(name: str, arrays: tuple[Any, ...], activation: str | None) -> Any:
    x, states = arrays[0], arrays[3]
    results = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (x, states))
    options = np.array([KINDS[x.dtype], KINDS[states.dtype], activation == "silu"], np.int32)
    return jax.ffi.ffi_call(name, results, input_output_aliases={4: 1})(options, *arrays)


def _check(name: str) -> None:
    """Compare the kernel with float64. Raises ValueError. Called while a program is traced."""
    rng = np.random.default_rng(0)
    x, weight, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((24, 272), (4, 272), (272,)))
    states = rng.standard_normal((3, 3, 272)).astype(np.float32)
    slots = np.array([2, 0])
    index = (slots, np.array([0, 9]), np.array([0, 20, 22]), slots)  # rows of 20 and 2 tokens, at 0 and 9
    with jax.ensure_compile_time_eval():
        arrays = (*map(jnp.asarray, (x, weight, bias, states)), *(jnp.asarray(i, jnp.int32) for i in index))
        found = [np.asarray(array, np.float64) for array in _call(name, arrays, "silu")]
    expected, after = np.zeros((24, 272)), states.astype(np.float64)
    for slot, begin, end, state in ((2, 0, 20, np.zeros((3, 272))), (0, 20, 22, states[0].astype(np.float64))):
        inputs = np.concatenate([state, x[begin:end]])
        for t in range(begin, end):
            y = bias + (weight * inputs[t - begin : t - begin + 4]).sum(0)
            expected[t] = y / (1 + np.exp(-y))
        after[slot] = inputs[-3:]
    for what, right, computed in (("outputs", expected, found[0]), ("states", after, found[1])):
        error = np.abs(computed - right).max() / np.abs(right).max()
        if not error <= 1e-6:  # also if it is NaN
            raise ValueError(f"{what} of float32 differ from float64 by {error:.2g}")
