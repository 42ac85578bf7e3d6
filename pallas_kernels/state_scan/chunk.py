"""The recurrence for a chunk of tokens in matrix form: arithmetic that the kernels for NVIDIA and TPU share.

Gated DeltaNet (arXiv:2412.06464) and Mamba-2 (arXiv:2405.21060) without a loop over tokens. Chunks are counted from
position 0 of a sequence, so that a step that ends at a multiple of CHUNK does not change the chunks after it.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

CHUNK = 64  # tokens
FEW = 32    # most tokens of a row that are computed one after the other instead


def most_chunks(tokens: int, rows: int) -> int:
    """Upper bound of the chunks of all rows with more than FEW tokens. A row may begin and end inside a chunk."""
    return tokens // CHUNK + 2 * min(rows, tokens // (FEW + 1))


def compute_chunk(
    q: Callable[[], Array],
    k: Float[Array, "chunk k_dim"],
    v: Float[Array, "chunk v_dim"],
    decay: Float[Array, "1 chunk"],
    factor: Float[Array, "1 chunk"],
    state: Float[Array, "k_dim v_dim"],
    *,
    is_delta: bool,
    dot: Callable[..., Any],
) -> tuple[Float[Array, "chunk v_dim"], Float[Array, "k_dim v_dim"]]:
    """q . S for each token, and the state after the chunk. All arrays are float32.

    q:   a function that loads q [chunk, k_dim]: until then it needs no registers.
    dot: dot(a, b, trans_a=False, trans_b=False) multiplies in float32, with either operand transposed first.

    Tokens outside the row must have zeros in k, v, decay and factor: they change nothing.

    With c = the sum of decays up to and including a token, the change that token i adds to the state is

        u[i] = factor[i] * (v[i] - exp(c[i]) * k[i] . S - sum over j < i of exp(c[i] - c[j]) * (k[i] . k[j]) * u[j])

    This is a triangular system, without the last two terms unless is_delta. Its inverse is made of inverses of blocks:
    of 1, 2, 4, ... tokens. The product of powers of the matrix would need fewer steps, but its numbers grow until
    nothing is right.
    """
    size = k.shape[0]
    i, j = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))

    def as_column(row: Array) -> Array:
        return jnp.sum(jnp.where(i == j, row, 0.0), axis=1, keepdims=True)

    total = jnp.sum(jnp.where(i <= j, as_column(decay), 0.0), axis=0, keepdims=True)
    total_column, factors = as_column(total), as_column(factor)
    apart = jnp.where(i >= j, jnp.exp(jnp.minimum(total_column - total, 0.0)), 0.0)
    since_start = jnp.exp(total_column)
    if is_delta:
        system = jnp.where(i > j, factors * dot(k, k, trans_b=True) * apart, 0.0)
        inverse = jnp.where(i == j, 1.0, 0.0)
        block = 1
        while block < size:
            # the lower left quarter of each block of 2 * block tokens
            lower = ((i ^ j) < 2 * block) & ((i & block) != 0) & ((j & block) == 0)
            part = jnp.where(lower, system, 0.0)
            inverse -= part if block == 1 else dot(inverse, dot(part, inverse))
            block *= 2
        change = dot(inverse, factors * (v - since_start * dot(k, state)))
    else:
        change = factors * v
    query = q()
    out = since_start * dot(query, state) + dot(dot(query, k, trans_b=True) * apart, change)
    whole = jnp.sum(decay, axis=1, keepdims=True)
    kept = k * jnp.exp(jnp.minimum(whole - total_column, 0.0))
    return out, jnp.exp(whole) * state + dot(kept, change, trans_a=True)
