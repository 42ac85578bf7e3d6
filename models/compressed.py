"""Attention of DeepSeek V4, and its layers: a window of tokens, and entries that stand for many tokens each.

1. `_project` makes queries, one key per token, which is its value too, and the inputs of entries.
2. An entry is a weighted sum of the values of its tokens (`make_entries`). The weights are a softmax over the tokens,
   for each number of the vector. Its position is that of its chunk's first token.
3. A query at position p attends to the last `window` tokens, and to entries of chunks that end at p or before. An
   indexer (`indexer`), which has small entries of its own, may choose the best `top_k` of them.
4. Rope has rotated the values with the keys. The output is rotated back, by the query's position.

`Attend` knows the sequences. With pages, it is `jpaged.runtime.step.compressed_attention`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jpaged.models import hyper
from jpaged.models.compressed_spec import Compressed, Entries
from jpaged.models.experts import sparse_feed_forward
from jpaged.models.indexer import IndexQueries, best_positions
from jpaged.models.layers import normalise, normalise_heads
from jpaged.models.linear import LayerContext, linear, linear_per_head
from jpaged.models.rope import rope_angles
from jpaged.models.spec import DecoderSpec, Params
from pallas_kernels import rms_norm

_MIN_OUTPUTS = 8  # of the weights' matmul. With fewer, XLA for CPU gives other bits


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["q", "k", "inputs", "index", "params"],
    meta_fields=["spec", "kind", "scale"],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class CompressedProjection:
    """Queries and keys of a layer after norms and rope, and what entries are made from."""

    q: Float[Array, "tokens heads head_dim"]
    k: Float[Array, "tokens 1 head_dim"]
    inputs: Array | None         # [tokens, input_size] of `Compressed`; None: the layer has no entries
    index: IndexQueries | None   # chooses entries; None: there is no indexer
    params: Params               # leaves of the layer that `attend` needs
    spec: DecoderSpec
    kind: Compressed             # of the layer
    scale: float                 # factor of q.k


def run_layer(
    x: Float[Array, "streams tokens hidden"], context: LayerContext, kept: Any, metadata: Any, mixers: Any,
    attend: Any,
) -> tuple[Float[Array, "streams tokens hidden"], tuple[Any, ...], Int[Array, "tokens per_token"]]:  # fmt: skip
    """A layer of DeepSeek V4: attention and experts between hyper-connections. As `decoder._run_layer`.

    kept, metadata: pages and state, and the rows of both. mixers: `AttentionOptions` and `Compressed`.
    """
    spec = context.spec
    assert spec.hyper is not None
    assert spec.experts is not None
    alone, *factors = hyper.collapse(spec.hyper, "attn", x, context)
    projection = _project(mixers[1], normalise("attn_norm", alone, context), context)
    out, kept = attend(projection, kept, metadata, mixers[0], None)
    out = _output(mixers[1], out, context)
    x = hyper.expand(out, x, *factors)
    alone, *factors = hyper.collapse(spec.hyper, "ffn", x, context)
    out, choice = sparse_feed_forward(spec.experts, normalise("mlp_norm", alone, context), context)
    return hyper.expand(out, x, *factors), kept, choice


def _output(
    kind: Compressed, out: Float[Array, "tokens heads head_dim"], context: LayerContext
) -> Float[Array, "tokens hidden"]:
    """From attention's output to the layer's."""
    out = rotated(out, context.cos, None if context.sin is None else -context.sin)
    grouped = out.reshape(out.shape[0], kind.out_groups, -1)
    grouped = linear_per_head("o_a", grouped, context, part=slice(None), transposed=False)
    return linear("o", grouped.reshape(out.shape[0], -1), context)


def _project(kind: Compressed, x: Float[Array, "tokens hidden"], context: LayerContext) -> CompressedProjection:
    params, tokens, spec = context.params, x.shape[0], context.spec
    source = normalise("query_norm", linear("q_a", x, context), context)
    q = linear("q_b", source, context).reshape(tokens, kind.heads, kind.head_dim)
    q = rotated(normalise_heads(q, None, context), context.cos, context.sin)
    k = normalise("kv_norm", linear("kv", x, context), context)[:, None]
    k, index = rotated(k, context.cos, context.sin), None
    inputs: list[Array] = []
    if kind.kind is not Entries.NONE:
        inputs = [linear("entry_kv", x, context), linear("entry_gate", x, context)]
    if kind.kind is Entries.SPARSE:
        inputs += [linear("index_kv", x, context), linear("index_gate", x, context)]
        of_index = linear("index_q", source, context).reshape(tokens, kind.index_heads, kind.index_dim)
        weights = linear("index_weights", x, context, min_outputs=_MIN_OUTPUTS).astype(jnp.float32)
        of_index = rotated(of_index, context.cos, context.sin)
        index = IndexQueries(of_index, weights * kind.index_heads**-0.5, kind.top_k)
    joined = jnp.concatenate(inputs, axis=1) if inputs else None
    names = ("sinks", "entry_bias", "entry_norm", "index_bias", "index_norm")
    of_entries = {name: params[name] for name in names if name in params}
    return CompressedProjection(q, k, joined, index, of_entries, spec, kind, spec.scale)


def rotated(
    x: Float[Array, "*lead heads width"], cos: Float[Array, "*lead half"] | None, sin: Float[Array, "*lead half"] | None
) -> Float[Array, "*lead heads width"]:
    """x with its last 2 * half dimensions rotated in pairs (2i, 2i + 1), in float32."""
    assert cos is not None
    assert sin is not None
    width = 2 * cos.shape[-1]
    pairs = x[..., -width:].astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    a, b, cos, sin = pairs[..., 0], pairs[..., 1], cos[..., None, :], sin[..., None, :]
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(*x.shape[:-1], width)
    return jnp.concatenate([x[..., :-width], turned.astype(x.dtype)], -1)


def make_entries(
    projection: CompressedProjection,
    inputs: Float[Array, "entries span input_size"],
    last: Int[Array, " entries"],
) -> tuple[Float[Array, "entries head_dim"], Float[Array, "entries index_dim"] | None]:
    """Entries, and the indexer's keys of them. inputs: of the `span` tokens that end at position `last`.

    Inputs before position 0 have no effect.
    """
    kind, width = projection.kind, projection.kind.head_dim
    first = last - kind.ratio + 1
    entries = _entries("entry", projection, inputs[..., : 2 * kind.series * width], first)
    if kind.kind is not Entries.SPARSE:
        return entries, None
    return entries, _entries("index", projection, inputs[..., 2 * kind.series * width :], first)


def _entries(
    name: str, projection: CompressedProjection, inputs: Float[Array, "entries span numbers"],
    first: Int[Array, " entries"],
) -> Float[Array, "entries width"]:  # fmt: skip
    """Entries of one kind. first: position of each entry's chunk."""
    kind, params, spec = projection.kind, projection.params, projection.spec
    half = inputs.shape[2] // 2
    values, gates = inputs[..., :half], inputs[..., half:].astype(jnp.float32)
    gates += jnp.tile(params[f"{name}_bias"], (kind.series, 1))
    if kind.series == 2:  # of the chunk before, the first series; of the entry's own, the second
        width, ratio = half // 2, kind.ratio
        values, gates = (
            jnp.concatenate([part[:, :ratio, :width], part[:, ratio:, width:]], axis=1) for part in (values, gates)
        )
    position = first[:, None] + kind.ratio - kind.span + jnp.arange(kind.span)
    gates = jnp.where(position[..., None] >= 0, gates, -jnp.inf)
    weights = jax.nn.softmax(gates, axis=1).astype(values.dtype)
    values = jnp.where(position[..., None] >= 0, values, 0)
    entries = rms_norm(jnp.sum(values * weights, axis=1), params[f"{name}_norm"], spec.norm_eps)
    assert spec.rope is not None
    return rotated(entries[:, None], *rope_angles(spec, spec.rope, first, None))[:, 0]


