"""add_norm for NVIDIA in Pallas, lowered through Triton: one program for each row, so rows do not change each other."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.add_norm.reference import tree_sum
from pallas_kernels.platforms import refuse_triton

Ref = Any  # an array inside a kernel, addressed by `.at`
MAX_WIDTH = 16_384  # float32 numbers of a row that 16 warps hold in 32 registers a thread


def add_norm(
    parts: Float[Array, "parts rows width"] | None, residual: Float[Array, "rows width"],
    weight: Float[Array, "layers width"] | None, layer: Int[Array, ""], *, eps: float, interpret: bool = False,
) -> tuple[Float[Array, "rows width"], Float[Array, "rows width"] | None]:  # fmt: skip
    """See `pallas_kernels.add_norm`. interpret: run the kernel in XLA operations, on any platform."""
    rows, width = residual.shape
    optional = {"parts": parts, "weight": weight}
    given = {name: value for name, value in optional.items() if value is not None}
    results = [jax.ShapeDtypeStruct((rows, width), residual.dtype)] * len(given)
    made = pl.pallas_call(
        functools.partial(_kernel, names=tuple(given), eps=eps),
        results, grid=(rows,), interpret=interpret, name="add_norm",
        compiler_params=plgpu.CompilerParams(num_warps=warps_of(width), num_stages=1),
    )(layer.reshape(1), residual, *given.values())  # fmt: skip
    total = made[0] if parts is not None else residual
    return total, None if weight is None else made[-1]


def warps_of(width: int) -> int:
    """Warps of a program: a thread holds at most 32 numbers of its row."""
    return max(1, min(16, pl.next_power_of_2(width) // 512))


def refuse(device: Any, width: int) -> str | None:
    """Reason why the kernel cannot take rows of this width on a jax Device; None if it can."""
    if width > MAX_WIDTH:
        return f"rows of {width} numbers: a program holds at most {MAX_WIDTH}"
    return refuse_triton(device)


def _kernel(layer_ref: Ref, residual_ref: Ref, *refs: Ref, names: tuple[str, ...], eps: float) -> None:
    given, outputs = dict(zip(names, refs, strict=False)), refs[len(names) :]
    width, dtype, row = residual_ref.shape[1], residual_ref.dtype, pl.program_id(0)
    column = jnp.arange(pl.next_power_of_2(width))
    mask = None if width == column.shape[0] else column < width

    def load(at: Any) -> Array:
        return plgpu.load(at, mask=mask, other=None if mask is None else 0.0).astype(jnp.float32)

    def store(ref: Ref, values: Array) -> None:
        # masked numbers point past the end, because interpret mode would write clamped duplicates
        target = column if mask is None else jnp.where(mask, column, width)
        plgpu.store(ref.at[row, target], values.astype(dtype), mask=mask)

    total = load(residual_ref.at[row, column])
    if "parts" in given:
        parts = given["parts"]
        added = tree_sum([load(parts.at[part, row, column]) for part in range(parts.shape[0])])
        # rounded before and after the sum, as separate operations would be
        total = (total + added.astype(dtype).astype(jnp.float32)).astype(dtype).astype(jnp.float32)
        store(outputs[0], total)
    if "weight" in given:
        factor = lax.rsqrt((total * total).sum() / width + eps)
        weight = load(given["weight"].at[layer_ref[0], column]).astype(dtype).astype(jnp.float32)
        store(outputs[-1], (total * factor).astype(dtype).astype(jnp.float32) * weight)
