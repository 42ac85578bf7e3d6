"""Mixture of experts: a router chooses a few feed-forward layers a token, and only those are computed.

1. `route` gives each token its experts and their weights.
2. `blocks_by_expert` sorts the chosen (token, expert) pairs into blocks of rows, each block of one expert.
3. Two grouped products, with the gate between them, compute all blocks; each token sums what its experts give.

Padding tokens go to no expert. What a token gets does not depend on who shares its blocks: products have the same bits
from 8 rows on, sums over experts are taken in the order of the token's own choice.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jpaged.models.layers import Params, gate, gate_and_up, product
from jpaged.models.spec import DecoderSpec, Experts, Scoring
from pallas_kernels import grouped_dot


@dataclasses.dataclass(frozen=True)
class ExpertBlocks:
    """Where the rows of every (token, expert) pair lie."""

    token_of_row: Int[Array, "blocks rows"]
    expert_of_block: Int[Array, " blocks"]
    num_blocks_used: Int[Array, ""]
    row_of_choice: Int[Array, "tokens per_token"]  # in all rows of all blocks; past their end for padding tokens


def sparse_feed_forward(
    spec: DecoderSpec,
    experts: Experts,
    matrices: Params,
    x: Float[Array, "tokens hidden"],
    real: Bool[Array, " tokens"] | None,
) -> Float[Array, "tokens hidden"]:
    """The feed-forward layer of a layer that has experts. real: which tokens are no padding; None = all of them."""
    weights, choice = route(experts, matrices, x)
    if real is not None:
        choice = jnp.where(real[:, None], choice, experts.num)
    blocks = blocks_by_expert(choice, experts.num, rows_per_block(x.shape[0], experts))

    def grouped(rows: Array, name: str) -> Array:
        """A product of every block with its expert's matrix, and the expert's bias."""
        matrix = matrices[f"expert_{name}"]
        matrix = matrix.reshape(experts.num, -1, matrix.shape[-1])
        out = grouped_dot(rows, matrix, blocks.expert_of_block, blocks.num_blocks_used)
        if not experts.bias:
            return out
        return out + matrices[f"expert_{name}_bias"].reshape(experts.num, 1, -1)[blocks.expert_of_block]

    both = grouped(x[blocks.token_of_row], "gate_up")
    half = both.shape[-1] // 2
    out = grouped(gate(spec, both[..., :half], both[..., half:]), "down").reshape(-1, x.shape[1])
    total = jnp.zeros(x.shape, jnp.float32)
    for i in range(experts.per_token):
        given = jnp.take(out, blocks.row_of_choice[:, i], axis=0, mode="fill", fill_value=0)
        total += weights[:, i, None] * given.astype(jnp.float32)
    y = total.astype(x.dtype)
    return y if not experts.shared_size else y + _shared(spec, experts, matrices, x)


def _shared(
    spec: DecoderSpec, experts: Experts, matrices: Params, x: Float[Array, "tokens hidden"]
) -> Float[Array, "tokens hidden"]:
    """The experts that every token goes to, as one."""
    gated, up = gate_and_up(x, matrices["shared_gate_up"])
    y = product(gate(spec, gated, up), matrices["shared_down"])
    if not experts.shared_gate:
        return y
    # summed in an order of our own: XLA's product with a single row has other bits for other numbers of tokens
    score = row_sum(x.astype(jnp.float32) * matrices["shared_gate"].astype(jnp.float32))
    return (jax.nn.sigmoid(score)[:, None] * y.astype(jnp.float32)).astype(y.dtype)


def route(
    experts: Experts, matrices: Params, x: Float[Array, "tokens hidden"]
) -> tuple[Float[Array, "tokens per_token"], Int[Array, "tokens per_token"]]:
    """Each token's experts, and what their results are multiplied by; in float32."""
    logits = product(x, matrices["router"], dtype=jnp.float32)
    if experts.bias:
        logits += matrices["router_bias"].astype(jnp.float32)
    if experts.scoring is Scoring.SIGMOID:
        scores = jax.nn.sigmoid(logits)
    else:
        # XLA's own maximum, fused with the exponential, has other bits for other numbers of tokens on CPU
        scores = jnp.exp(logits - row_max(logits)[:, None])
        scores /= row_sum(scores)[:, None]
    ranking = scores + matrices["router_correction"] if experts.correction else scores
    if experts.expert_groups_per_token:
        members = ranking.reshape(x.shape[0], experts.expert_groups, -1)
        best = lax.top_k(members, experts.expert_group_top)[0]
        of_group = row_sum(best)
        kept = lax.top_k(of_group, experts.expert_groups_per_token)[1]
        is_kept = (kept[:, :, None] == jnp.arange(experts.expert_groups)).any(1)
        ranking = jnp.where(is_kept[:, :, None], members, -jnp.inf).reshape(ranking.shape)
    choice = lax.top_k(ranking, experts.per_token)[1]
    weights = jnp.take_along_axis(scores, choice, axis=1)
    if experts.renormalise:
        weights /= row_sum(weights)[:, None] + 1e-20
    return weights * experts.scale, choice


