"""grouped_lora: adds each row's own low-rank adapter to the result of a matmul (LoRA, arXiv:2106.09685)."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import expect_floats, expect_integers
from pallas_kernels.dot import dot, expect_product
from pallas_kernels.grouped_lora import cpu, mosaic_tpu, reference, triton, xla
from pallas_kernels.grouped_lora.pattern import Pattern, repeated
from pallas_kernels.platforms import (
    Implementation,
    compiled_on,
    default_device,
    pick,
    takes_native,
    traced_platform,
)

# `Implementation.refuse` takes (device, x, base, a, pattern)
IMPLEMENTATIONS = {
    "reference": Implementation(reference.grouped_lora),
    "xla": Implementation(xla.grouped_lora),
    "cpu": Implementation(cpu.grouped_lora, cpu.refuse),
    "triton": Implementation(compiled_on("cuda", triton.grouped_lora), triton.refuse),
    "mosaic_tpu": Implementation(compiled_on("tpu", mosaic_tpu.grouped_lora), mosaic_tpu.refuse),
}
# `Implementation.refuse` takes (device, h, base, b)
EXPAND_IMPLEMENTATIONS = {
    "reference": Implementation(reference.lora_expand),
    "xla": Implementation(xla.lora_expand),
    "cpu": Implementation(cpu.lora_expand, cpu.refuse_expand),
    "triton": Implementation(compiled_on("cuda", triton.lora_expand), triton.refuse_expand),
    "mosaic_tpu": Implementation(compiled_on("tpu", mosaic_tpu.lora_expand), mosaic_tpu.refuse_expand),
}


def grouped_lora(
    x: Float[Array, "rows in"],
    base: Float[Array, "rows out"],
    a: Float[Array, "layers slots parts R in"],
    b: Float[Array, "layers slots R out"],
    ranks: Int[Array, "layers slots parts"],
    scales: Float[Array, "layers slots parts"],
    slot_of_row: Int[Array, " rows"],
    num_rows: Int[Array, ""] | int,
    *,
    layer: Int[Array, ""] | int,
    pattern: Sequence[tuple[int, int]],
    implementation: str | None = None,
) -> Float[Array, "rows out"]:
    """base[n, o] + scale * sum over r below the true rank of B[r, o] * (A[r] . x[n]), with the adapter of row n.

    A fused matrix has several parts, each with its own A. An output uses the A, the rank and the scale of its part.
    Sums are float32. The result is rounded once, to base's dtype. In place if base is not used afterwards.

    x:           rows before the matmul. base: rows after it.
    a, b:        pools of adapters in slots, for all layers. They may have another dtype than x, such as bfloat16 with
                 x in float32. R is the largest rank. Numbers of a slot beyond its true rank are not used; they may be
                 NaN.
    ranks:       int32, at most R. 0: the slot has no adapter for this part.
    scales:      float32.
    slot_of_row: int32, the slot of each row's adapter. -1: no adapter. Others must be below `slots`, not checked.
    num_rows:    number of leading rows that are needed. Results of other rows are undefined.
    layer:       int32, index of the first axis of the pools, not checked. It may be traced, so that all layers share
                 one trace. The pools are not sliced, which could copy them.
    pattern:     static pairs (part, width): the next `width` outputs belong to this part. Repeated until all outputs
                 belong to one. ((0, q_per_kv * head_dim), (1, head_dim), (2, head_dim)) for q, k and v.
    implementation: None: the best one for the platform that the call is lowered for. "xla" is a loop over the adapters
                 of the batch. "cpu" is a native kernel for CPU: it reads the true ranks only, and a row's bits do not
                 depend on other rows, on R, or on the slot. "triton" is two kernels for NVIDIA. A row's bits depend on
                 whether the call has more than 256 rows, not on other rows. "mosaic_tpu" is two
                 kernels for TPU. On CPU these run in interpret mode. "reference" gathers an adapter for every row.

    Raises ValueError, which names the argument, if shapes or dtypes do not fit, or if the implementation refuses them.
    """
    pattern = _expect(x, base, a, b, ranks, scales, slot_of_row, pattern)
    layer = jnp.asarray(layer, jnp.int32)
    call = (x, base, a, b, ranks, scales, slot_of_row.astype(jnp.int32), jnp.asarray(num_rows, jnp.int32))
    if implementation is not None:
        return pick(IMPLEMENTATIONS, implementation, x, base, a, pattern)(*call, layer=layer, pattern=pattern)
    chosen = _choose(IMPLEMENTATIONS, x, base, a, pattern)
    kernels = {platform: functools.partial(each, pattern=pattern) for platform, each in chosen.items()}
    return _by_platform(call, layer, functools.partial(xla.grouped_lora, pattern=pattern), kernels)


def lora_dot(
    x: Float[Array, "rows in"],
    weight: Float[Array, "out in"],
    a: Float[Array, "layers slots parts R in"],
    b: Float[Array, "layers slots R out"],
    ranks: Int[Array, "layers slots parts"],
    scales: Float[Array, "layers slots parts"],
    slot_of_row: Int[Array, " rows"],
    num_rows: Int[Array, ""] | int,
    *,
    layer: Int[Array, ""] | int,
    pattern: Sequence[tuple[int, int]],
    dtype: Any = None,
) -> Float[Array, "rows out"]:
    """`dot`, then `grouped_lora` with its result as base. On CPU one native kernel, with the same bits.

    x, weight: of the same dtype. dtype: of the result; None: x's. The other arguments are those of `grouped_lora`.
    Raises ValueError as both functions.
    """
    dtype = x.dtype if dtype is None else jnp.dtype(dtype)
    expect_product(x, weight)
    base = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), dtype)
    pattern = _expect(x, base, a, b, ranks, scales, slot_of_row, pattern)
    layer = jnp.asarray(layer, jnp.int32)
    call = (x, weight, a, b, ranks, scales, slot_of_row.astype(jnp.int32), jnp.asarray(num_rows, jnp.int32))

    def separate(x: Array, weight: Array, *pools: Array, layer: Array) -> Array:
        return grouped_lora(x, dot(x, weight, pools[-1], dtype=dtype), *pools, layer=layer, pattern=pattern)

    if not base.size or not takes_native(cpu.refuse_dot, x, base, a, pattern):
        return separate(*call, layer=layer)
    return _by_platform(call, layer, separate, {"cpu": functools.partial(cpu.lora_dot, pattern=pattern, dtype=dtype)})


def lora_expand(
    h: Float[Array, "rows R"],
    base: Float[Array, "rows out"],
    b: Float[Array, "layers slots R out"],
    ranks: Int[Array, "layers slots 1"],
    scales: Float[Array, "layers slots 1"],
    slot_of_row: Int[Array, " rows"],
    num_rows: Int[Array, ""] | int,
    *,
    layer: Int[Array, ""] | int,
    implementation: str | None = None,
) -> Float[Array, "rows out"]:
    """base[n, o] + scale * sum over r below the true rank of B[r, o] * h[n, r]: the second half of `grouped_lora`.

    For an embedding, h[n] is the row of A that belongs to the token. h is float32; numbers beyond the true rank are not
    used. The other arguments and errors are those of `grouped_lora`, with one part.
    """
    expect_floats("h", h, "[rows, R]")
    if h.dtype != jnp.float32:
        raise ValueError(f"h of {h.dtype}: must be float32")
    expect_floats("b", b, "[layers, slots, R, out]")
    _expect_pool(h, base, b, ranks, scales, slot_of_row, (*b.shape[:2], 1, h.shape[1]))
    layer = jnp.asarray(layer, jnp.int32)
    call = (h, base, b, ranks, scales, slot_of_row.astype(jnp.int32), jnp.asarray(num_rows, jnp.int32))
    if implementation is not None:
        return pick(EXPAND_IMPLEMENTATIONS, implementation, h, base, b)(*call, layer=layer)
    return _by_platform(call, layer, xla.lora_expand, _choose(EXPAND_IMPLEMENTATIONS, h, base, b))


def _choose(implementations: Mapping[str, Implementation], *call: Any) -> dict[str, Callable[..., Any]]:
    """The kernel for the platform that a call is traced for, by the platform's name in JAX. Empty if none takes it."""
    traced = traced_platform()  # tracing a kernel takes 0.1 s: only for this platform
    if traced == "cpu":
        return {"cpu": implementations["cpu"].call} if takes_native(implementations["cpu"].refuse, *call) else {}
    for platform, each, name in (("gpu", "cuda", "triton"), ("tpu", "tpu", "mosaic_tpu")):
        if traced == platform and implementations[name].refuse(default_device(), *call) is None:
            return {each: implementations[name].call}
    return {}


