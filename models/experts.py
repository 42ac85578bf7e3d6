"""Mixture of experts: a router chooses a few feed-forward networks for each token, and only these are computed.

1. `route` returns each token's experts and their weights.
2. `blocks_by_expert` sorts the (token, expert) pairs into blocks of rows. All rows of a block have the same expert.
3. Two matmuls per block, with the gate between them, compute the experts. Each token sums its experts' outputs.

With several devices (`sharding`), each device has a part of every expert, or some of the experts. Each device computes
its part for all tokens, and a sum over devices joins the outputs. No token is dropped.

Padding tokens go to no expert. A token's result does not depend on other tokens in its blocks. A matmul's bits are the
same for all block sizes from 8 rows, and each token sums its experts' outputs in the order of its own choice.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.models.adapters import with_expert_adapters
from jpaged.models.layers import expanded, feed_forward, normalise, row_sum, softcap
from jpaged.models.linear import LayerContext, linear, linear_per_expert, products
from jpaged.models.sharding import TENSOR, Shards, SplitWeight, splits_inputs
from jpaged.models.spec import HASHED, Experts, Scoring


@dataclasses.dataclass(frozen=True)
class ExpertBlocks:
    """Rows for the (token, expert) pairs, in blocks. Each block has one expert. Results of unused rows are not read."""

    token_of_row: Int[Array, "blocks rows"]
    expert_of_block: Int[Array, " blocks"]
    num_blocks_used: Int[Array, ""]
    rows_of_block: Int[Array, " blocks"]  # number of used rows, which come first
    row_of_choice: Int[Array, "tokens per_token"]  # row in all blocks; past the end: no expert of this device


def sparse_feed_forward(
    experts: Experts, x: Float[Array, "tokens hidden"], context: LayerContext,
    routed: Float[Array, "tokens hidden"] | None = None,
) -> tuple[Float[Array, "tokens hidden"], Int[Array, "tokens per_token"]]:  # fmt: skip
    """Feed-forward network with experts. Returns (output, expert indices); the index of padding is past the last.

    routed: input of the router; None: x.
    """
    weights, choice = route(experts, x if routed is None else routed, context)
    shards, count = context.shards, context.params["expert_gate_up"].shape[0]  # experts on this device
    if context.real is not None:
        choice = jnp.where(context.real[:, None], choice, count * shards.count if shards.splits_experts else count)
    if experts.latent_size is None:
        return _computed(experts, x, weights, choice, context), choice
    unshared = dataclasses.replace(experts, shared_size=0)
    y = linear("latent_out", _computed(unshared, linear("latent_in", x, context), weights, choice, context), context)
    return (y + _shared_expert(experts, x, context) if experts.shared_size else y), choice


def dense_and_sparse_feed_forward(
    experts: Experts, x: Float[Array, "tokens hidden"], normed: Float[Array, "tokens hidden"], context: LayerContext
) -> tuple[Float[Array, "tokens hidden"], Int[Array, "tokens per_token"]]:
    """`Experts.beside_dense`: sum of a dense network and of experts, each normalised. Returns as `sparse_feed_forward`.

    x: before the layer's second norm. normed: after it, the dense network's input.
    """
    dense = normalise("dense_out_norm", feed_forward(normed, context), context)
    routed = normalise("router_norm", x, context) * x.shape[1] ** -0.5
    out, choice = sparse_feed_forward(experts, normalise("sparse_norm", x, context), context, routed)
    return dense + normalise("sparse_out_norm", out, context), choice


def _computed(
    experts: Experts, x: Float[Array, "tokens hidden"], weights: Float[Array, "tokens per_token"],
    choice: Int[Array, "tokens per_token"], context: LayerContext,
) -> Float[Array, "tokens hidden"]:  # fmt: skip
    """Sum of the outputs of each token's experts, and of the shared expert."""
    shards, count = context.shards, context.params["expert_gate_up"].shape[0]
    if shards.splits_experts:
        choice -= shards.first(count)
        choice = jnp.where((choice >= 0) & (choice < count), choice, count)
    blocks = blocks_by_expert(choice, count, rows_per_block(x.shape[0], experts))
    inputs = x[blocks.token_of_row]
    if experts.weigh_inputs:
        factors = jnp.zeros(blocks.token_of_row.size, weights.dtype)
        factors = factors.at[blocks.row_of_choice].set(weights, mode="drop").reshape(blocks.token_of_row.shape)
        inputs, weights = (inputs * factors[..., None]).astype(x.dtype), jnp.ones_like(weights)
    both = _per_expert("expert_gate_up", inputs, blocks, context)
    gated = expanded(context.spec, both)
    outs = [out.reshape(-1, x.shape[1]) for out in _down_matmuls(gated, blocks, context)]
    if shards.parts > 1 and shards.expert_parallel:
        # exact: one device has the output of a choice, and all other devices have zeros
        chosen = jnp.stack([_of_choice(outs[0], blocks, i) for i in range(experts.per_token)])
        chosen = lax.psum(chosen, TENSOR) if shards.splits_experts else chosen
        y = _weighted(weights, chosen)
        return y if not experts.shared_size else y + _shared_expert(experts, x, context)
    totals = [
        _weighted(weights, [_of_choice(out, blocks, i) for i in range(experts.per_token)]) for out in outs
    ]
    if shards.divisor == 1:
        y = totals[0].astype(x.dtype)
        return y if not experts.shared_size else y + _shared_expert(experts, x, context)
    if experts.shared_gate and shards.parts > 1:
        return shards.total(totals, x.dtype) + _shared_expert(experts, x, context)
    if experts.shared_size:  # one sum over devices for both
        shared = _shared_terms(experts, x, context)
        totals = [total + part.astype(jnp.float32) for total, part in zip(totals, shared, strict=True)]
    if shards.parts == 1:
        totals = [total.astype(x.dtype) for total in totals]
    return shards.total(totals, x.dtype)


