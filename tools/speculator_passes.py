"""Several passes of a draft head over whole rows, for training, and how many of its drafts the target accepts.

A head drafts its second token from its own state. Training repeats this ("training-time test", EAGLE-3, section 3.1):
pass j reads the states of pass j - 1. At index p its position is p + j. It reads token p + 1 + j, and predicts token
p + 2 + j. Its query sees the keys of pass 0 up to index p, which a served head has in its pages. It also sees the keys
of passes 1 to j at index p, which are the drafts.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jpaged.models import decoder, draft_head
from jpaged.models.draft_head import HeadSpec
from jpaged.models.spec import AttentionOptions, Params

QUERY_BLOCK = 256  # queries whose scores are computed at once


def passes_attend(
    projection: decoder.Projection, pages: tuple[tuple[Array, Array], ...], metadata: Int[Array, "batch length"],
    options: AttentionOptions, sinks: Array | None,
) -> tuple[Float[Array, "tokens heads head_dim"], tuple[tuple[Array, Array], ...]]:  # fmt: skip
    """Attention of one pass. Only causal masks and the scale, no other option.

    pages: keys and values of the earlier passes. This pass's are added to the result.
    """
    batch, length = metadata.shape
    q, k, v = projection.finish()
    assert v is not None  # no latent attention here
    kv_heads, head_dim = k.shape[1:]
    # [batch * kv_heads, length, ...]: a block of one KV head and one row fits into the CPU's cache
    q = q.reshape(batch, length, kv_heads, -1, head_dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(batch * kv_heads, length, -1, head_dim)
    k, v = (
        a.reshape(batch, length, kv_heads, head_dim).transpose(0, 2, 1, 3).reshape(-1, length, head_dim) for a in (k, v)
    )
    pages = (*pages, (k, v))
    own = pages[1:]  # of the drafts: each query sees those at its own index

    @jax.checkpoint
    def block(arrays: tuple[Array, ...]) -> Array:
        q, keys, values, *drafts = arrays
        queries, group = q.shape[:2]
        seen = jnp.arange(keys.shape[0] - queries, keys.shape[0])[:, None, None] >= jnp.arange(keys.shape[0])
        scores = [jnp.where(seen, jnp.einsum("qgd,kd->qgk", q, keys), -1e30)]
        scores += [jnp.einsum("qgd,qd->qg", q, key)[..., None] for key in drafts[::2]]
        weights = jax.nn.softmax(jnp.concatenate(scores, -1) * options.scale, axis=-1)
        out = jnp.einsum("qgk,kd->qgd", weights[..., : len(keys)], values)
        for i, value in enumerate(drafts[1::2]):
            out += weights[..., len(keys) + i][..., None] * value[:, None]
        return out.reshape(queries, group, -1)

    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        drafts = [a[:, start:stop] for pair in own for a in pair]
        blocks.append(lax.map(block, (q[:, start:stop], *(a[:, :stop] for a in pages[0]), *drafts)))
    out = jnp.concatenate(blocks, axis=1).reshape(batch, kv_heads, length, -1, head_dim)
    return out.transpose(0, 2, 1, 3, 4).reshape(batch * length, -1, head_dim), pages


def shifted(x: Float[Array, "batch length *rest"], by: int) -> Float[Array, "batch length *rest"]:
    """Move the rows `by` places to the left. The last `by` places repeat the last one, and are not valid."""
    return x if by == 0 else jnp.concatenate([x[:, by:], jnp.repeat(x[:, -1:], by, axis=1)], axis=1)


def head_passes(
    spec: HeadSpec, params: Params, target: Any, ids: Int[Array, "batch length"],
    states: tuple[Float[Array, "batch length hidden"], ...], passes: int,
) -> list[Float[Array, "tokens hidden"]]:  # fmt: skip
    """Return each pass's output before the final norm. Pass j at index p predicts the token at p + 2 + j.

    target: a `speculator_data.Target`.
    states: the target's, for `draft_head.target_state`.
    """
    batch, length = ids.shape
    state = draft_head.target_state(
        spec, params, target.spec, target.params, tuple(x.reshape(batch * length, -1) for x in states)
    )
    outputs, pages = [], ()
    for number in range(passes):
        tokens = shifted(ids, 1 + number).reshape(-1)
        embedded = draft_head.embed_for_head(spec, params, target.spec, target.params, tokens)
        positions = jnp.tile(jnp.arange(length) + number, batch)
        x = draft_head.head_input(spec, params, embedded, state)
        hidden, pages = draft_head.head_layer(spec, params, x, positions, pages, ids, passes_attend)
        outputs.append(hidden)
        state = draft_head.next_state(spec, params, target.params, hidden)
    return outputs


# --- acceptance -------------------------------------------------------------------------------------------------------


class Drafting(Protocol):
    """Logits of a drafter over the target's whole vocabulary."""

    def __call__(self, ids: Int[Array, "batch length"], states: tuple[Array, ...]) -> list[Array]:
        """Return for draft j = 0, 1, ... logits [batch, length, vocab]: at index p of the token p + 2 + j.

        The drafter may use tokens up to p + 1 + j, states up to p, and nothing else.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """How many drafts the target accepts on its own continuations, in shares of the positions."""

    runs: np.ndarray      # float64[k]  share of positions at which drafts 0 to j are all accepted
    lengths: np.ndarray   # float64[k]  with k = 1, 2, ... drafts: mean tokens of a verify step, over a whole decode
    overlaps: np.ndarray  # float64[k]  mean of sum(min(p, q)): what rejection sampling accepts of draft j, on true text

    def record(self) -> dict[str, list[float]]:
        return {name: np.round(value, 4).tolist() for name, value in dataclasses.asdict(self).items()}


def cdf_interval(logits: Float[Array, "rows vocab"], ids: Int[Array, " rows"]) -> tuple[Array, Array]:
    """Ends of the tokens' intervals in the cumulative distribution of the ids, most likely first."""
    p = jax.nn.softmax(logits, axis=-1)
    own = jnp.take_along_axis(p, ids[:, None], -1)
    index = jnp.arange(p.shape[-1])
    before = (p > own) | ((p == own) & (index < ids[:, None]))
    low = jnp.where(before, p, 0.0).sum(-1)
    return low, low + own[:, 0]


