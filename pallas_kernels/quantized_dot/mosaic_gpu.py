"""quantized_dot of fp8 and fp8 for Hopper in Pallas, lowered through Mosaic GPU: for many rows.

Triton multiplies fp8 on Hopper as float16, at half the rate. Hopper's own fp8 matmuls add with about 14 bits, so Triton
does not use them for a float32 sum, and Pallas has no option that allows it. Here a sum of fp8 products has 128 inputs.
It is multiplied by the scales and added in float32, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3.2).

A block computes 128 rows and 128 outputs. Two warp groups multiply 64 rows each. The third copies tiles of x, of the
weights and of their scales to shared memory, as soon as a slot is free.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.platforms import nvidia_capability
from pallas_kernels.quantized_dot.weight import QuantizedWeight, refuse_activations
from pallas_kernels.quantized_dot.xla import quantise_rows_to_fp8

Ref = Any  # an array inside a kernel, addressed by `.at`
ROWS, OUTPUTS, INPUTS = 128, 128, 128  # of a tile
UNIT_ROWS = 64  # rows of a warp group, and of a matmul
STAGES = 4      # tiles in shared memory, of 33 KiB; 32 or 64 KiB are for the results
REGISTERS, COPY_REGISTERS = 232, 40  # of a thread that multiplies, and of one that copies
_ROWS, _OUTPUTS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # a number per row, and per output


class _Shared(NamedTuple):
    """References to a block's shared memory."""

    x: Ref            # [stages, 2, 64, inputs]
    codes: Ref        # [stages, outputs, inputs]
    row_scales: Ref   # float32[stages, 2, 64]
    scales: Ref       # float32[stages, outputs]
    out: Ref          # [2, 64, outputs]
    here: Ref
    free: Ref


def refuse(device: Any, x: Any, weight: QuantizedWeight, dtype: Any) -> str | None:
    """Reason why the kernel cannot take a call on a jax Device; None if it can."""
    del x
    if weight.layout != "rows" or weight.activations != "fp8":
        found = f"{weight.layout}, {weight.activations}"
        return f"it multiplies weights in the layout rows with activations=fp8, not {found}"
    if (reason := refuse_activations(weight)) is not None:
        return reason
    if weight.num_outputs % OUTPUTS or weight.shape[-1] % INPUTS:
        return f"{weight.num_outputs} outputs and {weight.shape[-1]} inputs: must be multiples of {OUTPUTS}"
    if weight.groups > 1 and weight.group_size % INPUTS:
        return f"groups of {weight.group_size} inputs: must be a multiple of {INPUTS}, or all inputs"
    if jnp.dtype(dtype).itemsize not in (2, 4):
        return f"results of {jnp.dtype(dtype)}: must be float32, bfloat16 or float16"
    if jax.__version_info__ < (0, 11):
        return f"it needs JAX 0.11 or newer, this is {jax.__version__}"
    if device.platform != "cpu" and (nvidia_capability(device) or (0, 0))[0] != 9:
        return f"it is for NVIDIA's Hopper (compute capability 9), not for {device.device_kind}"
    return None