def _of_choice(out: Float[Array, "rows hidden"], blocks: ExpertBlocks, i: int) -> Float[Array, "tokens hidden"]:
    """float32 output of each token's i-th expert; zeros if this device has not computed it."""
    return jnp.take(out, blocks.row_of_choice[:, i], axis=0, mode="fill", fill_value=0).astype(jnp.float32)


def _weighted(
    weights: Float[Array, "tokens per_token"], chosen: Iterable[Float[Array, "tokens hidden"]]
) -> Float[Array, "tokens hidden"]:
    """Weighted sum of each token's expert outputs, in the order of its choice. weights: factor of each output."""
    total = jnp.zeros((), jnp.float32)
    for i, of_expert in enumerate(chosen):
        total += weights[:, i, None] * of_expert
    return total


def _down_matmuls(
    gated: Float[Array, "blocks rows in"], blocks: ExpertBlocks, context: LayerContext
) -> list[Float[Array, "blocks rows out"]]:
    """Matmuls with `expert_down`: one, or with `Shards.parts` one for each of this device's parts of the inputs."""
    weight = context.params["expert_down"]
    if not isinstance(weight, SplitWeight):
        return [_per_expert("expert_down", gated, blocks, context)]
    found = []
    for number, part in enumerate(jnp.split(gated, len(weight.parts), axis=-1)):
        of_part = dataclasses.replace(context, params={**context.params, "expert_down": weight.parts[number]})
        product = linear_per_expert(
            "expert_down", part, blocks.expert_of_block, blocks.num_blocks_used, blocks.rows_of_block, of_part
        )
        found.append(_with_bias("expert_down", product, blocks, context) if number == 0 else product)
    return found


def _per_expert(
    name: str, x: Float[Array, "blocks rows in"], blocks: ExpertBlocks, context: LayerContext
) -> Float[Array, "blocks rows out"]:
    """`linear_per_expert`, plus each expert's bias if the model has biases."""
    out = linear_per_expert(
        name, x, blocks.expert_of_block, blocks.num_blocks_used, blocks.rows_of_block, context
    )
    if context.adapters is not None:
        used = jnp.arange(len(blocks.rows_of_block)) < blocks.num_blocks_used
        rows = jnp.where(used, blocks.rows_of_block, 0)
        num_experts = context.params[name].shape[0]
        out = with_expert_adapters(
            name, x, out, blocks.token_of_row, blocks.expert_of_block, rows, num_experts, context.adapters
        )
    return _with_bias(name, out, blocks, context)


