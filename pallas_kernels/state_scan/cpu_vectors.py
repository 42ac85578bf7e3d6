"""A token of the recurrence for a few columns of the state, as LLVM IR. See `pallas_kernels.native.vectors`."""

from typing import Any

from pallas_kernels.native.vectors import FLOAT, FLOAT32, FLOATS, INT, LANES, VECTOR, Code, vector_function

WIDTHS = (4, 2, 1)  # vectors of a block of columns: 4 of 16 numbers and 128 rows of the state are 32 KiB


def _step(width: int, *, is_delta: bool) -> Any:
    """Make a function: one token for `width` vectors of columns.

    state: address of the columns. line: bytes from a row of the state to the next. q, k: float32 [k_dim]. v: float32
    [width * LANES], replaced by the output. k_dim: even. decay: logarithm, at most 0.

    Sums over k_dim have two parts, the even and the odd rows, because a sum waits for its last addition.
    """

    @vector_function(INT, INT, INT, INT, INT, INT, FLOAT32, FLOAT32, FLOAT32, FLOAT32)
    def step(
        code: Code, state: Any, line: Any, q: Any, k: Any, v: Any, k_dim: Any,
        decay: Any, factor: Any, scale: Any, skip: Any,
    ) -> None:  # fmt: skip
        b, columns = code.builder, range(width)
        kept = code.exp(code.splat(decay))
        values = [code.load(code.at(v, (code.number(c * VECTOR), 1))) for c in columns]
        half = b.udiv(k_dim, code.number(2))

        def rows(i: Any) -> list[tuple[int, Any, Any]]:
            """Two rows of the state: 0 or 1, the row's index, its address."""
            found = []
            for part in range(2):
                row = b.add(b.mul(i, code.number(2)), code.number(part))
                found.append((part, row, code.at(state, (b.mul(row, line), 1))))
            return found

        def total(sums: list[Any]) -> list[Any]:
            return [b.fadd(b.load(sums[c]), b.load(sums[width + c])) for c in columns]

        change = values
        if is_delta:
            sums = code.variables([code.floats(0.0)] * (2 * width))
            with code.each(half) as i:
                for part, row, place in rows(i):
                    key = code.splat(code.load(code.at(k, (row, 4)), FLOAT))
                    for c in columns:
                        old, into = code.load(code.at(place, (code.number(c * VECTOR), 1))), sums[part * width + c]
                        b.store(code.fma(key, old, b.load(into)), into)
            change = [b.fsub(value, b.fmul(kept, found)) for value, found in zip(values, total(sums), strict=True)]
        change = [b.fmul(code.splat(factor), each) for each in change]
        sums = code.variables([code.floats(0.0)] * (2 * width))
        with code.each(half) as i:
            for part, row, place in rows(i):
                key, query = (code.splat(code.load(code.at(base, (row, 4)), FLOAT)) for base in (k, q))
                for c in columns:
                    at, into = code.at(place, (code.number(c * VECTOR), 1)), sums[part * width + c]
                    new = code.fma(key, change[c], b.fmul(kept, code.load(at)))
                    code.store(new, at)
                    b.store(code.fma(query, new, b.load(into)), into)
        for c, found in zip(columns, total(sums), strict=True):
            out = code.fma(code.splat(skip), values[c], b.fmul(code.splat(scale), found))
            code.store(out, code.at(v, (code.number(c * VECTOR), 1)))

    return step


delta_4, delta_2, delta_1 = (_step(width, is_delta=True) for width in WIDTHS)
add_4, add_2, add_1 = (_step(width, is_delta=False) for width in WIDTHS)


@vector_function(INT, INT, FLOAT32)
def l2_norm(code: Code, row: Any, chunks: Any, eps: Any) -> None:
    """row[chunks * LANES] /= sqrt(sum of squares + eps)."""
    b = code.builder
    (total,) = code.variables([code.floats(0.0)])
    with code.each(chunks) as i:
        value = code.load(code.at(row, (i, VECTOR)))
        b.store(code.fma(value, value, b.load(total)), total)
    whole = b.fadd(code.sums([b.load(total)] * LANES), code.splat(eps))
    factor = b.fdiv(code.floats(1.0), code.call(f"llvm.sqrt.v{LANES}f32", FLOATS, [whole]))
    with code.each(chunks) as i:
        place = code.at(row, (i, VECTOR))
        code.store(b.fmul(code.load(place), factor), place)