def attend_in_sequences(
    projection: CompressedProjection, shape: Int[Array, "batch length"]
) -> Float[Array, "tokens heads head_dim"]:
    """Attention within sequences of equal length, which are concatenated, without pages."""
    batch, length = shape.shape
    kind, dim = projection.kind, projection.kind.head_dim
    positions = jnp.arange(length)
    distance = positions[:, None] - positions
    seen = (distance >= 0) & (distance < kind.window)
    keys, seen = projection.k.reshape(batch, length, dim), jnp.broadcast_to(seen, (batch, length, length))
    count = 0 if projection.inputs is None else length // kind.ratio
    if projection.inputs is not None and count:
        last = (jnp.arange(count) + 1) * kind.ratio - 1
        inputs = projection.inputs.reshape(batch, length, -1)
        tokens = jnp.maximum(last[:, None] - kind.span + 1 + jnp.arange(kind.span), 0)
        spans = inputs[:, tokens].reshape(batch * count, kind.span, -1)
        entries, index_keys = make_entries(projection, spans, jnp.tile(last, batch))
        keys = jnp.concatenate([keys, entries.reshape(batch, count, dim)], axis=1)
        finished = (positions + 1) // kind.ratio
        of_entries = jnp.broadcast_to(jnp.arange(count) < finished[:, None], (batch, length, count))
        if projection.index is not None and index_keys is not None:
            of_entries &= _chosen(projection.index, index_keys.reshape(batch, count, -1), finished - 1)
        seen = jnp.concatenate([seen, of_entries], axis=2)
    q = projection.q.reshape(batch, length, -1, dim)
    exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    # XLA for CPU has no product of bfloat16 without the axis of KV heads
    q, keys = q[:, :, None], keys[:, :, None]
    scores = jnp.einsum("bqghd,bkgd->bghqk", q, keys, precision=exact, preferred_element_type=jnp.float32)[:, 0]
    scores = jnp.where(seen[:, None], scores * projection.scale, -1e30)
    sink = jnp.broadcast_to(projection.params["sinks"].astype(jnp.float32).reshape(-1, 1, 1), (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1].astype(keys.dtype)
    out = jnp.einsum("bghqk,bkgd->bqghd", weights[:, None], keys, precision=exact, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(batch * length, -1, dim)


def _chosen(
    index: IndexQueries, keys: Float[Array, "batch entries index_dim"], last: Int[Array, " length"]
) -> Bool[Array, "batch length entries"]:
    """True for the entries that the indexer chooses. last: of each query, the last entry that it sees."""
    batch, length = keys.shape[0], len(last)

    def of_sequence(q: Array, weights: Array, own: Array) -> Array:
        scores = IndexQueries(q, weights, index.top_k).scores(own[None])
        chosen = best_positions(scores, last, index.top_k)
        empty = jnp.zeros((length, own.shape[0]), bool)
        return empty.at[jnp.arange(length)[:, None], chosen].set(True, mode="drop")

    q = index.q.reshape(batch, length, *index.q.shape[1:])
    return jax.vmap(of_sequence)(*map(lax.stop_gradient, (q, index.weights.reshape(batch, length, -1), keys)))