def _with_bias(
    name: str, out: Float[Array, "blocks rows out"], blocks: ExpertBlocks, context: LayerContext
) -> Float[Array, "blocks rows out"]:
    """A matmul's output plus each expert's bias, if the model has biases."""
    bias = context.params.get(f"{name}_bias")
    if bias is None:
        return out
    if splits_inputs(name, context.shards):  # the sum over devices must contain the bias once
        bias = context.shards.on_first(bias)
    return out + bias.reshape(bias.shape[0], 1, -1)[blocks.expert_of_block]


def _shared_expert(
    experts: Experts, x: Float[Array, "tokens hidden"], context: LayerContext
) -> Float[Array, "tokens hidden"]:
    """Output of the expert that every token uses."""
    if context.shards.parts == 1 or not experts.shared_gate:
        return context.shards.total(_shared_terms(experts, x, context), x.dtype)
    # Gate after the sum: before it, XLA on CPU would fuse the gate into one device's additions, with other bits.
    whole = context.shards.total(_shared_terms(experts, x, context, apply_gate=False), jnp.float32)
    return (_shared_gate(x, context) * whole).astype(x.dtype)


def _shared_terms(
    experts: Experts, x: Float[Array, "tokens hidden"], context: LayerContext, *, apply_gate: bool = True
) -> list[Float[Array, "tokens hidden"]]:
    """This device's outputs of the shared expert, for `Shards.total`. apply_gate: apply the expert's gate."""
    found = products("shared_down", expanded(context.spec, linear("shared_gate_up", x, context)), context)
    if not experts.shared_gate or not apply_gate:
        return found
    score = _shared_gate(x, context)
    return [(score * y.astype(jnp.float32)).astype(y.dtype) for y in found]


def _shared_gate(x: Float[Array, "tokens hidden"], context: LayerContext) -> Float[Array, "tokens 1"]:
    """Factor of the shared expert's output."""
    # Not `linear`: for a matrix of one row, the bits of XLA's result depend on the number of tokens.
    score = row_sum(x.astype(jnp.float32) * context.params["shared_gate"].astype(jnp.float32))
    return jax.nn.sigmoid(score)[:, None]


def route(
    experts: Experts, x: Float[Array, "tokens hidden"], context: LayerContext
) -> tuple[Float[Array, "tokens per_token"], Int[Array, "tokens per_token"]]:
    """Choose each token's experts. Returns (float32 weights, expert indices)."""
    logits = linear("router", x, context, dtype=jnp.float32)
    if experts.bias:
        logits += context.params["router_bias"].astype(jnp.float32)
    if experts.softcap is not None:
        logits = softcap(logits, experts.softcap)
    if experts.scoring is Scoring.SPARSE_MIXER:
        return _sparse_mixer(experts, logits)
    if experts.scoring is Scoring.SIGMOID:
        scores = jax.nn.sigmoid(logits)
    elif experts.scoring is Scoring.SQRT_SOFTPLUS:
        scores = jnp.sqrt(jax.nn.softplus(logits))
    else:
        # Not jax.nn.softmax: XLA on CPU fuses maximum and exponential, and bits then depend on the number of tokens.
        scores = jnp.exp(logits - row_max(logits)[:, None])
        scores /= row_sum(scores)[:, None]
    corrected = experts.correction and HASHED not in context.params
    ranking = scores + context.params["router_correction"] if corrected else scores
    if experts.weigh_inputs:
        ranking = logits  # sigmoids of large logits are equal
    if experts.expert_groups_per_token:
        members = ranking.reshape(x.shape[0], experts.expert_groups, -1)
        group_scores = row_sum(lax.top_k(members, experts.expert_group_top)[0])
        kept = lax.top_k(group_scores, experts.expert_groups_per_token)[1]
        is_kept = (kept[:, :, None] == jnp.arange(experts.expert_groups)).any(1)
        ranking = jnp.where(is_kept[:, :, None], members, -jnp.inf).reshape(ranking.shape)
    if HASHED in context.params:
        assert context.token_ids is not None
        choice = jnp.take(context.params[HASHED], context.token_ids, axis=0, mode="clip")
    else:
        choice = lax.top_k(ranking, experts.per_token)[1]
    weights = jnp.take_along_axis(scores, choice, axis=1)
    if experts.renormalise:
        weights /= row_sum(weights)[:, None] + experts.weight_offset
    if experts.beside_dense:
        weights *= context.params["router_scale"].astype(jnp.float32)[choice]
    return weights * experts.scale, choice


