"""DeepSeek sparse attention: a query attends to the tokens that a small indexer chooses (DeepSeek-V3.2, GLM-5).

Each token has one small key, at the end of its vector in the KV cache (`spec.Latent`). Each query has a few heads, and
a weight for each head. The score of a token is

    sum over heads of weight * relu(q.k * head_dim ** -0.5)

A query attends to the `top_k` tokens up to its own that have the best scores: to all of them if there are at most
`top_k`. Of equal scores, the earlier token is chosen. The reference leaves the choice among equal scores open.

Layers may share a choice (`Indexer.layers`). `ChosenPages` hands it to the next layer.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jpaged.models.layers import layer_norm
from jpaged.models.linear import LayerContext, linear
from jpaged.models.spec import DecoderSpec, Indexer
from pallas_kernels import apply_rope

_EPS = 1e-6  # epsilon of the key's norm
_MIN_OUTPUTS = 8  # of the weights' matmul. With fewer, XLA for CPU gives other bits


@functools.partial(jax.tree_util.register_dataclass, data_fields=["q", "weights"], meta_fields=["top_k"])
@dataclasses.dataclass(frozen=True)
class IndexQueries:
    """Queries of a layer's indexer."""

    q: Float[Array, "tokens index_heads index_dim"]
    weights: Float[Array, "tokens index_heads"]  # float32
    top_k: int

    @property
    def dim(self) -> int:
        """Width of the indexer's keys."""
        return self.q.shape[-1]

    def scores(self, keys: Float[Array, "... keys index_dim"]) -> Float[Array, "... keys"]:
        """float32 scores of keys. Leading axes of queries and keys broadcast; after them, queries have their heads."""
        exact = lax.Precision.HIGHEST if self.q.dtype == jnp.float32 else None
        products = jnp.einsum("...hd,...kd->...hk", self.q, keys, precision=exact, preferred_element_type=jnp.float32)
        products = jnp.maximum(products * self.dim**-0.5, 0)
        scores = jnp.sum(self.weights[..., None] * products, axis=-2)
        return jnp.where(scores == 0, 0.0, scores)  # `top_k` puts -0 after 0


def columns_of_keys(spec: DecoderSpec) -> int | None:
    """Numbers of a line of the pages that queries are multiplied with, if attention reads single lines; else None.

    With an indexer (`spec.Latent`), those before the indexer's key. In DeepSeek V4, all.
    """
    if spec.compressed is not None:
        return spec.head_dim
    return None if spec.indexer is None else spec.head_dim - spec.indexer.head_dim


