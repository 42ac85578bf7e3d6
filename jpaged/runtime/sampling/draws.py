"""The ids that may be drawn, and the draw. Functions over a batch of rows; a row's result depends on no other row.

The kept ids are exact, and found without sorting the vocabulary (`vocab_search`). For nearly every row the 64 most
likely ids suffice. For other rows bisection finds the exact threshold. Ids as likely as the last kept id are kept, too.

A random row inverts the cumulative distribution of the 64 candidates, most likely first, or of the vocabulary in two
levels. For 64 x 151,936 on CPU this takes 23 ms; Gumbel noise over the vocabulary took 422 ms.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jpaged.params.sampling import COLUMNS, NUMBERS
from jpaged.runtime.sampling.vocab_search import (
    invert_cdf,
    kth_largest,
    likeliest,
    row_sums,
    top_p_edge,
    typical_range,
)
from jpaged.runtime.state import Leaf

# Number of a row's most likely ids that are searched before the whole vocabulary.
CANDIDATES = 64

Tree = TypeVar("Tree")  # a pytree of arrays


@flax.struct.dataclass
class Logits:
    """Logits of rows, after masks and penalties, and the numbers to turn them into log-weights."""

    work: Leaf     # float32[rows, vocab]
    peak: Leaf     # float32[rows]  largest logit of each row
    inverse: Leaf  # float32[rows]  1 / temperature
    maxima: Leaf   # float32[rows, blocks]  largest logit of each block: `block_maxima(work, CANDIDATE_BLOCK)`
    fixed: bool = flax.struct.field(pytree_node=False)  # `SamplerOptions.fixed_sums`
    part: int = flax.struct.field(pytree_node=False)    # rows searched at once over the whole vocabulary

    def less_peak(self, of: Float[Array, "rows n"] | None = None) -> Float[Array, "rows n"]:
        """Log-weights, <= 0: (logits - the row's largest) / temperature. of: some of the logits; None: all.

        XLA computes this again for every use, and every use must round alike: an id equal to a threshold from another
        use must be kept. A subtraction followed by a multiplication cannot be fused into one rounding.
        """
        return ((self.work if of is None else of) - self.peak[:, None]) * self.inverse[:, None]


@flax.struct.dataclass
class Kept:
    """The ids of a row that may be drawn: x >= threshold and |x - centre| <= reach, with x of `less_peak`."""

    threshold: Leaf  # float32[rows]
    centre: Leaf     # float32[rows]
    reach: Leaf      # float32[rows]; infinite without typical_p

    @classmethod
    def everything(cls, rows: int) -> "Kept":
        """All ids of `rows` rows."""
        return cls(jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.full(rows, jnp.inf))

    def holds(self, x: Float[Array, "rows n"]) -> Bool[Array, "rows n"]:
        """True for kept ids. x: from `Logits.less_peak`."""
        near = jnp.abs(x - self.centre[:, None]) <= self.reach[:, None]
        return (x >= self.threshold[:, None]) & near


def filtered(logits: Logits, kept: Kept, is_random: Bool[Array, " rows"]) -> Float[Array, "rows vocab"]:
    """Logits divided by the temperature; -inf for ids that are not kept. Greedy rows keep all."""
    is_kept = kept.holds(logits.less_peak()) | ~is_random[:, None]
    return jnp.where(is_kept, logits.work * logits.inverse[:, None], -jnp.inf)


@flax.struct.dataclass
class _Search:
    """The kept ids of rows, and their most likely ids."""

    kept: Kept
    values: Leaf   # float32[rows, count]  `less_peak` of the most likely ids
    ids: Leaf      # int32[rows, count]
    settled: Leaf  # bool[rows]  all kept ids are among them


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of rows on the ids that may be drawn. The functions below apply them, one after another."""

    is_random: Bool[Array, " rows"]
    floor: Float[Array, " rows"]  # min_p and top_n_sigma: the smallest `less_peak` that is kept; -inf keeps everything
    top_k: Int[Array, " rows"]
    top_p: Float[Array, " rows"]
    typical_p: Float[Array, " rows"]
    cut: Bool[Array, " rows"]      # top_p applies
    limited: Bool[Array, " rows"]  # any limit applies
    typical: bool  # False: no row has typical_p or top_n_sigma

    @classmethod
    def of(
        cls, logits: Logits, fields: Int[Array, "rows num_fields"], is_random: Bool[Array, " rows"], *, typical: bool
    ) -> "Limits":
        """The limits of rows of the request table."""
        # p >= min_p * p_max, in logarithms
        floor = jnp.log(parameter(fields, "min_p"))
        if typical:
            floor = jnp.maximum(floor, _sigma_floor(logits, parameter(fields, "top_n_sigma")))
        top_k, top_p = parameter(fields, "top_k"), parameter(fields, "top_p")
        typical_p = parameter(fields, "typical_p") if typical else jnp.ones(len(fields))
        cut = top_p < 1
        limited = is_random & ((top_k > 0) | cut | (floor > -jnp.inf) | (typical_p < 1))
        return cls(is_random, floor, top_k, top_p, typical_p, cut, limited, typical)


def draw_rows(
    logits: Logits, greedy: Int[Array, " rows"], uniforms: Float[Array, " rows"], limits: Limits
) -> tuple[Int[Array, " rows"], Kept]:
    """One token for each row, and the ids from which it was drawn. Settled rows draw from their candidates."""
    search = find_kept(logits, limits)
    drawn = _draw_candidate(search.values, search.ids, search.kept, uniforms)

    def draw_of_all(x: Array, found: Kept, uniforms: Array) -> Array:
        return invert_cdf(jnp.where(found.holds(x), jnp.exp(x), 0.0), uniforms, fixed=logits.fixed)

    drawn = _search_rows(limits.is_random & ~search.settled, draw_of_all, logits, (search.kept, uniforms), drawn)
    return jnp.where(limits.is_random, drawn, greedy), search.kept


def find_kept(logits: Logits, limits: Limits) -> _Search:
    """The ids that may be drawn.

    1. Find the most likely ids, and how many of them the limits keep. Nearly every row is then settled.
    2. Search the whole vocabulary for the limits of the other rows.
    """
    rows = len(limits.is_random)
    values, ids = _candidates(logits, limits.limited)
    threshold, settled = _threshold_of_candidates(logits, limits, values)
    threshold = _threshold_of_all(logits, limits, threshold, settled)
    found = Kept(threshold, jnp.zeros(rows), jnp.full(rows, jnp.inf))
    if limits.typical:
        found = _near_typical(logits, limits, values, found, settled)
    return _Search(found, values, ids, settled)


def _candidates(
    logits: Logits, limited: Bool[Array, " rows"]
) -> tuple[Float[Array, "rows count"], Int[Array, "rows count"]]:
    """`less_peak` of the most likely ids, and the ids. Zeros if no row is limited."""
    rows, vocab = logits.work.shape
    shape = rows, min(CANDIDATES, vocab)

    def found() -> tuple[Float[Array, "rows count"], Int[Array, "rows count"]]:
        largest, ids = likeliest(logits.work, shape[1], logits.maxima)
        return logits.less_peak(largest), ids

    return lax.cond(jnp.any(limited), found, lambda: (jnp.zeros(shape), jnp.zeros(shape, jnp.int32)))


def _threshold_of_candidates(
    logits: Logits, limits: Limits, values: Float[Array, "rows count"]
) -> tuple[Float[Array, " rows"], Bool[Array, " rows"]]:
    """The smallest value that min_p, top_k and top_p keep, and True for rows where it is exact."""
    last = values[:, -1]
    whole = values.shape[1] == logits.work.shape[1]
    floor, top_k, top_p, cut = limits.floor, limits.top_k, limits.top_p, limits.cut
    # top_k: the k-th largest value, unless min_p keeps fewer than k values
    place = jnp.clip(top_k - 1, 0, values.shape[1] - 1)
    kth = jnp.take_along_axis(values, place[:, None], axis=1)[:, 0]
    threshold = jnp.where((top_k > 0) & (top_k <= values.shape[1]), jnp.maximum(kth, floor), floor)
    settled = limits.limited & ((threshold > last) | whole)
    # top_p: a share of the remaining mass. In rows that are already settled, the candidates have all of this mass.
    kept = values >= threshold[:, None]
    weights = jnp.where(kept, jnp.exp(values), 0.0)
    needs_mass = limits.is_random & cut & ~settled & (top_k == 0)
    mass = jnp.where(settled, row_sums(weights, fixed=logits.fixed), jnp.inf)
    mass = lax.cond(jnp.any(needs_mass), lambda: jnp.where(needs_mass, _mass(logits, floor), mass), lambda: mass)
    reached = jnp.cumsum(weights, axis=1) >= (top_p * mass)[:, None]
    edge = jnp.take_along_axis(values, jnp.argmax(reached, axis=1)[:, None], axis=1)[:, 0]
    cut_off = jnp.where(cut & reached[:, -1], jnp.maximum(edge, threshold), threshold)
    settled = jnp.where(cut & ~settled, limits.limited & reached[:, -1] & (cut_off > last), settled)
    return jnp.where(settled, cut_off, threshold), settled


def _threshold_of_all(
    logits: Logits, limits: Limits, threshold: Float[Array, " rows"], settled: Bool[Array, " rows"]
) -> Float[Array, " rows"]:
    """The threshold, found in the whole vocabulary for rows that are not settled."""
    counted = limits.is_random & ~settled & (limits.top_k > 0)
    kth = _search_rows(counted, kth_largest, logits, (limits.top_k,), threshold)
    threshold = jnp.where(counted, jnp.maximum(kth, limits.floor), threshold)
    needed, search = limits.is_random & ~settled & limits.cut, functools.partial(top_p_edge, fixed=logits.fixed)
    return _search_rows(needed, search, logits, (threshold, limits.top_p), threshold)


def _near_typical(
    logits: Logits, limits: Limits, values: Float[Array, "rows count"], found: Kept, settled: Bool[Array, " rows"]
) -> Kept:
    """`found`, with the range that typical_p keeps."""
    threshold, typical_p = found.threshold, limits.typical_p
    among = typical_range(values, values >= threshold[:, None], typical_p, fixed=logits.fixed)
    found = found.replace(centre=among[0], reach=among[1])

    def range_of_all(x: Array, threshold: Array, typical_p: Array) -> tuple[Array, Array]:
        return typical_range(x, x >= threshold[:, None], typical_p, bisect=True, fixed=logits.fixed)

    needed = limits.is_random & ~settled & (typical_p < 1)
    centre, reach = _search_rows(needed, range_of_all, logits, (threshold, typical_p), among)
    unneeded = typical_p >= 1
    return found.replace(centre=jnp.where(unneeded, 0.0, centre), reach=jnp.where(unneeded, jnp.inf, reach))


def _draw_candidate(
    values: Float[Array, "rows count"], ids: Int[Array, "rows count"], found: Kept, uniforms: Float[Array, " rows"]
) -> Int[Array, " rows"]:
    """One of the kept candidates of each row."""
    weights = jnp.where(found.holds(values), jnp.exp(values), 0.0)
    running = jnp.cumsum(weights, axis=1)
    at = jnp.sum(running <= (uniforms * running[:, -1])[:, None], axis=1)
    some = weights > 0
    at = jnp.clip(at, jnp.argmax(some, axis=1), values.shape[1] - 1 - jnp.argmax(some[:, ::-1], axis=1))
    return jnp.take_along_axis(ids, at[:, None], axis=1)[:, 0]


def _sigma_floor(logits: Logits, top_n_sigma: Float[Array, " rows"]) -> Float[Array, " rows"]:
    """Smallest log-weight that top-n-sigma keeps (Tang et al. 2024). -inf in rows without it."""

    def below_peak() -> Array:
        x = logits.work - logits.peak[:, None]  # before the temperature: squares of tiny numbers would be 0
        allowed = x > -jnp.inf
        count = jnp.sum(allowed, axis=1)
        mean = row_sums(jnp.where(allowed, x, 0.0), fixed=logits.fixed) / count
        squares = jnp.where(allowed, jnp.square(x - mean[:, None]), 0.0)
        deviation = jnp.sqrt(row_sums(squares, fixed=logits.fixed) / count)
        return jnp.where(top_n_sigma > 0, -top_n_sigma * deviation * logits.inverse, -jnp.inf)

    return lax.cond(jnp.any(top_n_sigma > 0), below_peak, lambda: jnp.full(len(top_n_sigma), -jnp.inf))


def _mass(logits: Logits, floor: Float[Array, " rows"]) -> Float[Array, " rows"]:
    x = logits.less_peak()
    return row_sums(jnp.where(x >= floor[:, None], jnp.exp(x), 0.0), fixed=logits.fixed)


def _search_rows(
    needed: Bool[Array, " rows"], search: Callable[..., Tree], logits: Logits, arrays: tuple, otherwise: Tree
) -> Tree:
    """`search(less_peak, *arrays)` over the whole vocabulary for rows in `needed`, `otherwise` for other rows.

    Searches `logits.part` rows at a time, so one row with a flat distribution does not cost a search over the batch.
    """
    rows, count, part = len(needed), jnp.sum(needed), logits.part
    order = jnp.concatenate([jnp.argsort(~needed), jnp.zeros(part, jnp.int32)])  # needed rows first

    def some(state: tuple[Array, Tree]) -> tuple[Array, Tree]:
        start, found = state
        chosen = lax.dynamic_slice(order, (start,), (part,))
        places = jnp.where(start + jnp.arange(part) < count, chosen, rows)  # drop other rows
        some_logits, *some_arrays = jax.tree.map(lambda array: jnp.take(array, chosen, axis=0), (logits, *arrays))
        new = search(some_logits.less_peak(), *some_arrays)
        return start + part, jax.tree.map(lambda old, new: old.at[places].set(new, mode="drop"), found, new)

    return lax.while_loop(lambda state: state[0] < count, some, (jnp.int32(0), otherwise))[1]


# -- fields of a row ----------------------------------------------------------------------------------------------


def parameter(fields: Int[Array, "rows num_fields"], name: str) -> Int[Array, " rows"] | Float[Array, " rows"]:
    """A sampling parameter of each row."""
    column = fields[:, COLUMNS[name]]
    return as_float(column) if name in NUMBERS else column


def as_float(bits: Int[Array, " rows"]) -> Float[Array, " rows"]:
    return lax.bitcast_convert_type(bits, jnp.float32)
