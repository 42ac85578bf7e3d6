"""A token of the recurrence for a few columns of the state, as LLVM IR. See `pallas_kernels.native.vectors`."""

from collections.abc import Callable
from typing import Any

from pallas_kernels.native.vectors import FLOAT, FLOAT32, FLOATS, INT, LANES, VECTOR, Code, vector_function

WIDTHS = (4, 2, 1)  # vectors of a block of columns: 4 of 16 numbers and 128 rows of the state are 32 KiB


def _step(width: int, *, is_delta: bool) -> Any:
    """Make a function: one token for `width` vectors of columns, with one decay for the whole state.

    state: address of the columns. line: bytes from a row of the state to the next. q, k: float32 [k_dim]. v: float32
    [width * LANES], replaced by the output. k_dim: even. decay: logarithm, at most 0.
    """

    @vector_function(INT, INT, INT, INT, INT, INT, FLOAT32, FLOAT32, FLOAT32, FLOAT32)
    def step(
        code: Code, state: Any, line: Any, q: Any, k: Any, v: Any, k_dim: Any,
        decay: Any, factor: Any, scale: Any, skip: Any,
    ) -> None:  # fmt: skip
        kept = code.exp(code.splat(decay))
        token = _Token(code, width, state, line, k_dim)
        values = token.vectors(v)
        change = values
        if is_delta:
            faded = (code.builder.fmul(kept, found) for found in token.product(k))
            change = [code.builder.fsub(value, each) for value, each in zip(values, faded, strict=True)]
        token.finish(q, k, v, values, change, lambda row: kept, factor, scale, skip)

    return step


def _step_by_channel(width: int) -> Any:
    """Make a function: the delta rule for one token, with a decay for each row of the state.

    kept, faded: float32 [k_dim], of `fade`. The other arguments are those of `_step`.
    """

    @vector_function(INT, INT, INT, INT, INT, INT, INT, INT, FLOAT32, FLOAT32, FLOAT32)
    def step(
        code: Code, state: Any, line: Any, q: Any, k: Any, v: Any, k_dim: Any,
        faded: Any, kept: Any, factor: Any, scale: Any, skip: Any,
    ) -> None:  # fmt: skip
        token = _Token(code, width, state, line, k_dim)
        values = token.vectors(v)
        change = [code.builder.fsub(value, x) for value, x in zip(values, token.product(faded), strict=True)]
        token.finish(q, k, v, values, change, lambda row: token.number(kept, row), factor, scale, skip)

    return step


class _Token:
    """Code for one token and `width` vectors of columns.

    Sums over k_dim have two parts, the even and the odd rows, because a sum waits for its last addition.
    """

    def __init__(self, code: Code, width: int, state: Any, line: Any, k_dim: Any) -> None:
        self.code, self.width, self.state, self.line = code, width, state, line
        self.half = code.builder.udiv(k_dim, code.number(2))

    def vectors(self, row: Any) -> list[Any]:
        """The columns of a row of numbers."""
        return [self.code.load(self._at(row, c)) for c in range(self.width)]

    def number(self, row: Any, index: Any) -> Any:
        """A vector of copies of row[index]."""
        return self.code.splat(self.code.load(self.code.at(row, (index, 4)), FLOAT))

    def product(self, k: Any) -> list[Any]:
        """k . state."""
        code, sums = self.code, self._sums()
        with code.each(self.half) as i:
            for part, row, place in self._rows(i):
                key = self.number(k, row)
                for c, old in enumerate(self.vectors(place)):
                    into = sums[part * self.width + c]
                    code.builder.store(code.fma(key, old, code.builder.load(into)), into)
        return self._total(sums)

    def finish(
        self, q: Any, k: Any, v: Any, values: list[Any], change: list[Any], kept: Callable[[Any], Any],
        factor: Any, scale: Any, skip: Any,
    ) -> None:  # fmt: skip
        """state = kept(row) * state + k (outer) factor * change;  v = scale * q . state + skip * values."""
        code, b, sums = self.code, self.code.builder, self._sums()
        change = [b.fmul(code.splat(factor), each) for each in change]
        with code.each(self.half) as i:
            for part, row, place in self._rows(i):
                key, query, of_row = self.number(k, row), self.number(q, row), kept(row)
                for c in range(self.width):
                    at, into = self._at(place, c), sums[part * self.width + c]
                    new = code.fma(key, change[c], b.fmul(of_row, code.load(at)))
                    code.store(new, at)
                    b.store(code.fma(query, new, b.load(into)), into)
        for c, found in enumerate(self._total(sums)):
            out = code.fma(code.splat(skip), values[c], b.fmul(code.splat(scale), found))
            code.store(out, self._at(v, c))

    def _at(self, row: Any, column: int) -> Any:
        return self.code.at(row, (self.code.number(column * VECTOR), 1))

    def _sums(self) -> list[Any]:
        return self.code.variables([self.code.floats(0.0)] * (2 * self.width))

    def _total(self, sums: list[Any]) -> list[Any]:
        b = self.code.builder
        return [b.fadd(b.load(sums[c]), b.load(sums[self.width + c])) for c in range(self.width)]

    def _rows(self, i: Any) -> list[tuple[int, Any, Any]]:
        """Two rows of the state: 0 or 1, the row's index, its address."""
        b, found = self.code.builder, []
        for part in range(2):
            row = b.add(b.mul(i, self.code.number(2)), self.code.number(part))
            found.append((part, row, self.code.at(self.state, (b.mul(row, self.line), 1))))
        return found


delta_4, delta_2, delta_1 = (_step(width, is_delta=True) for width in WIDTHS)
add_4, add_2, add_1 = (_step(width, is_delta=False) for width in WIDTHS)
channels_4, channels_2, channels_1 = (_step_by_channel(width) for width in WIDTHS)


@vector_function(INT, INT, INT, INT, INT)
def fade(code: Code, decay: Any, k: Any, kept: Any, faded: Any, chunks: Any) -> None:
    """kept = exp(decay); faded = k * kept. All are float32 [chunks * LANES]."""
    with code.each(chunks) as i:
        share = code.exp(code.load(code.at(decay, (i, VECTOR))))
        code.store(share, code.at(kept, (i, VECTOR)))
        key = code.load(code.at(k, (i, VECTOR)))
        code.store(code.builder.fmul(key, share), code.at(faded, (i, VECTOR)))


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
