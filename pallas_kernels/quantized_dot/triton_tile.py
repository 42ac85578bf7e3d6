"""Matmul of a tile of quantised weights and a tile of rows, in a kernel for NVIDIA.

Part of the kernels of `quantized_dot` and `quantized_grouped_dot`. A kernel chooses the rows and outputs of its program
(`Tile`), and `tile_sums` returns their sums.

A program reads a tile of codes once, converts it in registers, and multiplies it by the tile of x. The weights are the
first operand of the matmul, because Hopper's matrix instructions read the first operand from registers. A few rows of x
fill the second operand, which may be as narrow as 8. No float copy of a matrix is made.

A group's sum is multiplied by the group's scale after its matmul. Before the matmul, a scale would cost one
multiplication per code. After it, the scale costs one per row and output: 8 times less with 16 rows and groups of 128.
It is also more exact, because scale * code is not rounded to x's dtype. Minima cost a matmul of x with ones, which
leaves the sum of x in the registers that need it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_kernels.quantized_dot.tiling import Tiling
from pallas_kernels.quantized_dot.triton_codes import numbers
from pallas_kernels.quantized_dot.weight import ARRAYS, CHUNK, LEVELS, QuantizedWeight
from pallas_kernels.quantized_dot.xla import quantise_rows, quantise_rows_to_fp8

Ref = Any  # an array inside a kernel, addressed by `.at`
HALF = CHUNK // 2     # bytes of a chunk of 4-bit codes


class Given(NamedTuple):
    """The arrays of a call, or references to them in a kernel; None if absent. All axes but the last are merged."""

    x: Any
    codes: Any
    scales: Any
    zeros: Any
    outer: Any
    mins: Any
    outer_mins: Any
    row_scales: Any = None    # float32[rows], of x in int8, and of x in fp8 if an output has one group
    group_scales: Any = None  # float32[groups, rows], of x in fp8 if an output has several groups

    @classmethod
    def of(cls, x: Array, weight: QuantizedWeight) -> "Given":
        """The arrays of x @ weight.T. x is rounded as `weight.activations` says."""
        flat = lambda a: None if a is None else a.reshape(-1, a.shape[-1])  # noqa: E731
        x, row_scales, group_scales = x.reshape(-1, x.shape[-1]), None, None
        if weight.activations == "int8":
            x, row_scales = quantise_rows(x)
        elif weight.activations == "fp8":
            x, group_scales = quantise_rows_to_fp8(x, weight.groups)
            if weight.groups == 1:
                row_scales, group_scales = group_scales[0], None
        arrays = (flat(getattr(weight, name)) for name in ARRAYS[:-1])
        return cls(x, *arrays, row_scales, group_scales)

    @property
    def present(self) -> dict[str, Any]:
        """The arrays that the call has, by name."""
        return {name: array for name, array in self._asdict().items() if array is not None}

    @classmethod
    def from_refs(cls, names: tuple[str, ...], refs: tuple[Ref, ...]) -> "Given":
        """The references to the arrays of `present`, in its order."""
        return cls(**dict.fromkeys(cls._fields) | dict(zip(names, refs, strict=True)))


@dataclasses.dataclass(frozen=True)
class Problem:
    """Static parameters of a call."""

    kind: str
    rows: int     # of x; of a block of x, if each block has its own matrix
    inputs: int
    outputs: int  # of a matrix
    groups: int
    divides: bool
    tiling: Tiling
    interpret: bool
    integers: bool = False  # matmuls of int8

    @property
    def group_size(self) -> int:
        return self.inputs // self.groups

    @property
    def per_byte(self) -> int:
        """Codes of a byte."""
        return 2 if self.kind in ("int4", "fp4") else 1

    @property
    def step(self) -> int:
        """Inputs of an iteration: whole groups, or a whole fraction of a group."""
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
        """Bytes per output that are loaded at once. Codes in the low bits share a group; so do the high bits."""
        if self.groups == 1:
            return self.step // self.per_byte
        if self.per_byte == 1:
            return min(self.group_size, self.step)
        return min(self.group_size, self.step) // 2 if self.group_size >= CHUNK else min(self.group_size, HALF)


class Tile(NamedTuple):
    """The rows and outputs that a program multiplies, and its part of the inputs."""

    row: Array            # int32[rows], indices into x
    inside: Array | None  # bool[rows], False for indices that have no row; None: all have one
    output: Array         # int32[outputs], indices into the weights
    split: Array          # int32[], part of the inputs


class Factors(NamedTuple):
    """A group adds scale * (sum of codes * x) - offset * (sum of x). float32[outputs] each."""

    scale: Array
    offset: Array | None
    of_rows: Array | None = None  # float32[rows], another factor of sum of codes * x: scales of x


def tile_sums(problem: Problem, given: Given, tile: Tile) -> Array:
    """The sums of a split's inputs, [outputs, rows]: float32, or int32 if one scale is applied after all splits."""
    tiling = problem.tiling
    shape = (tiling.outputs, tiling.rows)
    zeros = jnp.zeros(shape, jnp.int32 if problem.integers else jnp.float32)
    steps = pl.cdiv(problem.steps, tiling.splits)
    begin = tile.split * steps
    end = jnp.minimum(begin + steps, problem.steps)

    def scale(total: Array, sums: Array, x_sums: Array | None, factors: Factors) -> Array:
        factor = factors.scale[:, None]
        if factors.of_rows is not None:
            factor = factor * factors.of_rows[None, :]
        total = total + sums.astype(jnp.float32) * factor
        if x_sums is None or factors.offset is None:
            return total
        return total - x_sums.astype(jnp.float32) * factors.offset[:, None]

    def load_factors(step: Array) -> tuple[Factors, ...]:
        group = lax.div(step * problem.step, problem.group_size)
        last = problem.groups - 1
        return tuple(
            _factors(problem, given, tile, jnp.minimum(group + i, last)) for i in range(problem.groups_of_step)
        )

    def multiply(step: Array, sums: list[Array], x_sums: list[Array | None]) -> None:
        """Add the products of an iteration to the sums of its groups."""
        for offset in range(0, problem.step // problem.per_byte, problem.load):
            for group, a, b in _operands(problem, given, tile, step, offset):
                sums[group] = sums[group] + plgpu.dot(a, b.T)
                if x_sums[group] is not None:
                    x_sums[group] = x_sums[group] + plgpu.dot(jnp.ones(a.shape, a.dtype), b.T)

    if problem.groups == 1:
        factors = _factors(problem, given, tile, jnp.int32(0))

        if given.x.dtype == jnp.float8_e4m3fn:
            # Hopper's tensor cores add fp8 products with about 14 bits (arXiv:2412.19437, section 3.3.2). So their sums
            # are short, and are added in float32.
            def add_product(step: Array, total: Array) -> Array:
                sums = [zeros]
                multiply(step, sums, [None])
                return scale(total, sums[0], None, factors)

            return lax.fori_loop(begin, end, add_product, zeros)

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
        later = load_factors(step + 1)  # one iteration early, so that the GPU does not wait for them
        sums = [zeros] * len(factors)
        x_sums = [None if one.offset is None else zeros for one in factors]
        multiply(step, sums, x_sums)
        for group, one in enumerate(factors):
            total = scale(total, sums[group], x_sums[group], one)
        return total, later

    return lax.fori_loop(begin, end, add_groups, (jnp.zeros(shape, jnp.float32), load_factors(begin)))[0]


def _operands(
    problem: Problem, given: Given, tile: Tile, step: Array, offset: int
) -> list[tuple[int, Array, Array]]:
    """(group in the iteration, weights [outputs, n], x [rows, n]) of the codes of a load. offset: its first byte."""
    lane = jnp.arange(problem.load)
    byte = step * (problem.step // problem.per_byte) + offset + lane
    whole = problem.inputs % problem.step == 0
    at = given.codes.at[tile.output[:, None], byte[None, :]]
    if whole:
        codes = plgpu.load(at)
    else:
        inside = (byte < problem.inputs // problem.per_byte)[None, :]
        codes = plgpu.load(at, mask=inside, other=jnp.zeros((), given.codes.dtype))

    def x_of(inputs: Array) -> Array:
        mask = None if tile.inside is None else tile.inside[:, None]
        if not whole:
            inside = (inputs < problem.inputs)[None, :]
            mask = inside if mask is None else mask & inside
        at = given.x.at[tile.row[:, None], inputs[None, :]]
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
            # Unlike scales, not loaded an iteration early: Triton could then not convert codes in the registers of the
            # matmul. The zeros of 32 groups are in one sector of the L1 cache.
            index = lax.div(step * problem.step, problem.group_size) + group
            value = plgpu.load(given.zeros.at[tile.output, jnp.minimum(index, problem.groups - 1)])[:, None]
        a = numbers(codes, problem.kind, high, value, given.x.dtype, interpret=problem.interpret)
        made.append((group, a, x_of(step * problem.step + inputs)))
    return made


def _factors(problem: Problem, given: Given, tile: Tile, group: Array) -> Factors:
    column = tile.output

    def scaled(ref: Ref, outer: Ref | None, *, divides: bool) -> Array:
        values = plgpu.load(ref.at[column, group]).astype(jnp.float32)
        if outer is None:
            return values
        factor = plgpu.load(outer.at[column, lax.div(group, problem.groups // outer.shape[1])])
        return values / factor if divides else values * factor

    scale = scaled(given.scales, given.outer, divides=problem.divides)
    if given.group_scales is not None:
        last = given.group_scales.shape[1] - 1
        return Factors(scale, None, plgpu.load(given.group_scales.at[group, jnp.minimum(tile.row, last)]))
    if given.mins is not None:
        return Factors(scale, scaled(given.mins, given.outer_mins, divides=False))
    if given.zeros is None or problem.kind == "int4":
        return Factors(scale, None)
    return Factors(scale, scale * plgpu.load(given.zeros.at[column, group]).astype(jnp.float32))
