"""The recurrence for a chunk of tokens in matrix form, as the kernel for TPU computes it. NVIDIA's have the same form.

Gated DeltaNet (arXiv:2412.06464), Kimi Delta Attention (arXiv:2510.26692) and Mamba-2 (arXiv:2405.21060) without a loop
over tokens. Chunks are counted from position 0 of a sequence, so that a step that ends at a multiple of CHUNK does not
change the chunks after it.
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

    This is a triangular system, without the last two terms unless is_delta.
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
        change = dot(_invert(system, dot), factors * (v - since_start * dot(k, state)))
    else:
        change = factors * v
    out = since_start * dot(q, state) + dot(dot(q, k, trans_b=True) * apart, change)
    whole = jnp.sum(decay, axis=1, keepdims=True)
    kept = jnp.exp(jnp.minimum(whole - total_column, 0.0))
    return out, jnp.exp(whole) * state + dot(k * kept, change, trans_a=True)


def _invert(system: Float[Array, "chunk chunk"], dot: Callable[..., Any]) -> Float[Array, "chunk chunk"]:
    """The inverse of 1 + system, which has numbers below the diagonal only.

    It is made of inverses of blocks of 1, 2, 4, ... tokens. The product of powers of the matrix would need fewer steps,
    but its numbers grow until nothing is right.
    """
    size = system.shape[0]
    i, j = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))

    def double(level: Array, inverse: Array) -> Array:
        """Inverses of blocks of 2 << level tokens, from those of blocks of half the size."""
        block = jnp.int32(1) << level
        # the lower left quarter of each block
        lower = ((i ^ j) < 2 * block) & ((i & block) != 0) & ((j & block) == 0)
        return inverse - dot(inverse, dot(jnp.where(lower, system, 0.0), inverse))

    return lax.fori_loop(0, size.bit_length() - 1, double, jnp.where(i == j, 1.0, 0.0))


def compute_channel_chunk(
    q: Float[Array, "chunk k_dim"],
    k: Float[Array, "chunk k_dim"],
    v: Float[Array, "chunk v_dim"],
    decay: Float[Array, "chunk k_dim"],
    factor: Float[Array, "1 chunk"],
    state: Float[Array, "k_dim v_dim"],
    *,
    dot: Callable[..., Any],
) -> tuple[Float[Array, "chunk v_dim"], Float[Array, "k_dim v_dim"]]:
    """`compute_chunk` of the delta rule with a decay for each channel of k (Kimi Delta Attention, arXiv:2510.26692).

    exp(c[i] - c[j]) has k_dim numbers then, so it multiplies the channels before they are summed: `_pairs`.
    """
    size, k_dim = k.shape
    i, j = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    factors = jnp.sum(jnp.where(i == j, factor, 0.0), axis=1, keepdims=True)
    since_start = jnp.exp(dot(jnp.where(i >= j, 1.0, 0.0), decay))
    kept = jnp.exp(dot(jnp.where(i < j, 1.0, 0.0), decay))
    scores, system = _pairs(q, k, decay, dot)
    change = dot(_invert(factors * system, dot), factors * (v - dot(since_start * k, state)))
    out = dot(since_start * q, state) + dot(scores, change)
    row, column = (lax.broadcasted_iota(jnp.int32, (k_dim, k_dim), axis) for axis in (0, 1))
    whole = jnp.exp(jnp.sum(decay, axis=0, keepdims=True))
    whole = jnp.sum(jnp.where(row == column, whole, 0.0), axis=1, keepdims=True)
    return out, whole * state + dot(k * kept, change, trans_a=True)


def _pairs(
    q: Float[Array, "chunk k_dim"], k: Float[Array, "chunk k_dim"], decay: Float[Array, "chunk k_dim"],
    dot: Callable[..., Any],
) -> tuple[Float[Array, "chunk chunk"], Float[Array, "chunk chunk"]]:  # fmt: skip
    """Sums over channels of exp(c[i] - c[j]) * q[i] * k[j] for j <= i, and the same of k[i] for j < i. Others are 0.

    Each pair of tokens is in the two halves of one block of 2, 4, 8, ... tokens. The exponent is the sum of two parts:
    the decays from the block's middle to token i, and those from token j to the middle. Both are at most 0. So both
    exponentials are at most 1, and a matmul adds the channels. The parts are sums of decays. A difference of two sums
    from the start of the chunk would lose the last bits of weak decays after strong ones.
    """
    size = k.shape[0]
    i, j = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    token = lax.broadcasted_iota(jnp.int32, k.shape, 0)

    def add(level: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        """Pairs in blocks of 2 << level tokens, with one token in each half."""
        half = jnp.int32(1) << level
        is_later = (token & half) != 0
        counted = ((i ^ j) < half) & (((i & half) != 0) ^ (j > i))
        near = jnp.exp(dot(jnp.where(counted, 1.0, 0.0), decay))
        later, earlier = jnp.where(is_later, near, 0.0), jnp.where(is_later, 0.0, near)
        of_q, of_k = (
            jnp.where((i ^ j) < 2 * half, dot(x * later, k * earlier, trans_b=True), 0.0) for x in (q, k)
        )
        return sums[0] + of_q, sums[1] + of_k

    same = jnp.where(i == j, jnp.sum(q * k, axis=1, keepdims=True), 0.0)
    return lax.fori_loop(0, size.bit_length() - 1, add, (same, jnp.zeros_like(same)))
