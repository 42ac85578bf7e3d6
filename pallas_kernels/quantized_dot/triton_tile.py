"""Products of a tile of quantised weights and a tile of rows, in a kernel for NVIDIA.

Part of the kernels of `quantized_dot` and `quantized_grouped_dot`. A kernel says which rows and which outputs its
program multiplies (`Tile`), and `tile_sums` returns the products.

A program reads a tile of codes once, makes numbers of it in registers, and multiplies them with the tile of x. The
weights are the first operand of the product, because Hopper's matrix instructions read that one from registers. A few
rows of x fill the second operand, which may be as narrow as 8. No copy of a matrix in floats is made.

The sum over a group is multiplied by the group's scale after its products. In the tile, a scale would cost one
multiplication a code. After the product it costs one for each row and output: 8 times less with 16 rows and groups
of 128. It is also more exact, because scale * code is not rounded to x's dtype. Minima cost a product of x with ones,
which gives the sum of x in the registers where it is needed.
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
from pallas_kernels.quantized_dot.weight import CHUNK, LEVELS, QuantizedWeight

Ref = Any  # an array inside a kernel, addressed by `.at`
HALF = CHUNK // 2     # bytes of a chunk of 4-bit codes


class Given(NamedTuple):
    """The arrays of a call, None if it has none. Inside a kernel: the references to them.

    The axes of x but the last are one axis. So are those of each array of the weights.
    """

    x: Any
    codes: Any
    scales: Any
    zeros: Any
    outer: Any
    mins: Any
    outer_mins: Any
    row_scales: Any = None    # float32[rows], of x in int8, or in fp8 with one group
    group_scales: Any = None  # float32[rows, groups], of x in fp8

    @classmethod
    def of(
        cls, x: Array, weight: QuantizedWeight, row_scales: Array | None = None, group_scales: Array | None = None
    ) -> "Given":
        """The arrays of a product."""
        flat = lambda a: None if a is None else a.reshape(-1, a.shape[-1])  # noqa: E731
        return cls(
            flat(x), flat(weight.codes), flat(weight.scales), flat(weight.zeros), flat(weight.outer),
            flat(weight.mins), flat(weight.outer_mins), row_scales, group_scales,
        )  # fmt: skip

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
    """The static facts of a call."""

    kind: str
    rows: int     # of x; of a block of x, if each block has its own matrix
    inputs: int
    outputs: int  # of a matrix
    groups: int
    divides: bool
    tiling: Tiling
    interpret: bool
    integers: bool = False  # products of int8

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


class Tile(NamedTuple):
    """The rows and outputs that a program multiplies, and its part of the inputs."""

    row: Array            # int32[rows], indices into x
    inside: Array | None  # bool[rows], False for indices that have no row; None: all have one
    output: Array         # int32[outputs], indices into the weights
    split: Array          # int32[], part of the inputs


class Factors(NamedTuple):
    """A group adds scale * rows * (sum of codes * x) - offset * (sum of x)."""

    scale: Array         # float32[outputs]
    offset: Array | None # float32[outputs]
    rows: Array | None   # float32[rows], scales of x in fp8; None: 1


def tile_sums(problem: Problem, given: Given, tile: Tile) -> Array:
    """The products of a split's inputs, [outputs, rows]: float32, or int32 if one scale comes after all splits."""
    tiling = problem.tiling
    shape = (tiling.outputs, tiling.rows)
    zeros = jnp.zeros(shape, jnp.int32 if problem.integers else jnp.float32)
    steps = pl.cdiv(problem.steps, tiling.splits)
    begin = tile.split * steps
    end = jnp.minimum(begin + steps, problem.steps)

    def scale(total: Array, sums: Array, x_sums: Array | None, factors: Factors) -> Array:
        by_output = sums.astype(jnp.float32) * factors.scale[:, None]
        total = total + (by_output if factors.rows is None else by_output * factors.rows[None, :])
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
    problem: Problem, given: Given, tile: Tile, step: Array, offset: int
) -> list[tuple[int, Array, Array]]:
    """(group in the iteration, weights [outputs, n], x [rows, n]) of the codes that one load gives.

    offset: of the load's first byte in the iteration.
    """
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
            # Not an iteration early, as scales are: that would keep Triton from making the numbers in the registers of
            # the product. The zeros of 32 groups are in one sector of the L1 cache.
            index = lax.div(step * problem.step, problem.group_size) + group
            value = plgpu.load(given.zeros.at[tile.output, jnp.minimum(index, problem.groups - 1)])[:, None]
        a = numbers(codes, problem.kind, high, value, given.x.dtype, interpret=problem.interpret)
        made.append((group, a, x_of(step * problem.step + inputs)))
    return made


def _factors(problem: Problem, given: Given, tile: Tile, group: Array) -> Factors:
    column, rows = tile.output, None
    if given.group_scales is not None:
        rows = plgpu.load(given.group_scales.at[jnp.minimum(tile.row, problem.rows - 1), group])

    def scaled(ref: Ref, outer: Ref | None, *, divides: bool) -> Array:
        values = plgpu.load(ref.at[column, group]).astype(jnp.float32)
        if outer is None:
            return values
        factor = plgpu.load(outer.at[column, lax.div(group, problem.groups // outer.shape[1])])
        return values / factor if divides else values * factor

    scale = scaled(given.scales, given.outer, divides=problem.divides)
    if given.mins is not None:
        return Factors(scale, scaled(given.mins, given.outer_mins, divides=False), rows)
    if given.zeros is None or problem.kind == "int4":
        return Factors(scale, None, rows)
    return Factors(scale, scale * plgpu.load(given.zeros.at[column, group]).astype(jnp.float32), rows)
