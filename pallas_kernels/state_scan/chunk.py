"""The recurrence for a chunk of tokens in matrix form: arithmetic that the kernels for NVIDIA and TPU share.

Gated DeltaNet (arXiv:2412.06464) and Mamba-2 (arXiv:2405.21060) without a loop over tokens. Chunks are counted from
position 0 of a sequence, so that a step that ends at a multiple of CHUNK does not change the chunks after it.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.state_scan.call import ScanCall

CHUNK = 64  # tokens
FEW = 32    # most tokens of a row that are computed one after the other instead


def most_chunks(tokens: int, rows: int, size: int = CHUNK) -> int:
    """Upper bound of the chunks of all rows with more than FEW tokens. A row may begin and end inside a chunk."""
    return tokens // size + 2 * min(rows, tokens // (FEW + 1))


def chunks_of_rows(
    call: ScanCall, size: int = CHUNK
) -> tuple[Int[Array, " chunks"], Int[Array, " chunks"], Int[Array, ""]]:
    """Row of each chunk, its index in the row, and the number of chunks. The last ones may be unused."""
    rows, (begins, ends) = call.slots.shape[0], (call.query_start_loc[:-1], call.query_start_loc[1:])
    chunks = jnp.where(ends - begins > FEW, (call.positions % size + ends - begins + size - 1) // size, 0)
    last = jnp.cumsum(chunks)  # of each row's chunks, exclusive
    chunk = jnp.arange(max(1, most_chunks(call.v.shape[0], rows, size)), dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(last, chunk, side="right", method="compare_all"), rows - 1).astype(jnp.int32)
    return row, chunk - (last - chunks)[row], last[-1]


def compute_chunk(
    q: Callable[[], Sequence[Array]],
    k: Sequence[Array],
    v: Float[Array, "chunk v_dim"],
    decay: Float[Array, "1 chunk"],
    factor: Float[Array, "1 chunk"],
    state: Sequence[Array],
    *,
    is_delta: bool,
    dot: Callable[..., Any],
) -> tuple[Float[Array, "chunk v_dim"], tuple[Array, ...]]:
    """q . S for each token, and the state after the chunk. All arrays are float32.

    k, state: in parts of k_dim: [chunk, part] and [part, v_dim] each. A GPU multiplies a part at a time.
    q:   a function that loads q, in the same parts. Until then it needs no registers.
    dot: dot(a, b, trans_a=False, trans_b=False) multiplies in float32, with either operand transposed first.

    Tokens outside the row must have zeros in k, v, decay and factor: they change nothing.

    With c = the sum of decays up to and including a token, the change that token i adds to the state is

        u[i] = factor[i] * (v[i] - exp(c[i]) * k[i] . S - sum over j < i of exp(c[i] - c[j]) * (k[i] . k[j]) * u[j])

    This is a triangular system, without the last two terms unless is_delta. Its inverse is made of inverses of blocks:
    of 1, 2, 4, ... tokens. The product of powers of the matrix would need fewer steps, but its numbers grow until
    nothing is right.
    """
    size = k[0].shape[0]
    i, j = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))

    def multiply(a: Sequence[Array], b: Sequence[Array], **options: bool) -> Array:
        products = [dot(x, y, **options) for x, y in zip(a, b, strict=True)]
        return functools.reduce(operator.add, products)

    def as_column(row: Array) -> Array:
        return jnp.sum(jnp.where(i == j, row, 0.0), axis=1, keepdims=True)

    total = jnp.sum(jnp.where(i <= j, as_column(decay), 0.0), axis=0, keepdims=True)
    total_column, factors = as_column(total), as_column(factor)
    apart = jnp.where(i >= j, jnp.exp(jnp.minimum(total_column - total, 0.0)), 0.0)
    since_start = jnp.exp(total_column)
    if is_delta:
        system = jnp.where(i > j, factors * multiply(k, k, trans_b=True) * apart, 0.0)

        def double(level: Array, inverse: Array) -> Array:
            """Inverses of blocks of 2 << level tokens, from those of blocks of half the size."""
            block = jnp.int32(1) << level
            # the lower left quarter of each block
            lower = ((i ^ j) < 2 * block) & ((i & block) != 0) & ((j & block) == 0)
            return inverse - dot(inverse, dot(jnp.where(lower, system, 0.0), inverse))

        # a loop, because the compiler for GPUs would keep the matrices of all levels in registers
        inverse = lax.fori_loop(0, size.bit_length() - 1, double, jnp.where(i == j, 1.0, 0.0))
        change = dot(inverse, factors * (v - since_start * multiply(k, state)))
    else:
        change = factors * v
    query = q()
    out = since_start * multiply(query, state) + dot(multiply(query, k, trans_b=True) * apart, change)
    whole = jnp.sum(decay, axis=1, keepdims=True)
    kept = jnp.exp(jnp.minimum(whole - total_column, 0.0))
    new = (jnp.exp(whole) * old + dot(part * kept, change, trans_a=True) for part, old in zip(k, state, strict=True))
    return out, tuple(new)