def quantized_dot(
    x: Float[Array, "rows in"], weight: QuantizedWeight, num_rows: Int[Array, ""], *, dtype: Any
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.quantized_dot`. Tiles of rows that begin at or after `num_rows` are zeros.

    On CPU it runs only inside `jax.experimental.pallas.mosaic_gpu.force_gpu_interpret_mode()`.
    """
    rows, dtype = x.shape[0], jnp.dtype(dtype)
    codes, row_scales = quantise_rows_to_fp8(jnp.pad(x, ((0, -rows % ROWS), (0, 0))), weight.groups)
    padded, outputs = codes.shape[0], weight.num_outputs
    swizzle = plgpu.SwizzleTransform(128)
    by_tile = (plgpu.TilingTransform((8, INPUTS)), swizzle)
    out_by_tile = (plgpu.TilingTransform((8, 128 // dtype.itemsize)), swizzle)
    out = plgpu.kernel(
        functools.partial(_kernel, inputs=weight.shape[-1], groups=weight.groups),
        out_type=jax.ShapeDtypeStruct((padded, outputs), dtype),
        # rows vary fastest: tiles of rows with the same outputs run at the same time
        grid=(outputs // OUTPUTS, padded // ROWS),
        grid_names=("outputs", "rows"),
        num_threads=3,
        thread_name="warp_group",
        scratch_types=_Shared(
            plgpu.SMEM((STAGES, 2, UNIT_ROWS, INPUTS), codes.dtype, transforms=by_tile),
            plgpu.SMEM((STAGES, OUTPUTS, INPUTS), codes.dtype, transforms=by_tile),
            plgpu.SMEM((STAGES, 2, UNIT_ROWS), jnp.float32),
            plgpu.SMEM((STAGES, OUTPUTS), jnp.float32),
            plgpu.SMEM((2, UNIT_ROWS, OUTPUTS), dtype, transforms=out_by_tile),
            plgpu.Barrier(num_arrivals=6, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="quantized_dot_mosaic",
    )(num_rows.reshape(1), codes, weight.codes.reshape(outputs, -1), row_scales, weight.scales_by_group())
    return out[:rows]


def _kernel(
    num_rows: Ref, x: Ref, codes: Ref, row_scales: Ref, scales: Ref, out: Ref, *shared: Ref, inputs: int, groups: int
) -> None:
    given, here = (x, codes, row_scales, scales), _Shared(*shared)
    first, column = lax.axis_index("rows") * ROWS, lax.axis_index("outputs") * OUTPUTS
    # a tile without needed rows takes no step, and stays zero
    steps = jnp.where(first < num_rows[0], inputs // INPUTS, 0)
    warp_group = lax.axis_index("warp_group")

    @pl.when(warp_group < 2)
    def _multiplying() -> None:
        plgpu.set_max_registers(REGISTERS, action="increase")
        total = _multiply(here, warp_group, steps)
        here.out[warp_group] = total.astype(here.out.dtype)
        plgpu.commit_smem()
        target = out.at[pl.ds(first + warp_group * UNIT_ROWS, UNIT_ROWS), pl.ds(column, OUTPUTS)]
        plgpu.copy_smem_to_gmem(here.out.at[warp_group], target)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warp_group == 2)
    def _copying() -> None:
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        _copy(given, here, first, column, steps, inputs // groups)


def _copy(given: tuple[Ref, ...], shared: _Shared, first: Array, column: Array, steps: Array, group_size: int) -> None:
    """Copy the tiles. A copy waits until both warp groups have used the tile before it in its slot."""
    x, codes, row_scales, scales = given

    def copy(step: Array, _: None) -> None:
        slot, group = lax.rem(step, STAGES), lax.div(step * INPUTS, group_size)
        pl.when(step >= STAGES)(functools.partial(plgpu.barrier_wait, shared.free.at[slot]))
        taken, at, here = pl.ds(step * INPUTS, INPUTS), pl.ds(column, OUTPUTS), shared.here.at[slot]
        plgpu.copy_gmem_to_smem(codes.at[at, taken], shared.codes.at[slot], here)
        plgpu.copy_gmem_to_smem(scales.at[group, at], shared.scales.at[slot], here)
        for unit in range(2):
            rows = pl.ds(first + unit * UNIT_ROWS, UNIT_ROWS)
            plgpu.copy_gmem_to_smem(x.at[rows, taken], shared.x.at[slot, unit], here)
            plgpu.copy_gmem_to_smem(row_scales.at[group, rows], shared.row_scales.at[slot, unit], here)

    def drain(step: Array, _: None) -> None:  # the interpreter demands that a warp sees every phase of a barrier
        plgpu.barrier_wait(shared.free.at[lax.rem(step, STAGES)])

    def work(warp: Array) -> None:
        @pl.when(warp == 0)
        def _one_warp() -> None:
            lax.fori_loop(0, steps, copy, None)
            lax.fori_loop(jnp.maximum(steps - STAGES, 0), steps, drain, None)

    plgpu.warp_map(work)


def _multiply(shared: _Shared, unit: Array, steps: Array) -> Array:
    """The results of a warp group, float32[64, outputs]."""

    def add_step(step: Array, total: Array) -> Array:
        slot = lax.rem(step, STAGES)
        plgpu.barrier_wait(shared.here.at[slot])

        def multiply(sums: Ref) -> tuple[Array, Array, Array]:
            plgpu.wgmma(sums, shared.x.at[slot, unit], shared.codes.at[slot].transpose((1, 0)))
            # loads run during the matmul; JAX 0.10, which the type checker sees, has another signature
            load = functools.partial(plgpu.load, optimized=False)
            ours = load(shared.row_scales.at[slot, unit], layout=_ROWS)  # ty: ignore[missing-argument]
            theirs = load(shared.scales.at[slot], layout=_OUTPUTS)  # ty: ignore[missing-argument]
            plgpu.commit_smem()  # a copy may overwrite what was read
            return sums[...], ours, theirs

        sums, ours, theirs = pl.run_scoped(multiply, plgpu.ACC((UNIT_ROWS, OUTPUTS), jnp.float32))
        plgpu.barrier_arrive(shared.free.at[slot])
        factors = lax.broadcast_in_dim(ours, sums.shape, [0]) * lax.broadcast_in_dim(theirs, sums.shape, [1])
        return total + sums * factors

    start = plgpu.layout_cast(jnp.zeros((UNIT_ROWS, OUTPUTS), jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(0, steps, add_step, start)
