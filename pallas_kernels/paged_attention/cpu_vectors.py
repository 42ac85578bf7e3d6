"""Attention of a few query rows and LANES or 64 keys, as LLVM IR. See `pallas_kernels.native.vectors`."""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from pallas_kernels.native.memory import I32
from pallas_kernels.native.vectors import (
    FLOAT,
    FLOAT32,
    FLOATS,
    HAS_BFLOAT16,
    I16,
    I16S,
    INT,
    LANES,
    PAIR,
    PAIRS,
    TILE,
    VECTOR,
    BFloat,
    Code,
    add_bfloat16,
    add_float32,
    from_bfloat16,
    vector_function,
)

SPAN = 64  # keys of a step of softmax
LOWEST = -1e30  # maximum of no scores; finite, because -inf - -inf is NaN
LINE = 16  # queries, keys, values and results are padded to multiples of it
BITS = ir.VectorType(I16, 2 * LANES)  # of bfloat16 numbers


def _tree(combine: Callable[[Any, Any], Any], values: Sequence[Any]) -> Any:
    """Combine 1, 2, 4, ... values in a tree: pairs of neighbours, then pairs of the results, and so on."""
    while len(values) > 1:
        values = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _score_tile(rows: int, vector: Any, step: Callable[[Code, Any, Any, Any], Any]) -> Any:
    """Make a function: scores[rows, LANES] = queries[rows] @ keys[LANES].T, of `steps` vectors. score_stride: bytes."""

    @vector_function(INT, INT, INT, INT, INT)
    def score_tile(code: Code, scores: Any, score_stride: Any, queries: Any, keys: Any, steps: Any) -> None:
        b, per_row = code.builder, LANES // rows  # keys at a time: LANES sums in all
        stride, parts = b.mul(steps, code.number(VECTOR)), []
        for first in range(0, LANES, per_row):
            sums = code.variables([code.floats(0.0)] * LANES)
            with code.each(steps) as i:
                q = [code.load(code.at(queries, (stride, row), (i, VECTOR)), vector, 2) for row in range(rows)]
                k = [code.load(code.at(keys, (stride, first + key), (i, VECTOR)), vector, 2) for key in range(per_row)]
                for index, total in enumerate(sums):
                    row, key = divmod(index, per_row)
                    b.store(step(code, b.load(total), q[row], k[key]), total)
            parts.append(code.sums([b.load(total) for total in sums]))
        # store whole vectors: a load of one that was stored in parts waits for the stores
        for row in range(rows):
            lanes = range(row * per_row, (row + 1) * per_row)
            own = code.join([code.pick(part, part, lanes) for part in parts])
            code.store(own, code.at(scores, (score_stride, row)))

    return score_tile


score_tile, score_pair = (_score_tile(rows, FLOATS, add_float32) for rows in (TILE, PAIR))
score_tile_bfloat16, score_pair_bfloat16 = (_score_tile(rows, PAIRS, add_bfloat16) for rows in (TILE, PAIR))


def _load_bfloat16(code: Code, address: Any) -> Any:
    return from_bfloat16(code, code.load(address, I16S, 2))


def _add_values(rows: int, load: Callable[[Code, Any], Any], size: int) -> Any:
    """Make a function: out[rows, chunks * LANES] += weights[rows, LANES] @ values[LANES, chunks * LANES].

    Keys are added in order. Weights are float32. `load` reads a vector of values of `size` bytes. Strides are in bytes.
    """
    parts = LINE // LANES  # vectors at a time

    @vector_function(INT, INT, INT, INT, INT, INT)
    def add_values(
        code: Code, out: Any, weights: Any, weight_stride: Any, values: Any, value_stride: Any, chunks: Any
    ) -> None:
        b = code.builder
        stride = b.mul(chunks, code.number(VECTOR))
        with code.each(b.udiv(chunks, code.number(parts))) as i:
            places = [
                code.at(out, (stride, row), (i, 4 * LINE), (code.number(VECTOR), part))
                for row in range(rows) for part in range(parts)
            ]  # fmt: skip
            sums = [code.load(place) for place in places]
            for key in range(LANES):
                line = code.at(values, (value_stride, key), (i, size * LINE))
                value = [load(code, code.at(line, (code.number(size * LANES), part))) for part in range(parts)]
                for row in range(rows):
                    weight = code.load(code.at(weights, (weight_stride, row), (code.number(4), key)), FLOAT)
                    for part in range(parts):
                        index = row * parts + part
                        sums[index] = code.fma(code.splat(weight), value[part], sums[index])
            for place, total in zip(places, sums, strict=True):
                code.store(total, place)

    return add_values


add_values, add_pair = (_add_values(rows, Code.load, 4) for rows in (TILE, PAIR))


