"""grouped_lora for CPUs: calls the kernel of `cpu_kernel.py` through XLA's foreign function interface."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.dot import cpu as dot
from pallas_kernels.grouped_lora import reference
from pallas_kernels.grouped_lora.pattern import Pattern
from pallas_kernels.native import library
from pallas_kernels.native.kinds import KINDS
from pallas_kernels.platforms import refuse_cpu

# indices of the int32 options; EXPANDS: x is h, and a is not used. MULTIPLIES: the last argument is weights, not base
OPTION_KIND, OPTION_BASE_KIND, OPTION_POOL_KIND, OPTION_EXPANDS, OPTION_MULTIPLIES = range(5)
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


def refuse_dot(device: Any, x: Any, base: Any, a: Any, pattern: Pattern) -> str | None:
    """Reason why the kernel cannot run `lora_dot`; None if it can. base: shape and dtype of the result."""
    return refuse_cpu(device) or dot.refuse_rows(x, base.dtype) or refuse(device, x, base, a, pattern)


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


def lora_dot(
    x: Float[Array, "rows in"],
    weight: Float[Array, "out in"],
    a: Float[Array, "layers slots parts R in"],
    b: Float[Array, "layers slots R out"],
    ranks: Int[Array, "layers slots parts"],
    scales: Float[Array, "layers slots parts"],
    slot_of_row: Int[Array, " rows"],
    num_rows: Int[Array, ""],
    *,
    layer: Int[Array, ""],
    pattern: Pattern,
    dtype: Any,
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.lora_dot`. Rows after `num_rows` are zero."""
    name = kernel().name
    assert name is not None, "refuse_dot() comes first"
    result = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), dtype)
    return _call(name, x, result, a, b, ranks, scales, slot_of_row, num_rows, layer, pattern, weight=weight)


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
    name: str, x: Array, base: Array | jax.ShapeDtypeStruct, a: Array | None, b: Array, ranks: Array, scales: Array,
    slot_of_row: Array, num_rows: Array, layer: Array, pattern: Pattern, *, weight: Array | None = None,
) -> Array:  # fmt: skip
    """Call the kernel. With a weight, `base` has the shape and the dtype of the result."""
    options = np.array([KINDS[x.dtype], KINDS[base.dtype], KINDS[b.dtype], a is None, weight is not None], np.int32)
    result, aliases = jax.ShapeDtypeStruct(base.shape, base.dtype), {} if weight is not None else {10: 0}
    call = jax.ffi.ffi_call(name, result, input_output_aliases=aliases)
    return call(
        options, num_rows.reshape(1), layer.reshape(1), slot_of_row, x, options if a is None else a, b, ranks, scales,
        np.array(pattern, np.int32), base if weight is None else weight,
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
            weight = jnp.asarray(rng.standard_normal((80, 96)), dtype)
            added = reference.grouped_lora(x, jnp.zeros_like(base), *call[2:], layer=jnp.int32(1), pattern=pattern)
            whole = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T + np.asarray(added, np.float64)
            product = _call(name, x, base, *call[2:], jnp.int32(1), pattern, weight=weight)
            for each, wanted in ((out, expected), (product, whole)):
                found, wanted = (np.asarray(array, np.float64)[:10] for array in (each, wanted))
                error = np.abs(found - wanted).max() / np.abs(wanted).max()
                if not error <= limit:  # also if it is NaN
                    raise ValueError(f"results of {jnp.dtype(dtype)} differ from the reference by {error:.2g}")
