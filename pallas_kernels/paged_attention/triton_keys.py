"""One iteration of attention over a few keys: the part that the decode and the prefill kernels of triton.py share.

Weights are powers of two, because the GPU computes exp2 in one instruction. `Problem.unit` turns a score into the
exponent. In the plain case it is scale * log2(e), and costs nothing, because it is part of a multiply-add.
"""

import dataclasses
import functools
import math
import struct
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_kernels.paged_attention.call import StaticParameters
from pallas_kernels.paged_attention.tiling import Tiling

Ref = Any  # an array inside a kernel, addressed by `.at`
MASKED = -1e30  # finite: -inf - -inf would be NaN
LOG2E = math.log2(math.e)
WIDE = 512  # heads with more numbers are multiplied in pieces
SMALLEST_UNIT = 1e-20  # times MASKED: an exponent of -1e10


class Columns(NamedTuple):
    """Neighbouring numbers of a head, as a kernel loads them: `width` columns. Those from `end` on are zero."""

    first: Any  # a multiple of `width`
    width: int  # a power of two
    end: int

    @property
    def columns(self) -> Array:
        """int32[width]: the numbers of the columns."""
        return self.first + jnp.arange(self.width)

    @property
    def padded(self) -> bool:
        """True if there may be columns from `end` on."""
        return self.end % self.width != 0


class Given(NamedTuple):
    """The arrays of a call; inside the kernels, references to them."""

    tables: Any
    lens: Any
    starts: Any
    sinks: Any   # float32[q_heads], or [1] if there are none; slopes and scales likewise
    slopes: Any
    q: Any
    data: Any
    scales: Any


