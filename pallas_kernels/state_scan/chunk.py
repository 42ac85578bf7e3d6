"""The recurrence for a chunk of tokens in matrix form, as the kernel for TPU computes it. NVIDIA's have the same form.

Gated DeltaNet (arXiv:2412.06464) and Mamba-2 (arXiv:2405.21060) without a loop over tokens. Chunks are counted from
position 0 of a sequence, so that a step that ends at a multiple of CHUNK does not change the chunks after it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.state_scan.call import ScanCall

CHUNK = 64  # tokens
FEW = 32    # most tokens of a row that are computed one after the other instead


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of all rows with more than FEW tokens, row by row. The last ones may be unused."""

    row: Int[Array, " chunks"]
    index: Int[Array, " chunks"]  # of the chunk in its row
    first: Int[Array, " rows"]    # number of each row's first chunk
    count: Int[Array, ""]         # of used chunks

    @classmethod
    def of(cls, call: ScanCall, size: int) -> "Chunks":
        """Chunks of `size` tokens. A row may begin and end inside a chunk, so there are two more for each long row."""
        tokens, rows = call.v.shape[0], call.slots.shape[0]
        counts = call.query_start_loc[1:] - call.query_start_loc[:-1]
        chunks = jnp.where(counts > FEW, (call.positions % size + counts + size - 1) // size, 0)
        last = jnp.cumsum(chunks)  # of each row's chunks, exclusive
        chunk = jnp.arange(max(1, tokens // size + 2 * min(rows, tokens // (FEW + 1))), dtype=jnp.int32)
        # the default is a loop: several kernels for each step on a GPU
        row = jnp.searchsorted(last, chunk, side="right", method="compare_all")
        row = jnp.minimum(row, rows - 1).astype(jnp.int32)
        return cls(row, chunk - (last - chunks)[row], last - chunks, last[-1])


def compute_chunk(
    q: Float[Array, "chunk k_dim"],
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

        def double(level: Array, inverse: Array) -> Array:
            """Inverses of blocks of 2 << level tokens, from those of blocks of half the size."""
            block = jnp.int32(1) << level
            # the lower left quarter of each block
            lower = ((i ^ j) < 2 * block) & ((i & block) != 0) & ((j & block) == 0)
            return inverse - dot(inverse, dot(jnp.where(lower, system, 0.0), inverse))

        inverse = lax.fori_loop(0, size.bit_length() - 1, double, jnp.where(i == j, 1.0, 0.0))
        change = dot(inverse, factors * (v - since_start * dot(k, state)))
    else:
        change = factors * v
    out = since_start * dot(q, state) + dot(dot(q, k, trans_b=True) * apart, change)
    whole = jnp.sum(decay, axis=1, keepdims=True)
    kept = jnp.exp(jnp.minimum(whole - total_column, 0.0))
    return out, jnp.exp(whole) * state + dot(k * kept, change, trans_a=True)