def accepted(
    logits: Float[Array, "rows vocab"], target_logits: Float[Array, "rows vocab"], ids: Int[Array, " rows"],
    shares: Float[Array, " rows"], temperature: float,
) -> Bool[Array, " rows"]:  # fmt: skip
    """True if a draft equals the target's token, one of `ids`.

    The drafter draws with the uniform number that chose the target's token. Given the token, this number is uniform in
    the token's interval of the target's cumulative distribution. shares: place in the interval, in [0, 1).
    temperature: of the drafter; 0 = its most likely id.
    """
    if temperature == 0:
        return logits.argmax(-1) == ids
    low, high = cdf_interval(target_logits, ids)
    draw = low + shares * (high - low)
    low, high = cdf_interval(logits / temperature, ids)
    return (low <= draw) & (draw < high)


def mean_lengths(hits: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Mean tokens of a verify step with 1, 2, ... drafts, when each row is decoded from `first` to its end.

    hits: bool[rows, drafts, length]: draft j made at index p is accepted.
    """
    rows, count, length = hits.shape
    runs = np.cumprod(hits, axis=1).sum(1)  # accepted drafts at each index, up to `count`
    means = []
    for k in range(1, count + 1):
        steps = tokens = 0
        for row in range(rows):
            p = first[row]
            while p + k + 1 < length:  # all drafts of this step have a token to compare with
                made = 1 + min(k, int(runs[row, p]))
                steps, tokens, p = steps + 1, tokens + made, p + made
        means.append(tokens / steps)
    return np.array(means)


def measure(
    target: Any, drafting: Drafting, ids: np.ndarray, states: np.ndarray, first: int, temperatures: Sequence[float]
) -> list[Acceptance]:
    """Measure on the target's own continuations, for each of the drafter's `temperatures`.

    ids:    int32[rows, length], continued at temperature 0 or 1.
    states: float32[states, rows, length, hidden].
    first:  tokens of the prompts.
    """
    rng = np.random.default_rng(0)

    @jax.jit
    def of_row(ids: Array, states: tuple[Array, ...], shares: Array) -> tuple[Array, Array]:
        length = ids.shape[1]
        logits = decoder.lm_head(target.spec, target.params, states[-1][0])
        hits, overlaps = [], []
        for j, (draft,) in enumerate(drafting(ids, states)):
            wanted, share = shifted(ids, 2 + j)[0], shifted(shares, 2 + j)[0]
            of_target = shifted(logits[None], 1 + j)[0]
            known = jnp.arange(length) + 2 + j < length
            hits.append(jnp.stack([accepted(draft, of_target, wanted, share, each) & known for each in temperatures]))
            overlaps.append(jnp.minimum(jax.nn.softmax(draft, -1), jax.nn.softmax(of_target, -1)).sum(-1))
        return jnp.stack(hits, axis=1), jnp.stack(overlaps)

    found = []
    for row in range(len(ids)):
        shares = jnp.asarray(rng.random((1, ids.shape[1]), np.float32))
        found.append(of_row(jnp.asarray(ids[row : row + 1]), tuple(jnp.asarray(states[:, row : row + 1])), shares))
    all_hits, overlaps = (np.stack(parts) for parts in zip(*found, strict=True))
    drafts = overlaps.shape[1]
    inside = slice(first - 1, overlaps.shape[2] - 1 - drafts)  # from the prompt's end to the last complete step
    overlap = overlaps[:, :, inside].mean((0, 2), dtype=np.float64)
    starts = np.full(len(ids), first - 1)
    return [
        Acceptance(np.cumprod(hits, axis=1)[:, :, inside].mean((0, 2)), mean_lengths(hits, starts), overlap)
        for hits in np.moveaxis(all_hits, 1, 0)
    ]


def agreement(target: Any, drafting: Drafting, ids: Int[Array, "one length"], states: tuple[Array, ...]) -> list[float]:
    """Shares of the positions of a text at which draft 0, 1, ... is the target's most likely token."""
    best = decoder.lm_head(target.spec, target.params, states[-1][0]).argmax(-1)
    shares = []
    for j, draft in enumerate(drafting(ids, states)):
        same = draft[0].argmax(-1) == shifted(best[None], 1 + j)[0]
        shares.append(round(float(same[: ids.shape[1] - 1 - j].mean()), 4))
    return shares