@functools.partial(jax.tree_util.register_dataclass, data_fields=["pages", "chosen"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class ChosenPages:
    """Pages of a layer, and the tokens that the last indexer before it has chosen. `decode` and `attend` pass it on."""

    pages: Any
    chosen: Any  # of the kind that `attend` makes; None before the first layer


def index_queries_and_keys(
    indexer: Indexer,
    x: Float[Array, "tokens hidden"],
    source: Float[Array, "tokens q_rank"],
    context: LayerContext,
) -> tuple[IndexQueries, Float[Array, "tokens 1 index_dim"]]:
    """The indexer's queries and keys. source: input of the queries, the same as of attention's queries.

    The first dimensions are rotated, as many as in attention. Needs a context with rope angles.
    """
    assert context.cos is not None
    assert context.sin is not None
    tokens, params = x.shape[0], context.params
    q = linear("index_q", source, context).reshape(tokens, indexer.heads, indexer.head_dim)
    k = layer_norm(linear("index_k", x, context), params["index_norm"], params["index_norm_bias"], _EPS)
    q, k = (
        apply_rope(_paired(indexer, part, 2 * context.cos.shape[-1]), context.cos, context.sin)
        for part in (q, k[:, None])
    )
    weights = linear("index_weights", x, context, min_outputs=_MIN_OUTPUTS).astype(jnp.float32)
    return IndexQueries(q, weights * indexer.heads**-0.5, indexer.top_k), k


def _paired(
    indexer: Indexer, x: Float[Array, "tokens heads head_dim"], rotated: int
) -> Float[Array, "tokens heads head_dim"]:
    """Reorder interleaved pairs for rotate-half, in queries and keys alike."""
    if not indexer.interleaved:
        return x
    return jnp.concatenate([x[..., 0:rotated:2], x[..., 1:rotated:2], x[..., rotated:]], -1)


def best_positions(
    scores: Float[Array, "queries keys"], positions: Int[Array, " queries"], top_k: int
) -> Int[Array, "queries chosen"]:
    """Positions that each query attends to, in ascending order: min(top_k, keys) numbers, the chosen ones first.

    positions: of the queries; a query sees keys up to its own. After its min(top_k, position + 1) chosen positions, the
    result has numbers that are not positions of keys.
    """
    keys = scores.shape[1]
    seen = jnp.arange(keys) <= positions[:, None]
    # Unseen keys come after seen ones, so they are chosen last even if a seen one has the score -inf
    _, chosen = lax.top_k(jnp.where(seen, scores, -jnp.inf), min(top_k, keys))
    return jnp.sort(jnp.where(chosen <= positions[:, None], chosen, keys), axis=1)


def best_in_groups(
    index: IndexQueries,
    last: Int[Array, " tokens"],
    chosen: int,
    of_tokens: Sequence[Int[Array, "tokens ..."]],
    scores: Callable[..., Float[Array, "group keys"]],
    *,
    at_once: int,
    place: Callable[..., Int[Array, "group chosen"]] = lambda best, *of_tokens: best,
    count: Int[Array, ""] | None = None,
) -> Int[Array, "tokens chosen"]:
    """`best_positions` of all tokens, computed for `at_once` tokens at a time.

    last:      position of the last key that each token sees; -1: it sees none.
    of_tokens: further arrays with a row for each token.
    scores:    (queries, last, *of_tokens) of a group to the scores of its keys.
    place:     (best positions, *of_tokens) of a group to the numbers that are returned for it.
    count:     the groups after this many tokens are left out, and get zeros; None: none are.
    """
    tokens = len(last)
    groups = -(-tokens // at_once)

    def padded(x: Array, value: int = 0) -> Array:
        return jnp.pad(x, [(0, groups * at_once - tokens), *[(0, 0)] * (x.ndim - 1)], constant_values=value)

    queries = dataclasses.replace(index, q=padded(index.q), weights=padded(index.weights))
    all_last, padded_arrays = padded(last, -1), [padded(x) for x in of_tokens]

    def next_tokens(i: Array, found: Array) -> Array:
        """`found` with the numbers of the tokens from i * at_once on."""

        def cut(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, i * at_once, at_once)

        own = dataclasses.replace(queries, q=cut(queries.q), weights=cut(queries.weights))
        of_last, given = cut(all_last), [cut(x) for x in padded_arrays]

        def choose() -> Array:
            return best_positions(scores(own, of_last, *given), of_last, chosen)

        # Nothing to choose if no token sees more keys than that
        every = jnp.broadcast_to(jnp.arange(chosen), (at_once, chosen))
        best = lax.cond(of_last.max() < chosen, lambda: every, choose)
        return lax.dynamic_update_slice_in_dim(found, place(best, *given), i * at_once, axis=0)

    used = groups if count is None else -(-count // at_once)
    return lax.fori_loop(0, used, next_tokens, jnp.zeros((groups * at_once, chosen), jnp.int32))[:tokens]


def chosen_in_sequences(
    index: IndexQueries, keys: Float[Array, "batch length index_dim"]
) -> Bool[Array, "batch queries keys"]:
    """True for the keys that each query attends to. For sequences of equal length without pages."""
    batch, length = keys.shape[:2]

    def of_sequence(q: Array, weights: Array, k: Array) -> Array:
        scores = IndexQueries(q, weights, index.top_k).scores(k[None])
        positions = jnp.arange(length)
        chosen = best_positions(scores, positions, index.top_k)
        return jnp.zeros((length, length), bool).at[positions[:, None], chosen].set(True, mode="drop")

    q = index.q.reshape(batch, length, *index.q.shape[1:])
    return jax.vmap(of_sequence)(*map(lax.stop_gradient, (q, index.weights.reshape(batch, length, -1), keys)))