def rows_per_block(tokens: int, experts: Experts) -> int:
    """Rows of a block: a power of two above what an expert gets on average, at least 8 and at most 64.

    Larger blocks compute more padding, smaller ones read an expert's matrices more often. On CPU at 64 tokens, 64
    experts, 8 a token, as times of the products that are needed: 8 rows 1.7, 16 rows 1.3, 32 rows 1.6, 64 rows 2.1; at
    512 tokens: 16 rows 3.2, 32 rows 2.3, 64 rows 1.9, 128 rows 2.2.
    """
    average = tokens * experts.per_token // experts.num
    return min(64, max(8, 1 << average.bit_length()))


def blocks_by_expert(choice: Int[Array, "tokens per_token"], num_experts: int, rows: int) -> ExpertBlocks:
    """Sort the pairs by expert into blocks of `rows` rows. An expert of `num_experts` is none."""
    tokens, per_token = choice.shape
    pairs = tokens * per_token
    blocks = pairs // rows + min(num_experts, pairs)  # all full but one an expert
    expert = choice.reshape(-1)
    order = jnp.argsort(expert, stable=True)
    counts = jnp.zeros(num_experts, jnp.int32).at[expert].add(1, mode="drop")
    blocks_of = -(-counts // rows)
    ends, starts = jnp.cumsum(blocks_of), jnp.cumsum(counts) - counts
    known = jnp.minimum(expert, num_experts - 1)
    rank = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs)) - starts[known]  # among the expert's own
    row = jnp.where(expert < num_experts, (ends - blocks_of)[known] * rows + rank, blocks * rows)
    token_of_row = jnp.zeros(blocks * rows, jnp.int32).at[row].set(jnp.arange(pairs) // per_token, mode="drop")
    expert_of_block = jnp.searchsorted(ends, jnp.arange(blocks), side="right")
    return ExpertBlocks(
        token_of_row.reshape(blocks, rows),
        jnp.minimum(expert_of_block, num_experts - 1).astype(jnp.int32),
        ends[-1],
        row.reshape(tokens, per_token),
    )


def row_sum(x: Float[Array, "*lead width"]) -> Float[Array, "*lead"]:
    """Sums over the last axis by halving it: the same bits for every number of rows, which XLA's own have not."""
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        rest = x[..., half:]
        x = x[..., :half] + jnp.pad(rest, [(0, 0)] * (x.ndim - 1) + [(0, half - rest.shape[-1])])
    return x[..., 0]


def row_max(x: Float[Array, "*lead width"]) -> Float[Array, "*lead"]:
    """The largest of the last axis, by halving it as `row_sum` does."""
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        x = jnp.maximum(x[..., :half], x[..., -half:])
    return x[..., 0]
