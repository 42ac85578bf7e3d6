"""quantized_dot for TPU in Pallas, lowered through Mosaic, for int8 and int4 in the layout "lanes".

Grid: (tiles of rows, tiles of outputs, blocks of inputs). Pallas fetches the next block of codes during the work on a
block. The kernel converts the codes of 128 inputs or more at once, in registers, and multiplies them by the rows of x.
So memory is read once, as codes, and no copy of a matrix is made.

A group's sum is multiplied by its scale after its matmul, where outputs are on the lanes, as scales are. Groups of
fewer than 128 inputs share a matmul, which has the rows of x once for each group, with zeros for the inputs of other
groups. Zero points and minima are applied last, in one matmul with the sums of x by group.

int4: a bfloat16 with the exponent of 16 has the value 16 + code if its fraction starts with the code. A shift, an "and"
and an "or" make two numbers of a word. The 16 counts as part of the zero point.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.platforms import refuse_tpu
from pallas_kernels.quantized_dot.weight import LANES, LEVELS, QuantizedWeight
from pallas_kernels.quantized_dot.xla import quantise_rows

Ref = Any  # an array inside a kernel
BLOCK_BYTES = 1 << 20   # of codes. The first block of a call is fetched while nothing is computed: 1.3 us on a v5e
SCALE_BYTES = 4 << 20   # of a tile of outputs
MOST_ROWS = 256         # of x in a tile: at 197 TFLOP/s and 819 GB/s a v5e is busy from 240 rows of bfloat16 on
MOST_STACKED = 1024     # rows of a matmul that several groups share
MOST_INPUTS = 5632      # of a block
OUTPUTS = (512, 256, 128)  # of a tile: 512 are computed 1.3 times as fast as 128 (docs/decisions.md)
WIDE = 512              # inputs of an iteration, if the group size allows it
MOST_IN_GROUP = 1024    # inputs of a group, which is one matmul, unless it has all inputs
LEAST_IN_GROUP = 16
# MAGIC: the bits of two bfloat16 numbers of value BIAS. A code is inserted FROM_END bits from a number's end. With a
# BIAS of 128 it would be at the end, but errors of float32 sums were larger (docs/decisions.md).
MAGIC, BIAS = 0x4180_4180, 16
NIBBLES, FROM_END = 0x0078_0078, 3
WORD_INPUTS = 8         # inputs in a word of the layout "lanes"


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes of a program's tile.

    Bytes in VMEM, with R rows, N outputs, K inputs of a block, G groups of all inputs, S groups in 128 inputs:

        twice, because one is fetched while the other is used:
            x 2 * R * K, codes N * K * bits / 8, scales and minima 8 * N * G, the result 4 * R * N
        once:
            sums 4 * R * N, scales in float32 4 * N * G, sums of x 4 * R * G, a matmul's result 4 * S * R * N

    The rule uses at most 12.8 MB, with 8,192 inputs of 4 bits in groups of 32. A v5e's compiler allows 16.8 MB.
    """

    rows: int
    outputs: int
    inputs: int  # of a block; divides the call's inputs, and is a multiple of a matmul's

    @classmethod
    def by_rule(
        cls, rows: int, inputs: int, outputs: int, *, bits: int, group_size: int, divides: bool = False
    ) -> "Tiling":
        """The tiling with the largest block of codes within BLOCK_BYTES. rows, inputs, outputs: of the call.

        The inputs may lack a divisor of a good size: 11,008 inputs in groups of 128 have 256 and 5,504. So tiles of
        fewer outputs are tried too. divides: a tile must divide the outputs, which are a multiple of 128.
        """
        groups = inputs // group_size
        unit = LANES if groups == 1 else max(group_size, LANES)
        blocks = [unit * n for n in range(1, inputs // unit + 1) if inputs % (unit * n) == 0]
        allowed = [
            (n * k * bits, n, k) for n in OUTPUTS for k in blocks
            if n * k * bits <= 8 * BLOCK_BYTES and k <= MOST_INPUTS and 20 * n * groups <= SCALE_BYTES
            and not (divides and outputs % n)
        ]  # fmt: skip
        _, columns, block = max(allowed, default=(0, OUTPUTS[-1], unit))
        stacked = max(1, LANES // group_size)
        return cls(min(rows, MOST_ROWS, MOST_STACKED // stacked), min(columns, outputs), block)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Static parameters of a call."""

    kind: str         # int8 or int4
    group_size: int
    groups: int
    symmetric: bool   # int4 without zeros and minima
    integers: bool    # matmuls of int8
    tiling: Tiling

    @classmethod
    def of(cls, weight: QuantizedWeight, tiling: Tiling) -> "Problem":
        """The parameters of a call with these weights."""
        integers = weight.activations == "int8"
        return cls(weight.kind, weight.group_size, weight.groups, _is_symmetric(weight), integers, tiling)

    @property
    def width(self) -> int:
        """Inputs of a matmul."""
        if self.groups > 1:
            return max(self.group_size, LANES)
        return next(width for width in (WIDE, WIDE // 2, LANES) if self.tiling.inputs % width == 0)

    @property
    def groups_of_product(self) -> int:
        return max(1, self.width // self.group_size)


@dataclasses.dataclass(frozen=True)
class Places:
    """Tile indices of a program, computed from the prefetched scalars.

    rows:    (tile of the result's rows, scalars) -> tile of x. A tile that is not needed gives the last needed one, so
             that nothing is fetched.
    outputs: (tile of the result's rows, tile of its outputs, scalars) -> tile of the weights' outputs.
    needed:  (tile of the result's rows, scalars) -> True if the tile is computed.
    """

    rows: Callable[[Array, tuple[Ref, ...]], Array]
    outputs: Callable[[Array, Array, tuple[Ref, ...]], Array]
    needed: Callable[[Array, tuple[Ref, ...]], Array]


def quantized_dot(
    x: Float[Array, "rows in"],
    weight: QuantizedWeight,
    num_rows: Int[Array, ""],
    *,
    dtype: Any,
    tiling: Tiling | None = None,
    interpret: Any = False,
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.quantized_dot`. Tiles of rows that begin at or after `num_rows` are zeros.

    tiling: None: chosen by shape. interpret: run the kernel in XLA operations, on any platform.
    """
    rows, inputs = x.shape
    outputs, integers = weight.num_outputs, weight.activations == "int8"
    multiple = 32 if integers else 16  # rows of a register of x
    x = jnp.pad(x, ((0, -rows % multiple), (0, 0)))
    tiling = tiling or Tiling.by_rule(
        x.shape[0], inputs, outputs, bits=weight.bits, group_size=weight.group_size
    )  # fmt: skip
    given: dict[str, Any] = {"x": x}
    if integers:
        given["x"], row_scales = quantise_rows(x)
        given["row_scales"] = row_scales[:, None]
    given |= arrays_of(weight)
    problem = Problem.of(weight, tiling)
    places = Places(
        rows=lambda i, scalars: jnp.maximum(jnp.minimum(i, lax.div(scalars[0][0] - 1, tiling.rows)), 0),
        outputs=lambda i, n, scalars: n,
        needed=lambda i, scalars: i * tiling.rows < scalars[0][0],
    )
    scalars, dtype = (num_rows.reshape(1),), jnp.dtype(dtype)
    return launch(problem, given, scalars, places, outputs, dtype, interpret, "quantized_dot_tpu")[:rows]


def arrays_of(weight: QuantizedWeight) -> dict[str, Array]:
    """The arrays of weights that the kernel reads, by name. Absent arrays are left out."""
    if weight.layout == "lanes":
        given = {"scales": weight.scales, "zeros": weight.zeros, "mins": weight.mins}
    else:
        given = {"scales": weight.scales_by_group(), "mins": weight.mins_by_group()}
    given["codes"] = weight.codes.reshape(-1, weight.shape[-1]) if weight.kind == "int8" else weight.codes
    return {name: array for name, array in given.items() if array is not None}


def launch(
    problem: Problem, given: dict[str, Array], scalars: tuple[Array, ...], places: Places, outputs: int, dtype: Any,
    interpret: Any, name: str,
) -> Float[Array, "rows outputs"]:  # fmt: skip
    """Run the kernel. given: x [rows, in], and `arrays_of` the weights. outputs: of the result."""
    tiling, (rows, inputs) = problem.tiling, given["x"].shape
    by_output = pl.BlockSpec((problem.groups, tiling.outputs), lambda i, n, k, *s: (0, places.outputs(i, n, s)))
    specs = {
        "x": pl.BlockSpec((tiling.rows, tiling.inputs), lambda i, n, k, *s: (places.rows(i, s), k)),
        "row_scales": pl.BlockSpec((tiling.rows, 1), lambda i, n, k, *s: (places.rows(i, s), 0)),
        "scales": by_output, "zeros": by_output, "mins": by_output,
        "codes": pl.BlockSpec(
            (tiling.inputs // WORD_INPUTS, tiling.outputs), lambda i, n, k, *s: (k, places.outputs(i, n, s))
        ) if problem.kind == "int4" else pl.BlockSpec(
            (tiling.outputs, tiling.inputs), lambda i, n, k, *s: (places.outputs(i, n, s), k)
        ),
    }  # fmt: skip
    grid = (pl.cdiv(rows, tiling.rows), pl.cdiv(outputs, tiling.outputs), inputs // tiling.inputs)
    sums = jnp.int32 if problem.integers and problem.groups == 1 else jnp.float32
    return pl.pallas_call(
        functools.partial(
            _kernel, names=tuple(given), problem=problem, places=places, num_scalars=len(scalars)
        ),
        jax.ShapeDtypeStruct((rows, outputs), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=grid, in_specs=[specs[name] for name in given],
            out_specs=pl.BlockSpec((tiling.rows, tiling.outputs), lambda i, n, k, *_: (i, n)),
            scratch_shapes=[
                pltpu.VMEM((tiling.rows, tiling.outputs), sums),
                pltpu.VMEM((problem.groups, tiling.outputs), jnp.float32),
                pltpu.VMEM((tiling.rows, pl.cdiv(problem.groups, LANES) * LANES), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * inputs * outputs, transcendentals=0,
            bytes_accessed=sum(a.nbytes for a in given.values()) + rows * outputs * dtype.itemsize,
        ),
        interpret=interpret,
        name=name,
    )(*scalars, *given.values())  # fmt: skip


def refuse(device: Any, x: Any, weight: QuantizedWeight, dtype: Any) -> str | None:
    """Reason why the kernel cannot take a call on a jax Device; None if it can."""
    del dtype
    if weight.kind not in ("int8", "int4"):
        return f"it multiplies weights of int8 and int4, not {weight.kind}"
    if weight.layout != "lanes" and not (weight.layout == "rows" and weight.kind == "int8" and weight.groups == 1):
        return f"the layout is {weight.layout}: must be lanes, or rows for int8 with one group an output"
    if weight.activations == "float" and x.dtype != jnp.bfloat16:
        return f"x of {x.dtype}: it multiplies bfloat16"
    if weight.activations == "int8" and (weight.kind != "int8" or not _is_symmetric(weight)):
        return f"activations=int8 with weights of {weight.kind}: must be int8, without zero points and minima"
    inputs, size = weight.shape[-1], weight.group_size
    if inputs % LANES:
        return f"{inputs} inputs: must be a multiple of {LANES}"
    small = LEAST_IN_GROUP <= size < LANES and LANES % size == 0
    if weight.groups > 1 and not small and (size % LANES or size > MOST_IN_GROUP):
        accepted = f"16, 32, 64, a multiple of {LANES} up to {MOST_IN_GROUP}, or all inputs"
        return f"groups of {size} inputs: must be {accepted}"
    return refuse_tpu(device)


def _is_symmetric(weight: QuantizedWeight) -> bool:
    return weight.zeros is None and weight.mins is None


def _kernel(*refs: Ref, names: tuple[str, ...], problem: Problem, places: Places, num_scalars: int) -> None:
    scalars, refs = refs[:num_scalars], refs[num_scalars:]
    given = dict(zip(names, refs, strict=False))
    out_ref, total_ref, scales_ref, x_sums_ref = refs[len(names) :]
    first, block, last = pl.program_id(1) == 0, pl.program_id(2), pl.num_programs(2) - 1
    needed = places.needed(pl.program_id(0), scalars)
    has_offsets = problem.kind == "int4" or "mins" in given

    @pl.when(needed & (block == 0))
    def _() -> None:
        total_ref[...] = jnp.zeros_like(total_ref)
        scales_ref[...] = given["scales"][...].astype(jnp.float32)

    if has_offsets:

        @pl.when(needed & first & (block == 0))
        def _() -> None:
            x_sums_ref[...] = jnp.zeros_like(x_sums_ref)

        @pl.when(needed & first)
        def _() -> None:
            _sum_x(problem, given["x"], x_sums_ref, block)

    @pl.when(needed)
    def _() -> None:
        _multiply_block(problem, given, total_ref, scales_ref, block)

    @pl.when(needed & (block == last))
    def _() -> None:
        total = total_ref[...].astype(jnp.float32)
        if problem.groups == 1:
            total *= scales_ref[...]
        if has_offsets:
            total -= _offset(problem, given, scales_ref, x_sums_ref)
        if "row_scales" in given:
            total *= given["row_scales"][...]
        out_ref[...] = total.astype(out_ref.dtype)

    @pl.when(jnp.logical_not(needed))
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)


def _multiply_block(problem: Problem, given: dict[str, Ref], total_ref: Ref, scales_ref: Ref, block: Array) -> None:
    """Add the products of a block's inputs to the sums."""
    width, rows = problem.width, problem.tiling.rows
    products = problem.tiling.inputs // width
    whole = problem.groups == 1

    def multiply(index: Array) -> None:
        x = given["x"][:, pl.ds(pl.multiple_of(index * width, LANES), width)]
        if problem.groups_of_product > 1:
            x = _apart(x, problem.group_size)
        numbers, axis = _numbers(given["codes"], problem, index)
        product = lax.dot_general(
            x, numbers, (((1,), (axis,)), ((), ())),
            preferred_element_type=jnp.int32 if problem.integers else jnp.float32,
        )  # fmt: skip
        if whole:
            total_ref[...] += product
            return
        total = total_ref[...]
        for i in range(problem.groups_of_product):
            group = (block * products + index) * problem.groups_of_product + i
            total += product[i * rows : (i + 1) * rows].astype(jnp.float32) * scales_ref[pl.ds(group, 1), :]
        total_ref[...] = total

    _repeat(products, WIDE // width, multiply)


def _apart(x: Array, size: int) -> Array:
    """[rows, 128] as [groups * rows, 128], with zeros in place of other groups' inputs."""
    words = pltpu.bitcast(x, jnp.int32)  # the device selects between words of 32 bits
    group = lax.div(lax.broadcasted_iota(jnp.int32, words.shape, 1), size)
    parts = [jnp.where(group == i, words, 0) for i in range(LANES // size)]
    return pltpu.bitcast(jnp.concatenate(parts), x.dtype)


def _numbers(codes_ref: Ref, problem: Problem, index: Array) -> tuple[Array, int]:
    """The codes of a matmul's inputs in x's dtype, and the axis of the inputs. int4 codes are larger by BIAS."""
    width = problem.width
    if problem.kind == "int8":
        codes = codes_ref[:, pl.ds(pl.multiple_of(index * width, LANES), width)]
        return (codes if problem.integers else codes.astype(jnp.bfloat16)), 1
    words_of_chunk, words = LANES // WORD_INPUTS, width // WORD_INPUTS
    words = codes_ref[pl.ds(pl.multiple_of(index * words, words), words), :]
    quarters = []
    for chunk in range(0, words.shape[0], words_of_chunk):
        part = words[chunk : chunk + words_of_chunk]
        shifted = [part << FROM_END, *(part >> 4 * q - FROM_END for q in range(1, 4))]
        quarters += [pltpu.bitcast(bits & NIBBLES | MAGIC, jnp.bfloat16) for bits in shifted]
    return jnp.concatenate(quarters), 0


def _sum_x(problem: Problem, x_ref: Ref, x_sums_ref: Ref, block: Array) -> None:
    """Add a block's inputs to the sums of x by group, by a matmul with a matrix of ones for the inputs of a group.

    XLA would make a copy of x in float32, or take 10% to 30% of the time of a decode's matmul.
    """
    size, chunks = problem.group_size, problem.tiling.inputs // LANES
    group, lane = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    group = lax.div(group, size)  # relative to the group of the chunk's first input

    def add(index: Array) -> None:
        first = lax.div((block * chunks + index) * LANES, size)
        ones = (group + lax.rem(first, LANES) == lane).astype(jnp.float32).astype(x_ref.dtype)
        x = x_ref[:, pl.ds(pl.multiple_of(index * LANES, LANES), LANES)]
        at = pl.ds(pl.multiple_of(lax.div(first, LANES) * LANES, LANES), LANES)
        x_sums_ref[:, at] += lax.dot_general(x, ones, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    _repeat(chunks, WIDE // LANES, add)


def _offset(problem: Problem, given: dict[str, Ref], scales_ref: Ref, x_sums_ref: Ref) -> Array:
    """The part of the sums that comes from minima, zero points and BIAS, to be subtracted: float32[rows, outputs]."""
    offsets = given["mins"][...].astype(jnp.float32) if "mins" in given else 0
    if problem.kind == "int4":
        # the device converts uint8 to floats through int32
        zeros = given["zeros"][...].astype(jnp.int32).astype(jnp.float32) if "zeros" in given else 0
        offsets += scales_ref[...] * (BIAS + (LEVELS // 2 if problem.symmetric else zeros))
    sums = x_sums_ref[:, : problem.groups]
    if problem.groups == 1:
        return sums * offsets
    dims = (((1,), (0,)), ((), ()))
    return lax.dot_general(sums, offsets, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _repeat(count: int, at_once: int, body: Callable[[Array], None]) -> None:
    """Call body(index) `count` times. The compiler interleaves the `at_once` calls of an iteration."""
    at_once = max(1, at_once)
    whole = count // at_once

    def step(i: Array, _: None) -> None:
        for n in range(at_once):
            body(i * at_once + n)

    lax.fori_loop(0, whole, step, None)
    for n in range(whole * at_once, count):
        body(jnp.int32(n))