def _by_platform(
    call: tuple[Any, ...], layer: Array, default: Callable[..., Any], kernels: Mapping[str, Callable[..., Any]]
) -> Any:
    """Call the kernel of the platform that is lowered for, or XLA operations."""
    if not kernels or not call[1].size:
        return default(*call, layer=layer)

    def with_layer(each: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arrays: each(*arrays[:-1], layer=arrays[-1])

    branches = {platform: with_layer(each) for platform, each in kernels.items()}
    return lax.platform_dependent(*call, layer, **branches, default=with_layer(default))


def _expect(
    x: Any, base: Any, a: Any, b: Any, ranks: Any, scales: Any, slot_of_row: Any, pattern: Sequence[tuple[int, int]]
) -> Pattern:
    """The pattern of all outputs. Raises ValueError unless the arguments of `grouped_lora` fit."""
    expect_floats("x", x, "[rows, in]")
    expect_floats("a", a, "[layers, slots, parts, R, in]")
    if a.shape[4] != x.shape[1]:
        raise ValueError(f"a {a.shape}: must be [layers, slots, parts, R, {x.shape[1]}], as x is {x.shape}")
    _expect_pool(x, base, b, ranks, scales, slot_of_row, a.shape[:4])
    if b.dtype != a.dtype:
        raise ValueError(f"b of {b.dtype}: must be {a.dtype}, as a")
    return repeated(pattern, a.shape[2], base.shape[1])


def _expect_pool(
    rows: Any, base: Any, b: Any, ranks: Any, scales: Any, slot_of_row: Any, shape: tuple[int, ...]
) -> None:
    """Raise ValueError unless the arrays fit `rows` and pools of [layers, slots, parts, R]."""
    layers, slots, parts, rank = shape
    expect_floats("base", base, "[rows, out]")
    expect_floats("b", b, "[layers, slots, R, out]")
    expect_integers("ranks", ranks, "[layers, slots, parts]")
    expect_floats("scales", scales, "[layers, slots, parts]")
    expect_integers("slot_of_row", slot_of_row, "[rows]")
    for name, array, expected in (
        ("base", base, (rows.shape[0], base.shape[1])),
        ("b", b, (layers, slots, rank, base.shape[1])),
        ("ranks", ranks, (layers, slots, parts)),
        ("scales", scales, (layers, slots, parts)),
        ("slot_of_row", slot_of_row, (rows.shape[0],)),
    ):
        if array.shape != expected:
            raise ValueError(f"{name} {array.shape}: must be {expected}")
    for name, array, dtype in (("ranks", ranks, jnp.int32), ("scales", scales, jnp.float32)):
        if array.dtype != dtype:
            raise ValueError(f"{name} of {array.dtype}: must be {jnp.dtype(dtype)}")
