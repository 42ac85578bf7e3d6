"""grouped_lora for CPUs: calls the kernel of `cpu_kernel.py` through XLA's foreign function interface."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_lora import reference
from pallas_kernels.grouped_lora.pattern import Pattern
from pallas_kernels.native import library
from pallas_kernels.native.kinds import KINDS
from pallas_kernels.platforms import refuse_cpu

# indices of the int32 options; EXPANDS: x is h, and a is not used
OPTION_KIND, OPTION_BASE_KIND, OPTION_POOL_KIND, OPTION_EXPANDS = range(4)
FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
MULTIPLE = 16  # widths are multiples of it: whole vectors on every processor
KERNEL = "pallas_kernels.grouped_lora.cpu_kernel"


def refuse(device: Any, x: Any, base: Any, a: Any, pattern: Pattern) -> str | None:
    """Reason why the kernel cannot run; None if it can."""
    if refuse_cpu(device) is not None:
        return refuse_cpu(device)
    if x.shape[1] % MULTIPLE:
        return f"rows of {x.shape[1]} numbers are not a multiple of {MULTIPLE}"
    return _refuse(x, base, a, pattern)


def refuse_expand(device: Any, h: Any, base: Any, b: Any) -> str | None:
    """Reason why the kernel cannot run `lora_expand`; None if it can."""
    return refuse_cpu(device) or _refuse(h, base, b, ((0, base.shape[1]),))


def _refuse(x: Any, base: Any, pool: Any, pattern: Pattern) -> str | None:
    for array in (x, base, pool):
        if array.dtype not in FLOATS:
            return f"it computes bfloat16 or float32, not {array.dtype}"
        if not array.size:
            return f"an array of {array.shape} is empty"
    for _, width in pattern:
        if width % MULTIPLE:
            return f"{width} outputs are not a multiple of {MULTIPLE}"
    return kernel().reason


def kernel() -> library.Native:
    """The kernel in this process. Compiled or loaded at the first call."""
    return library.native(KERNEL, _check)


def grouped_lora(
    x: Float[Array, "rows in"],
    base: Float[Array, "rows out"],
    a: Float[Array, "layers slots parts R in"],
    b: Float[Array, "layers slots R out"],
    ranks: Int[Array, "layers slots parts"],
    scales: Float[Array, "layers slots parts"],
    slot_of_row: Int[Array, " rows"],
    num_rows: Int[Array, ""],
    *,
    layer: Int[Array, ""],
    pattern: Pattern,
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.grouped_lora`. Rows after `num_rows` keep their bits."""
    name = kernel().name
    assert name is not None, "refuse() comes first"
    return _call(name, x, base, a, b, ranks, scales, slot_of_row, num_rows, layer, pattern)


def lora_expand(
    h: Float[Array, "rows R"],
    base: Float[Array, "rows out"],
    b: Float[Array, "layers slots R out"],
    ranks: Int[Array, "layers slots 1"],
    scales: Float[Array, "layers slots 1"],
    slot_of_row: Int[Array, " rows"],
    num_rows: Int[Array, ""],
    *,
    layer: Int[Array, ""],
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.lora_expand`. Rows after `num_rows` keep their bits."""
    name = kernel().name
    assert name is not None, "refuse_expand() comes first"
    return _call(name, h, base, None, b, ranks, scales, slot_of_row, num_rows, layer, ((0, base.shape[1]),))


def _call(
    name: str, x: Array, base: Array, a: Array | None, b: Array, ranks: Array, scales: Array, slot_of_row: Array,
    num_rows: Array, layer: Array, pattern: Pattern,
) -> Array:  # fmt: skip
    options = np.array([KINDS[x.dtype], KINDS[base.dtype], KINDS[b.dtype], a is None], np.int32)
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(base.shape, base.dtype), input_output_aliases={10: 0})
    return call(
        options, num_rows.reshape(1), layer.reshape(1), slot_of_row, x, options if a is None else a, b, ranks, scales,
        np.array(pattern, np.int32), base,
    )  # fmt: skip


def _check(name: str) -> None:
    """Compare the kernel with the reference. Raises ValueError. Called while a program is traced."""
    rng = np.random.default_rng(0)
    pattern, slots = ((0, 48), (1, 16), (2, 16)), np.array([2, 0, 0, 0, 0, 0, -1, 1, 0, 2, 2], np.int32)
    ranks = np.array([[[0, 1, 2], [3, 4, 5], [6, 7, 8]], [[5, 8, 1], [8, 0, 3], [7, 2, 6]]], np.int32)
    scales = rng.uniform(0.5, 2, (2, 3, 3)).astype(np.float32)
    with jax.ensure_compile_time_eval():
        for dtype, pool, limit in ((jnp.float32, jnp.bfloat16, 1e-6), (jnp.bfloat16, jnp.float32, 1e-2)):
            x, base = (jnp.asarray(rng.standard_normal((11, width)), dtype) for width in (96, 80))
            a, b = (jnp.asarray(rng.standard_normal((2, 3, *shape)), pool) for shape in ((3, 8, 96), (8, 80)))
            call = x, base, a, b, *map(jnp.asarray, (ranks, scales, slots, np.int32(10)))
            expected = reference.grouped_lora(*call, layer=jnp.int32(1), pattern=pattern)
            out = _call(name, *call, jnp.int32(1), pattern)
            out, expected = (np.asarray(array, np.float64)[:10] for array in (out, expected))
            error = np.abs(out - expected).max() / np.abs(expected).max()
            if not error <= limit:  # also if it is NaN
                raise ValueError(f"results of {jnp.dtype(dtype)} differ from the reference by {error:.2g}")