@dataclasses.dataclass(frozen=True)
class Problem(StaticParameters):
    """Static parameters of a call to these kernels."""

    kv_heads: int
    key_dim: int     # columns of q and of the keys that are multiplied
    table_keys: int  # most keys of a row: the width of the block tables
    v_dim: int       # width of a head's values
    latent: bool     # values are the first `v_dim` numbers of the keys
    scales: str  # of the pages: "none", "token" (int8) or "head" (fp8)
    tiling: Tiling
    interpret: bool

    @property
    def unit(self) -> float:
        """Factor from scores to exponents of two. Positive, so that it keeps their order.

        MASKED * unit must stay far below the smallest exponent, so `attend_keys` applies a tiny scale to the scores.
        """
        plain = self.softcap is None and not self.has_slopes and self.scale > SMALLEST_UNIT
        return self.scale * LOG2E if plain else 1.0

    @property
    def key_columns(self) -> tuple[Columns, ...]:
        """Columns of queries and keys, in pieces whose products are added. Only heads wider than WIDE have several."""
        if self.key_dim <= WIDE:
            return (Columns(0, _padded(self.key_dim), self.key_dim),)
        pieces, first = [], 0
        while first < self.key_dim:
            left = self.key_dim - first
            width = min(WIDE, max(16, 1 << (left.bit_length() - 1)))
            pieces.append(Columns(first, width, first + min(width, left)))
            first += width
        return tuple(pieces)

    def value_columns(self, part: Any = 0, parts: int = 1) -> Columns:
        """Columns of values and results that a program computes: those of one of `parts` parts."""
        width = _padded(-(-self.v_dim // parts))
        return Columns(part * width, width, self.v_dim)


def _padded(width: int) -> int:
    """The smallest width of at least `width` that the matmuls accept."""
    return max(16, pl.next_power_of_2(width))


def divide(x: Any, n: int) -> Any:
    """x // n for x >= 0. A shift if n is a power of two, because `//` takes a few more instructions for the sign."""
    if isinstance(x, int):
        return x // n
    return lax.shift_right_logical(x, jnp.int32(n.bit_length() - 1)) if n & (n - 1) == 0 else lax.div(x, jnp.int32(n))


def divide_up(x: Any, n: int) -> Any:
    """The smallest whole number that is at least x / n, for x >= 0."""
    return divide(x + (n - 1), n)


# Output [rows, width], largest score [rows], sum of the weights [rows], all float32. Weights are 2 ** (unit * (score -
# largest score)).
Carry = tuple[Array, Array, Array]


def exp2(problem: Problem, x: Array, *, factor: float = 1.0, offset: Array | None = None) -> Array:
    """2 ** (factor * x + offset), float32, with 0 for results below 2 ** -126.

    offset: broadcast to x; None: 0. XLA's own lowering takes six instructions more: it keeps results below 2 ** -126,
    and does not fuse multiply and add.
    """
    if problem.interpret:
        return jnp.exp2(x * factor + (0.0 if offset is None else offset))
    number = "0f" + struct.pack(">f", factor).hex().upper()
    args = [x] if offset is None else [x, jnp.broadcast_to(offset, x.shape)]
    exponent = f"mul.rn.f32 e, $1, {number};" if offset is None else f"fma.rn.f32 e, $1, {number}, $2;"
    (result,) = plgpu.elementwise_inline_asm(
        f"{{ .reg .f32 e; {exponent} ex2.approx.ftz.f32 $0, e; }}",
        args=args, constraints="=f" + ",f" * len(args), pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )  # fmt: skip
    return result


def start(rows: int, width: int) -> Carry:
    """A carry without keys."""
    return (
        jnp.zeros((rows, width), jnp.float32),
        jnp.full((rows,), MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )


def load_queries(
    problem: Problem, given: Given, index: Array, query_head: Array, real: Array
) -> tuple[Array, ...]:
    """Query rows [rows, width] for each of `key_columns`. index: their tokens. real: rows that are not padding."""

    def load(columns: Columns) -> Array:
        column = columns.columns[None, :]
        mask = real[:, None] & (column < columns.end)
        return plgpu.load(given.q.at[index[:, None], query_head[:, None], column], mask=mask, other=0.0)

    return tuple(load(columns) for columns in problem.key_columns)


def _load_page(
    given: Given, which: int, blocks: Array, head: Array, offset: Array, valid: Array | None, columns: Columns
) -> Array:
    """Keys (which=0) or values (which=1) of one KV head, [keys, width].

    blocks, offset: block of each key, and its offset in the block. valid: keys to read, others are zeros; None: all.
    """
    column = columns.columns[None, :]
    mask = column < columns.end if columns.padded else None
    if valid is not None:
        mask = valid[:, None] if mask is None else valid[:, None] & mask
    # without a mask there is nothing to fill in
    return plgpu.load(
        given.data.at[blocks[:, None], which, head, offset[:, None], column],
        mask=mask, other=None if mask is None else 0.0,
    )  # fmt: skip


def _load_scale(
    problem: Problem, given: Given, which: int, blocks: Array, head: Array, offset: Array, valid: Array | None
) -> Array | None:
    """Scales of keys or values, [keys] or a scalar. Arguments as in `_load_page`."""
    match problem.scales:
        case "token":
            scale = plgpu.load(
                given.scales.at[blocks, which, head, offset], mask=valid, other=None if valid is None else 0.0
            )
            return scale.astype(jnp.float32)
        case "head":
            return given.scales[which, head]
    return None


def attend_keys(
    problem: Problem,
    given: Given,
    carry: Carry,
    q: tuple[Array, ...],
    slope: Array | None,
    query_position: Array,
    row: Array,
    head: Array,
    position: Array,
    valid: Array | None,
    values: Columns,
) -> Carry:
    """Online softmax (Milakov & Gimelshein 2018): `carry` after the row's keys at the given positions.

    q:      from `load_queries`.
    valid:  keys that exist; None: all do, and every query sees all of them, so nothing is masked.
    values: columns of the output.
    """
    out, top, total = carry
    dtype = q[0].dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    entry = divide(position, problem.block_size)
    blocks = plgpu.load(given.tables.at[row, entry], mask=valid, other=None if valid is None else 0)
    offset = position - entry * problem.block_size
    key_scale = _load_scale(problem, given, 0, blocks, head, offset, valid)
    keys = (_load_page(given, 0, blocks, head, offset, valid, columns) for columns in problem.key_columns)
    products = (
        plgpu.dot(part, key.astype(dtype).T, precision=precision) for part, key in zip(q, keys, strict=True)
    )
    scores = functools.reduce(jnp.add, products)
    if key_scale is not None:
        scores *= key_scale[None, :] if key_scale.ndim else key_scale
    if problem.softcap is None:
        scores *= problem.scale * LOG2E / problem.unit
    else:
        scores = problem.softcap * LOG2E * jnp.tanh(scores * (problem.scale / problem.softcap))
    distance = query_position[:, None] - position[None, :]
    if slope is not None:
        scores -= (slope * LOG2E)[:, None] * distance.astype(jnp.float32)
    if valid is not None:
        seen = (distance >= 0) & valid[None, :]
        if problem.window is not None:
            seen &= distance < problem.window
        scores = jnp.where(seen, scores, MASKED)
    new_top = jnp.maximum(top, scores.max(axis=1))
    # a query that has seen no key yet must not count hidden ones: 2 ** (MASKED - MASKED) is 1
    base = new_top if valid is None else jnp.where(new_top == MASKED, 0.0, new_top)
    weights = exp2(problem, scores, factor=problem.unit, offset=(-problem.unit * base)[:, None])
    shrink = exp2(problem, top - base, factor=problem.unit)
    total = total * shrink + weights.sum(axis=1)
    value_scale = _load_scale(problem, given, 1, blocks, head, offset, valid)
    value = _load_page(given, 0 if problem.latent else 1, blocks, head, offset, valid, values)
    if value_scale is not None:
        weights *= value_scale[None, :] if value_scale.ndim else value_scale
    out = out * shrink[:, None] + plgpu.dot(weights.astype(dtype), value.astype(dtype), precision=precision)
    return out, new_top, total