def _pairs(code: Code, first: Any, second: Any) -> list[Any]:
    """Interleave two vectors of 32 numbers: 32 pairs (number of `first`, number of `second`), in two vectors."""
    low = [lane // 2 + 2 * LANES * (lane % 2) for lane in range(2 * LANES)]
    return [code.pick(first, second, low), code.pick(first, second, [lane + LANES for lane in low])]


def _add_pairs(rows: int) -> Any:
    """Make a function: out[rows, chunks * LANES] += weights[rows, LANES] @ values[LANES, chunks * LANES].

    Pairs of keys are added in order. Weights and values are bfloat16. `chunks` is even. Strides are in bytes.
    """

    @vector_function(INT, INT, INT, INT, INT, INT)
    def add_pairs(
        code: Code, out: Any, weights: Any, weight_stride: Any, values: Any, value_stride: Any, chunks: Any
    ) -> None:
        b = code.builder
        stride = b.mul(chunks, code.number(VECTOR))
        with code.each(b.udiv(chunks, code.number(2))) as i:
            places = [
                [code.at(out, (stride, row), (i, 2 * VECTOR), (code.number(VECTOR), part)) for part in range(2)]
                for row in range(rows)
            ]
            sums = [[code.load(place) for place in each] for each in places]
            for pair in range(LANES // 2):
                lines = (code.at(values, (value_stride, 2 * pair + key), (i, VECTOR)) for key in (0, 1))
                value = _pairs(code, *(code.load(line, BITS, 2) for line in lines))
                for row in range(rows):
                    weight = code.splat(code.load(code.at(weights, (weight_stride, row), (code.number(4), pair)), I32))
                    weight = b.bitcast(weight, PAIRS)
                    for part in range(2):
                        sums[row][part] = add_bfloat16(code, sums[row][part], weight, b.bitcast(value[part], PAIRS))
            for row in range(rows):
                for place, total in zip(places[row], sums[row], strict=True):
                    code.store(total, place)

    return add_pairs


if HAS_BFLOAT16:
    add_values_bfloat16, add_pair_bfloat16 = (_add_pairs(rows) for rows in (TILE, PAIR))
else:
    add_values_bfloat16, add_pair_bfloat16 = (_add_values(rows, _load_bfloat16, 2) for rows in (TILE, PAIR))


def _store_float32(code: Code, value: Any, place: Any) -> None:
    code.store(value, place)


def _store_bfloat16(code: Code, value: Any, place: Any) -> None:
    narrow = ir.VectorType(BFloat(), LANES)
    code.store(code.call("llvm.x86.avx512bf16.cvtneps2bf16.512", narrow, [value]), place)


def _add_scores(store: Callable[[Code, Any, Any], None]) -> Any:
    """Make a function: one step of online softmax (arXiv:1805.02867) for a query and 64 keys.

    The scores of keys low to high - 1, times scale, become weights exp(score - maximum). Other scores become 0. `store`
    writes a vector of weights over its scores. top: the maximum so far, float32. total: a vector of sums of weights. If
    the maximum grows, total and out[chunks * LANES] are scaled down.
    """

    @vector_function(INT, INT, INT, INT, INT, FLOAT32, INT, INT)
    def add_scores(
        code: Code, scores: Any, top: Any, total: Any, out: Any, chunks: Any, scale: Any, low: Any, high: Any
    ) -> None:
        b = code.builder
        low, high = (code.splat(b.trunc(each, I32)) for each in (low, high))
        factor, values, seen, places = code.splat(scale), [], [], []
        for group in range(SPAN // LANES):
            lane = code.ints(range(group * LANES, (group + 1) * LANES))
            seen.append(b.and_(b.icmp_signed(">=", lane, low), b.icmp_signed("<", lane, high)))
            places.append(code.at(scores, (code.number(VECTOR), group)))
            values.append(b.select(seen[-1], b.fmul(code.load(places[-1]), factor), code.floats(LOWEST)))
        most = _tree(lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y), values)
        largest, old = code.largest(most), code.load(top, FLOAT)
        grows = b.fcmp_ordered(">", largest, old)
        with b.if_then(grows):
            shrink = code.exp(code.splat(b.fsub(old, largest)))
            code.store(largest, top)
            code.store(b.fmul(code.load(total), shrink), total)
            with code.each(chunks) as i:
                place = code.at(out, (i, VECTOR))
                code.store(b.fmul(code.load(place), shrink), place)
        maximum = code.splat(b.select(grows, largest, old))
        weights = [code.exp(b.fsub(value, maximum)) for value in values]
        weights = [b.select(mask, weight, code.floats(0.0)) for mask, weight in zip(seen, weights, strict=True)]
        for weight, place in zip(weights, places, strict=True):
            store(code, weight, place)
        code.store(b.fadd(code.load(total), _tree(b.fadd, weights)), total)

    return add_scores


add_scores = _add_scores(_store_float32)
add_scores_bfloat16 = _add_scores(_store_bfloat16) if HAS_BFLOAT16 else add_scores


@vector_function(INT, FLOAT32, FLOAT32, FLOAT32, FLOAT32)
def bend_scores(code: Code, scores: Any, scale: Any, cap: Any, slope: Any, distance: Any) -> None:
    """Apply scale, soft cap and ALiBi to the scores of LANES keys, in place.

    cap: 0 for none. distance: from the first key to the query; slope * distance is subtracted.
    """
    b, ones = code.builder, code.floats(1.0)
    value = b.fmul(code.load(scores), code.splat(scale))
    code.store(value, scores)
    with b.if_then(b.fcmp_ordered(">", cap, ir.Constant(FLOAT, 0.0))):
        limit = code.splat(cap)
        x = b.fdiv(value, limit)
        negative = b.fcmp_ordered("<", x, code.floats(0.0))
        size = b.select(negative, b.fneg(x), x)
        small = code.exp(b.fmul(size, code.floats(-2.0)))
        tanh = b.fdiv(b.fsub(ones, small), b.fadd(ones, small))
        code.store(b.fmul(b.select(negative, b.fneg(tanh), tanh), limit), scores)
    distances = b.fsub(code.splat(distance), ir.Constant(FLOATS, [float(lane) for lane in range(LANES)]))
    code.store(b.fsub(code.load(scores), b.fmul(code.splat(slope), distances)), scores)


@vector_function(INT)
def sum_lanes(code: Code, total: Any) -> None:
    """Replace each of LANES numbers by their sum."""
    value = code.load(total)
    code.store(code.sums([value] * LANES), total)


@vector_function(INT)
def exp_lanes(code: Code, values: Any) -> None:
    """exp of LANES numbers that are at most 0, in place."""
    code.store(code.exp(code.load(values)), values)