def _sparse_mixer(
    experts: Experts, logits: Float[Array, "tokens experts"]
) -> tuple[Float[Array, "tokens per_token"], Int[Array, "tokens per_token"]]:
    """Each choice is the best expert that is left. Its weight is its softmax over those within 2 * jitter of it.

    The distance from the best is relative to the larger of the best and the expert's own magnitude.
    """
    left, weights, choice = logits, [], []
    for _ in range(experts.per_token):
        best, index = row_max(left)[:, None], lax.top_k(left, 1)[1]
        near = (best - logits) / jnp.maximum(jnp.abs(logits), best) <= 2 * experts.jitter
        weights.append(1 / row_sum(jnp.where(near, jnp.exp(left - best), 0.0)))
        choice.append(index[:, 0])
        left = jnp.where(index == jnp.arange(experts.num), -jnp.inf, left)
    return jnp.stack(weights, 1), jnp.stack(choice, 1)


def pairs_of_devices(
    choices: Sequence[Int[Array, "tokens per_token"]], num_experts: int, shards: Shards
) -> Int[Array, "layers devices"]:
    """Number of (token, expert) pairs. choices: the third result of `decode`. num_experts: on all devices."""
    per_device = -(-num_experts // shards.count)
    device = jnp.stack(choices) // per_device  # [layers, tokens, per_token]; padding is past the last device
    return (device[..., None] == jnp.arange(shards.count)).sum((1, 2), dtype=jnp.int32)


def rows_per_block(tokens: int, experts: Experts) -> int:
    """Rows per block: the power of two above the average number of tokens per expert, from 8 to 64.

    Larger blocks compute more padding. Smaller blocks read an expert's matrices more often. CPU time with 64 experts, 8
    per token, as multiples of the time of the needed matmuls alone. 64 tokens: 8 rows 1.7, 16 rows 1.3, 32 rows 1.6,
    64 rows 2.1. 512 tokens: 16 rows 3.2, 32 rows 2.3, 64 rows 1.9, 128 rows 2.2.
    """
    average = tokens * experts.per_token // experts.num
    return min(64, max(8, 1 << average.bit_length()))


def blocks_by_expert(choice: Int[Array, "tokens per_token"], num_experts: int, rows: int) -> ExpertBlocks:
    """Sort the (token, expert) pairs by expert into blocks of `rows` rows. Choice `num_experts` means no expert."""
    tokens, per_token = choice.shape
    pairs = tokens * per_token
    blocks = pairs // rows + min(num_experts, pairs)  # each expert has at most one block that is partly filled
    expert = choice.reshape(-1)
    order = jnp.argsort(expert, stable=True)
    counts = jnp.zeros(num_experts, jnp.int32).at[expert].add(1, mode="drop")
    blocks_of_expert = -(-counts // rows)
    ends, starts = jnp.cumsum(blocks_of_expert), jnp.cumsum(counts) - counts
    known = jnp.minimum(expert, num_experts - 1)
    rank = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs)) - starts[known]  # index in its expert
    row = jnp.where(expert < num_experts, (ends - blocks_of_expert)[known] * rows + rank, blocks * rows)
    token_of_row = jnp.zeros(blocks * rows, jnp.int32).at[row].set(jnp.arange(pairs) // per_token, mode="drop")
    block = jnp.arange(blocks)
    expert_of_block = jnp.minimum(jnp.searchsorted(ends, block, side="right"), num_experts - 1).astype(jnp.int32)
    before = (block - (ends - blocks_of_expert)[expert_of_block]) * rows  # rows in the expert's earlier blocks
    return ExpertBlocks(
        token_of_row.reshape(blocks, rows),
        expert_of_block,
        ends[-1],
        jnp.clip(counts[expert_of_block] - before, 0, rows),
        row.reshape(tokens, per_token),
    )


def row_max(x: Float[Array, "*lead width"]) -> Float[Array, "*lead"]:
    """Maximum over the last axis by halving it: XLA on CPU would fuse its own maximum. See `route`."""
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        x = jnp.maximum(x[..., :half], x[..., -half:])
    return x[..., 0]
