"""quantized_dot for NVIDIA in Pallas, lowered through Triton, for the layout "rows".

A program reads a tile of codes once, makes numbers of it in registers, and multiplies them with the tile of x. The
weights are the first operand of the product, because Hopper's matrix instructions read that one from registers. A few
rows of x fill the second operand, which may be as narrow as 8. No copy of a matrix in floats is made.

The sum over a group is multiplied by the group's scale after its products. In the tile, a scale would cost one
multiplication a code. After the product it costs one for each row and output: 8 times less with 16 rows and groups
of 128. It is also more exact, because scale * code is not rounded to x's dtype. Minima cost a product of x with ones,
which gives the sum of x in the registers where it is needed.

Few rows: the inputs are split among programs too. The parts are added in order, in XLA.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.platforms import nvidia_capability, refuse_triton
from pallas_kernels.quantized_dot.tiling import Tiling, choose
from pallas_kernels.quantized_dot.triton_codes import numbers
from pallas_kernels.quantized_dot.weight import CHUNK, LEVELS, QuantizedWeight
from pallas_kernels.quantized_dot.xla import quantise_rows

Ref = Any  # an array inside a kernel, addressed by `.at`
FLOATS = ("bfloat16", "float16")
SCALES = (*FLOATS, "float32", "int8", "uint8", "float8_e4m3fn")
ROWS_TOGETHER = 2048  # rows whose tiles run at the same time: 16 MiB of x with 4,096 inputs stay in the L2 cache
LEAST_INPUTS = 16     # of a product
MOST_BYTES = 1 << 31  # of codes: Pallas addresses arrays up to 4 GiB with signed 32 bits
HALF = CHUNK // 2     # bytes of a chunk of 4-bit codes


class Given(NamedTuple):
    """The arrays of a call, None if it has none. Inside the kernel: the references to them."""

    num_rows: Any
    x: Any
    codes: Any
    scales: Any
    zeros: Any
    outer: Any
    mins: Any
    outer_mins: Any
    row_scales: Any  # float32[rows], of x in int8


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static facts of a call."""

    kind: str
    rows: int
    inputs: int
    outputs: int
    groups: int
    divides: bool
    tiling: Tiling
    interpret: bool
    integers: bool  # products of int8

    @property
    def group_size(self) -> int:
        return self.inputs // self.groups

    @property
    def per_byte(self) -> int:
        """Codes of a byte."""
        return 2 if self.kind in ("int4", "fp4") else 1

    @property
    def step(self) -> int:
        """Inputs of an iteration: a multiple of the group's, or a part of it."""
        step = self.tiling.inputs
        return step if self.groups == 1 or step % self.group_size == 0 or self.group_size % step == 0 else CHUNK

    @property
    def steps(self) -> int:
        return pl.cdiv(self.inputs, self.step)

    @property
    def groups_of_step(self) -> int:
        return 1 if self.groups == 1 else max(1, self.step // self.group_size)

    @property
    def load(self) -> int:
        """Bytes of an output that are loaded at once. Codes in the same bits of them share a group."""
        if self.groups == 1:
            return self.step // self.per_byte
        if self.per_byte == 1:
            return min(self.group_size, self.step)
        return min(self.group_size, self.step) // 2 if self.group_size >= CHUNK else min(self.group_size, HALF)


def quantized_dot(
    x: Float[Array, "rows in"],
    weight: QuantizedWeight,
    num_rows: Int[Array, ""],
    *,
    dtype: Any,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.quantized_dot`. Rows after `num_rows` are zeros where a whole tile is not needed.

    tiling: None: chosen by device and shape. interpret: run the kernel in XLA operations, on any platform.
    """
    outputs, integers = weight.num_outputs, weight.activations == "int8"
    tiling = tiling or choose(x.shape[0], x.shape[1], outputs)
    row_scales = None
    if integers:
        x, row_scales = quantise_rows(x)
    problem = Problem(
        weight.kind, *x.shape, outputs, weight.groups, weight.divides, tiling, interpret, integers
    )  # fmt: skip
    flat = lambda a: None if a is None else a.reshape(outputs, a.shape[-1])  # noqa: E731
    given = Given(
        num_rows.reshape(1), x, flat(weight.codes), flat(weight.scales), flat(weight.zeros), flat(weight.outer),
        flat(weight.mins), flat(weight.outer_mins), row_scales,
    )  # fmt: skip
    exact = integers and problem.groups == 1 and tiling.splits > 1
    out = _launch(problem, given, dtype if tiling.splits == 1 else jnp.int32 if exact else jnp.float32)
    if tiling.splits == 1:
        return out[0]
    total = out[0]
    for part in range(1, tiling.splits):
        total += out[part]
    if exact:
        scale = given.scales[:, 0].astype(jnp.float32)
        if given.outer is not None:
            scale = scale / given.outer[:, 0] if weight.divides else scale * given.outer[:, 0]
        total = total.astype(jnp.float32) * scale
    return (total if row_scales is None else total * row_scales[:, None]).astype(dtype)


def _launch(problem: Problem, given: Given, dtype: Any) -> Array:
    """The sums [splits, rows, out]."""
    tiling = problem.tiling
    tiles = pl.cdiv(problem.rows, tiling.rows)
    together = min(tiles, max(1, ROWS_TOGETHER // tiling.rows))
    present = tuple(name for name, array in given._asdict().items() if array is not None)
    return pl.pallas_call(
        functools.partial(_kernel, names=present, problem=problem, together=together),
        jax.ShapeDtypeStruct((tiling.splits, problem.rows, problem.outputs), dtype),
        grid=(together, pl.cdiv(problem.outputs, tiling.outputs), pl.cdiv(tiles, together) * tiling.splits),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=problem.interpret,
        name="quantized_dot",
    )(*(getattr(given, name) for name in present))


def refuse(device: Any, x: Any, weight: QuantizedWeight, dtype: Any) -> str | None:
    """Reason why the kernel cannot take a call on a jax Device; None if it can."""
    del dtype
    if weight.layout != "rows":
        return f"it multiplies weights in the layout rows, not {weight.layout}"
    if weight.activations == "float" and x.dtype.name not in FLOATS:
        return f"x of {x.dtype}: it multiplies bfloat16 and float16"
    if weight.activations == "int8" and (weight.kind not in ("int8", "int4") or weight.mins is not None):
        return f"activations=int8 with weights of {weight.kind}: must be int8 or int4, without minima"
    if weight.activations == "int8" and weight.kind == "int8" and weight.zeros is not None:
        return "activations=int8 with zero points of 8 bits: must be without"
    if weight.num_outputs * weight.codes.shape[-1] >= MOST_BYTES:
        return f"{weight.num_outputs * weight.codes.shape[-1]} bytes of codes: must be less than {MOST_BYTES}"
    inputs, size = weight.shape[-1], weight.group_size
    if weight.bits == 4 and inputs % CHUNK:
        return f"{inputs} inputs of 4 bits: must be a multiple of {CHUNK}"
    # products of int8 take 32 inputs
    least = 2 * LEAST_INPUTS if weight.activations == "int8" else LEAST_INPUTS
    if weight.groups > 1 and size % CHUNK and size not in (least, 2 * LEAST_INPUTS):
        return f"groups of {size} inputs: must be {least}, {2 * LEAST_INPUTS}, a multiple of {CHUNK}, or all inputs"
    for name in ("scales", "mins"):
        array = getattr(weight, name)
        if array is not None and array.dtype.name not in SCALES:
            return f"{name} of {array.dtype}: must be one of {', '.join(SCALES)}"
    capability = nvidia_capability(device)
    eight = weight.kind == "fp8" or weight.scales.dtype.name == "float8_e4m3fn"
    if eight and capability and capability < (8, 9):
        return f"float8 needs compute capability 8.9 (Ada) or newer, {device.device_kind} has {capability}"
    return refuse_triton(device)


def _kernel(*refs: Ref, names: tuple[str, ...], problem: Problem, together: int) -> None:
    given = Given(**dict.fromkeys(Given._fields) | dict(zip(names, refs, strict=False)))
    out_ref, tiling = refs[-1], problem.tiling
    block, split = lax.div(pl.program_id(2), tiling.splits), lax.rem(pl.program_id(2), tiling.splits)
    first = (block * together + pl.program_id(0)) * tiling.rows
    row = first + jnp.arange(tiling.rows)
    column = pl.program_id(1) * tiling.outputs + jnp.arange(tiling.outputs)

    def store(values: Array) -> None:
        mask = (row < problem.rows)[None, :] & (column < problem.outputs)[:, None]
        plgpu.store(out_ref.at[split, row[None, :], column[:, None]], values.astype(out_ref.dtype), mask=mask)

    def multiply() -> None:
        # a tile at the edge repeats the last output, and does not store it
        total = _sum(problem, given, row, jnp.minimum(column, problem.outputs - 1), split)
        if given.row_scales is not None and tiling.splits == 1:
            total *= plgpu.load(given.row_scales.at[jnp.minimum(row, problem.rows - 1)])[None, :]
        store(total)

    needed = first < given.num_rows[0]
    pl.when(needed)(multiply)
    pl.when(jnp.logical_not(needed))(lambda: store(jnp.zeros((tiling.outputs, tiling.rows), jnp.float32)))


class Factors(NamedTuple):
    """A group adds scale * (sum of codes * x) - offset * (sum of x). float32[outputs] each."""

    scale: Array
    offset: Array | None


def _sum(problem: Problem, given: Given, row: Array, column: Array, split: Array) -> Array:
    """The products of a split's inputs, [outputs, rows]: float32, or int32 if one scale comes after all splits."""
    tiling = problem.tiling
    shape = (tiling.outputs, tiling.rows)
    zeros = jnp.zeros(shape, jnp.int32 if problem.integers else jnp.float32)
    steps = pl.cdiv(problem.steps, tiling.splits)
    begin = split * steps
    end = jnp.minimum(begin + steps, problem.steps)

    def scale(total: Array, sums: Array, x_sums: Array | None, factors: Factors) -> Array:
        total = total + sums.astype(jnp.float32) * factors.scale[:, None]
        if x_sums is None or factors.offset is None:
            return total
        return total - x_sums.astype(jnp.float32) * factors.offset[:, None]

    def load_factors(step: Array) -> tuple[Factors, ...]:
        group = lax.div(step * problem.step, problem.group_size)
        last = problem.groups - 1
        return tuple(
            _factors(problem, given, column, jnp.minimum(group + i, last)) for i in range(problem.groups_of_step)
        )

    def multiply(step: Array, sums: list[Array], x_sums: list[Array | None]) -> None:
        """Add the products of an iteration to the sums of its groups."""
        for offset in range(0, problem.step // problem.per_byte, problem.load):
            for group, a, b in _operands(problem, given, row, column, step, offset):
                sums[group] = sums[group] + plgpu.dot(a, b.T)
                if x_sums[group] is not None:
                    x_sums[group] = x_sums[group] + plgpu.dot(jnp.ones(a.shape, a.dtype), b.T)

    if problem.groups == 1:
        factors = _factors(problem, given, column, jnp.int32(0))

        def add_step(step: Array, carry: tuple[Array, Array | None]) -> tuple[Array, Array | None]:
            sums, x_sums = [carry[0]], [carry[1]]
            multiply(step, sums, x_sums)
            return sums[0], x_sums[0]

        start = (zeros, None if factors.offset is None else zeros)
        sums, x_sums = lax.fori_loop(begin, end, add_step, start)
        if problem.integers and tiling.splits > 1:
            return sums
        return scale(jnp.zeros(shape, jnp.float32), sums, x_sums, factors)

    def add_groups(step: Array, carry: tuple[Array, tuple[Factors, ...]]) -> tuple[Array, tuple[Factors, ...]]:
        total, factors = carry
        later = load_factors(step + 1)  # one iteration early: the card does not wait for them
        sums = [zeros] * len(factors)
        x_sums = [None if one.offset is None else zeros for one in factors]
        multiply(step, sums, x_sums)
        for group, one in enumerate(factors):
            total = scale(total, sums[group], x_sums[group], one)
        return total, later

    return lax.fori_loop(begin, end, add_groups, (jnp.zeros(shape, jnp.float32), load_factors(begin)))[0]


def _operands(
    problem: Problem, given: Given, row: Array, column: Array, step: Array, offset: int
) -> list[tuple[int, Array, Array]]:
    """(group in the iteration, weights [outputs, n], x [rows, n]) of the codes that one load gives.

    offset: of the load's first byte in the iteration.
    """
    lane = jnp.arange(problem.load)
    byte = step * (problem.step // problem.per_byte) + offset + lane
    whole = problem.inputs % problem.step == 0
    at = given.codes.at[column[:, None], byte[None, :]]
    if whole:
        codes = plgpu.load(at)
    else:
        inside = (byte < problem.inputs // problem.per_byte)[None, :]
        codes = plgpu.load(at, mask=inside, other=jnp.zeros((), given.codes.dtype))

    def x_of(inputs: Array) -> Array:
        mask = None if problem.rows % problem.tiling.rows == 0 else (row < problem.rows)[:, None]
        if not whole:
            inside = (inputs < problem.inputs)[None, :]
            mask = inside if mask is None else mask & inside
        at = given.x.at[row[:, None], inputs[None, :]]
        # missing rows cost no traffic
        return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=jnp.zeros((), given.x.dtype))

    if problem.per_byte == 1:
        parts = [(False, offset, offset + lane)]
    else:
        chunk, inside = divmod(offset, HALF)
        base = CHUNK * chunk + inside
        # a load is part of a half of a chunk, or whole halves
        inputs = base + (lane if problem.load <= HALF else CHUNK * lax.div(lane, HALF) + lax.rem(lane, HALF))
        parts = [(False, base, inputs), (True, base + HALF, inputs + HALF)]
    made = []
    for high, first, inputs in parts:
        group = 0 if problem.groups == 1 else min(first // problem.group_size, problem.groups_of_step - 1)
        value: Array | int = LEVELS // 2 if given.mins is None else 0
        if given.zeros is not None and problem.kind == "int4":
            # Not an iteration early, as scales are: that would keep Triton from making the numbers in the registers of
            # the product. The zeros of 32 groups are in one sector of the L1 cache.
            index = lax.div(step * problem.step, problem.group_size) + group
            value = plgpu.load(given.zeros.at[column, jnp.minimum(index, problem.groups - 1)])[:, None]
        a = numbers(codes, problem.kind, high, value, given.x.dtype, interpret=problem.interpret)
        made.append((group, a, x_of(step * problem.step + inputs)))
    return made


def _factors(problem: Problem, given: Given, column: Array, group: Array) -> Factors:
    def scaled(ref: Ref, outer: Ref | None, *, divides: bool) -> Array:
        values = plgpu.load(ref.at[column, group]).astype(jnp.float32)
        if outer is None:
            return values
        factor = plgpu.load(outer.at[column, lax.div(group, problem.groups // outer.shape[1])])
        return values / factor if divides else values * factor

    scale = scaled(given.scales, given.outer, divides=problem.divides)
    if given.mins is not None:
        return Factors(scale, scaled(given.mins, given.outer_mins, divides=False))
    if given.zeros is None or problem.kind == "int4":
        return Factors(scale, None)
    return Factors(scale, scale * plgpu.load(given.zeros.at[column, group]).astype(jnp.float32))
