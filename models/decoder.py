"""The decoder: one transformer for every family, driven by a DecoderSpec.

Called by: the forward pass, with pages; training, checks and calibration, with dense attention.
Owns: the layers of every family, as its `DecoderSpec` describes them.
Never: knows requests or block tables, or reads pages: attention is an argument.

1. `decode` embeds the tokens and runs the layers in an unrolled loop. All requests' tokens are on one axis. Only
   attention knows the tokens of each request.
2. Attention is the argument `attend`: over KV pages when serving, dense and causal for training and checks. `decode`
   only passes `pages` through. Layers may share an entry of `pages` (`jpaged.kv_groups`). A recurrent layer has an
   entry with its state per request (`recurrent`). A layer may have both.
3. `lm_head` turns hidden states into logits. For a pooling model it returns normalised hidden states or label scores.

All layers of a kind call one jitted function, so tracing and lowering cost the same at any depth.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jpaged.kv_groups import KVPlace
from jpaged.models import altup, compressed, hyper
from jpaged.models.adapters import (
    EMBED,
    LAYER_EMBED_IN,
    LM_HEAD,
    adapter_targets,
    layer_adapters,
    whole_adapters,
    with_embedding_adapters,
    with_lm_head_adapters,
)
from jpaged.models.experts import dense_and_sparse_feed_forward, sparse_feed_forward
from jpaged.models.fused_layer import LayerNorms, finish_layer, refuse_layer
from jpaged.models.indexer import ChosenPages, IndexQueries, chosen_in_sequences
from jpaged.models.latent import latent_queries_and_keys, latent_values
from jpaged.models.layer_embedding import embed_for_layers, gated_layer_input
from jpaged.models.layers import feed_forward, normalise, normalise_heads, normalise_split, scaled, softcap
from jpaged.models.linear import LayerContext, add, linear, linear_with_bias, take_rows
from jpaged.models.recurrent import State, mix_by_state
from jpaged.models.rope import rope_angles
from jpaged.models.sharding import WHOLE, Shards
from jpaged.models.spec import (
    AltUp,
    AttentionOptions,
    DecoderSpec,
    Encoder,
    Mixer,
    Norm,
    NormPosition,
    Params,
    QKNorm,
    QueryScaling,
    Rope,
    WeightLayout,
)
from pallas_kernels import activate, norm_and_rope, rms_norm

MIN_SCORES = 8  # minimum number of outputs of a classifier's matmul; see `lm_head`

Pages: TypeAlias = Any      # KV of one layer: KVPages when serving, None for training. Only `attend` reads it
Metadata: TypeAlias = Any   # pytree for `attend`, with the tokens of each request; StateRows for recurrent layers


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["product", "bias", "q_norm", "k_norm", "cos", "sin", "index"], meta_fields=["norm_eps"],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class Projection:
    """Queries, keys and values of a layer before bias, norms and rope, and the arrays for these.

    When serving, one kernel applies them and writes keys and values into the pages. `finish` applies them in jnp.
    """

    # [tokens, kv_heads, q_per_kv + 2, head_dim]; or (q, k, v) with the bias added. v: None with latent attention. k and
    # v: None if the layer reads those of an earlier layer
    product: Array | tuple[Array, Array | None, Array | None]
    bias: Array | None    # [kv_heads, q_per_kv + 2, head_dim]
    q_norm: Array | None  # [head_dim]; k_norm likewise
    k_norm: Array | None
    cos: Array | None     # float32[tokens, half]; sin likewise
    sin: Array | None
    norm_eps: float
    index: IndexQueries | None = None  # sparse attention: they choose the tokens to attend to

    @property
    def has_keys(self) -> bool:
        """False if the layer reads the keys and values of an earlier layer."""
        return not isinstance(self.product, tuple) or self.product[1] is not None

    def finish_queries(self) -> Array:
        """q [tokens, heads, head_dim] of a layer without keys, after rope. Its norm is applied."""
        q = self.product[0]
        return norm_and_rope(q, q, cos=self.cos, sin=self.sin, q_norm=None, k_norm=None, norm_eps=self.norm_eps)[0]

    def finish(self) -> tuple[Array, Array, Array | None]:
        """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], after bias, norms and rope."""
        if isinstance(self.product, tuple):
            q, k, v = self.product
            assert k is not None, "see `has_keys`"
        else:
            qkv = add(self.product, self.bias)
            q, k, v = qkv[:, :, :-2].reshape(qkv.shape[0], -1, qkv.shape[3]), qkv[:, :, -2], qkv[:, :, -1]
        q, k = norm_and_rope(
            q, k, cos=self.cos, sin=self.sin, q_norm=self.q_norm, k_norm=self.k_norm, norm_eps=self.norm_eps
        )
        return q, k, v


@runtime_checkable
class Attend(Protocol):
    """Attention of one layer. It is a static argument: hashable, and the same object in every call."""

    def __call__(
        self, projection: Projection, pages: Pages, metadata: Metadata, options: AttentionOptions, sinks: Array | None
    ) -> tuple[Float[Array, "tokens heads head_dim"], Pages]:
        """Finish the projection, store keys and values, and attend. Returns (output, pages). sinks: [heads]."""
        ...


def decode(
    spec: DecoderSpec,
    params: Params,
    token_ids: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    pages: Sequence[Pages],
    metadata: Metadata,
    attend: Attend,
    *,
    layout: WeightLayout = WeightLayout(),
    rope_lens: Int[Array, " tokens"] | None = None,
    real: Bool[Array, " tokens"] | None = None,
    num_tokens: Int[Array, ""] | None = None,
    places: Sequence[tuple[KVPlace, ...]] | None = None,
    gated_dot: str | None = None,
    fused: str | None = None,
    shards: Shards = WHOLE,
    hidden: Float[Array, "tokens hidden"] | None = None,
    first_layer: int = 0,
    capture: tuple[int, ...] = (),
    adapter_slots: Int[Array, " tokens"] | None = None,
    token_types: Int[Array, " tokens"] | None = None,
) -> tuple[
    Float[Array, "tokens hidden"], tuple[Pages, ...], tuple[Int[Array, "tokens per_token"], ...],
    *tuple[Float[Array, "tokens hidden"], ...],
]:  # fmt: skip
    """Run the layers. Returns hidden states before the final norm, pages with the new KV, and expert indices.

    There is one array of expert indices per layer with experts. Padding has an index past the last expert. After these
    three come the captured hidden states, one for each entry of `capture`.

    token_ids, positions: ids in [0, vocab_size), and positions in their sequences. The caller checks them.
    pages:     one entry per layer, for `attend`. With `places`: one entry per page array, then one per recurrent layer.
    metadata:  a pytree, for `attend`. With `places`: a sequence with one entry per KV group, then one for the recurrent
               layers if there are any.
    rope_lens: sequence length of each token, for dynamic rope scaling and longrope. None: position + 1.
    real:      False for padding tokens, which go to no expert. None: no token is padding.
    num_tokens: number of needed tokens, which come first. Results of the rest are undefined. None: all tokens are
               needed, and every matmul has a gradient.
    places:    of each layer: KV group and page array of each of its mixers.
    gated_dot: implementation of `pallas_kernels.gated_dot`, used with `num_tokens`. None: the best one.
    fused:     implementation of `fused_layer`, used with `num_tokens` by the layers that it does not refuse. None:
               XLA's operations.
    shards:    split of the leaves. Inside `jax.shard_map`, `params` and `pages` are this device's parts.
    hidden:    input of the first layer of `params`, from another pipeline stage. None: embed the tokens.
    first_layer: index in the model of the first layer of `params`.
    capture:   indices of layers whose input is returned, in ascending order. The input of layer i is the output of
               layer i - 1, and the input of layer 0 is the embedding. The number of layers gives the last layer's
               output. EAGLE-3 checkpoints count so, too. A pipeline stage returns those of its own layers.
    adapter_slots: slot of each token's adapter in the pools `params["adapters"]`. None: there are no adapters.
    token_types: rows of the token-type embedding. None: the model has none.
    """
    pools = params.get("adapters", {})
    targets = () if adapter_slots is None else adapter_targets(spec, layout)
    x, whole = hidden, LayerContext(spec, layout, params, num_rows=num_tokens, shards=shards)
    if x is None:
        x = _embed(whole, token_ids, positions, adapter_slots, token_types=token_types)
    layers = range(first_layer, first_layer + len(params["layers"]))
    # by rope and head size, which may differ between layers
    ropes = {(rope, spec.kv_of(i).head_dim): i for i in layers if (rope := spec.layer_rope(i)) is not None}
    angles = {key: rope_angles(spec.of_layer(i), key[0], positions, rope_lens) for key, i in ropes.items()}
    layer_inputs = None
    if spec.layer_embed is not None:
        adapters = whole_adapters(LAYER_EMBED_IN, pools, adapter_slots)
        layer_inputs = embed_for_layers(spec.layer_embed, x, token_ids, dataclasses.replace(whole, adapters=adapters))
    if spec.altup is not None:
        x = altup.spread(spec.altup, x, whole)
    x = x if spec.hyper is None else hyper.spread(spec.hyper, x)
    factors = None if spec.query_scaling is None else query_factors(spec.query_scaling, positions)
    if places is None:
        metadata = (metadata,)
        sources = [spec.kv_of(layer).source for layer in layers]
        places = [
            (KVPlace(0, i if source is None else source),) * len(spec.mixers(layer))
            for i, (layer, source) in enumerate(zip(layers, sources, strict=True))
        ]
    new_pages, choices, captured, normed = list(pages), [], [], None
    shares_choice, chosen = spec.indexer is not None and spec.indexer.layers != (), None
    takes_fused = fused is not None and num_tokens is not None and adapter_slots is None
    for i, matrices, of_mixers in zip(layers, params["layers"], places, strict=True):
        if i in capture:
            captured.append(x)
        rope = spec.layer_rope(i)
        cos, sin = (None, None) if rope is None else angles[rope, spec.kv_of(i).head_dim]
        leaves = matrices | layer_vectors(params, i - first_layer)
        if i == 0 and not spec.first_norm:
            del leaves["attn_norm"], leaves["attn_norm_bias"]
        adapters = None if adapter_slots is None else layer_adapters(pools, targets, adapter_slots, i)
        grown = factors if spec.query_scaling is not None and spec.query_scaling.applies(i) else None
        of_layer = fused if takes_fused and refuse_layer(spec, layout, leaves) is None else None
        norms = None
        if of_layer is not None:
            next_norm = params["attn_norm"] if i + 1 < layers.stop else None
            norms = LayerNorms(params["mlp_norm"], next_norm, jnp.asarray(i - first_layer, jnp.int32))
        kept = tuple(new_pages[place.page_array] for place in of_mixers)
        if shares_choice:
            kept = (ChosenPages(*kept, chosen),)
        x, normed, kept, choice = _layer(
            x,
            normed,
            norms,
            LayerContext(
                spec.of_layer(i), layout, leaves, cos, sin, real, num_tokens, gated_dot, shards, adapters=adapters,
                query_factors=grown, fused=of_layer,
                layer_input=None if layer_inputs is None else layer_inputs[:, i],
                token_ids=token_ids if spec.experts is not None and spec.experts.hashed else None,
            ),
            kept,
            tuple(
                metadata[place.kv_group] if place.part is None else metadata[place.kv_group][place.part]
                for place in of_mixers
            ),
            mixers=spec.mixers(i), attend=attend,
        )  # fmt: skip
        if shares_choice:
            (found,) = kept
            kept, chosen = (found.pages,), found.chosen
        for place, of_mixer in zip(of_mixers, kept, strict=True):
            new_pages[place.page_array] = of_mixer
        if choice is not None:
            choices.append(choice)
    if spec.altup is not None:
        x = altup.merge(spec.altup, x, whole)
    if spec.hyper is not None:
        x = hyper.merge(spec.hyper, x, whole)
    if layers.stop == spec.num_layers and layers.stop in capture:
        captured.append(x)
    return x, tuple(new_pages), tuple(choices), *captured


def layer_vectors(params: Params, layer: int) -> Params:
    """A layer's rows of the vectors that are stacked over layers."""
    return {name: params[name][layer] for name in LAYER_VECTORS if name in params}


def embed_tokens(
    spec: DecoderSpec,
    params: Params,
    token_ids: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    *,
    layout: WeightLayout = WeightLayout(),
    num_tokens: Int[Array, ""] | None = None,
    in_loop: bool = False,
) -> Float[Array, "tokens hidden"]:
    """Input of the first layer, as `decode` computes it. in_loop: of `linear.take_rows`."""
    return _embed(LayerContext(spec, layout, params, num_rows=num_tokens), token_ids, positions, in_loop=in_loop)


def decode_layer(
    spec: DecoderSpec,
    leaves: Params,
    x: Float[Array, "batch length hidden"],
    *,
    mixers: tuple[Mixer, ...],
    rope: Rope | None,
    growth: QueryScaling | None = None,
    watch: Callable[[str, Array], None] | None = None,
) -> Float[Array, "batch length hidden"]:
    """One layer over sequences of equal length, with dense attention. For calibration.

    leaves: the layer's matrices and its `layer_vectors`.
    growth: scaling of the layer's queries by their position.
    watch:  called with the name of each matrix and the input [tokens, in] of its matmul.
    """
    batch, length, hidden = x.shape
    positions = jnp.tile(jnp.arange(length), batch)
    cos, sin = (None, None) if rope is None else rope_angles(spec, rope, positions, jnp.full(len(positions), length))
    factors = None if growth is None else query_factors(growth, positions)
    context = LayerContext(spec, WeightLayout(), leaves, cos, sin, watch=watch, query_factors=factors)
    kept, metadata = (None,) * len(mixers), (positions.reshape(batch, length),) * len(mixers)
    out, *_ = _run_layer(x.reshape(-1, hidden), context, kept, metadata, mixers, dense_causal_attend)
    return out.reshape(x.shape)


def lm_head(
    spec: DecoderSpec,
    params: Params,
    hidden: Float[Array, "rows hidden"],
    *,
    layout: WeightLayout = WeightLayout(),
    num_rows: Int[Array, ""] | None = None,
    shards: Shards = WHOLE,
    adapter_slots: Int[Array, " rows"] | None = None,
) -> Float[Array, "rows output"]:
    """float32 logits of the hidden states: final norm, then the output matrix.

    A pooling model returns the hidden states after the final norm, or a classifier's scores [rows, num_labels]. An
    encoder's hidden states have their final norm already.

    shards:   with several, the logits are of this device's part of the vocabulary, which may end with padding.
    num_rows: number of needed rows, which come first. None: all.
    adapter_slots: slot of each row's adapter, as in `decode`.
    """
    context = LayerContext(spec, layout, params, num_rows=num_rows, shards=shards)
    if spec.encoder is not None:
        return encoder_output(spec.encoder, hidden, context)
    x = normalise("final_norm", hidden, context) if spec.final_norm else hidden
    if "project_out" in params:
        x = linear("project_out", x, context)
    if spec.num_labels is not None:
        # With one label, XLA on CPU multiplies by a vector, and the last of an odd number of rows gets other bits.
        return linear("score", x, context, dtype=jnp.float32, min_outputs=MIN_SCORES)
    if spec.pools:
        return x.astype(jnp.float32)
    logits = linear("embed" if spec.tie_embeddings else "lm_head", x, context, dtype=jnp.float32)
    if spec.lm_head_bias:
        logits += params["lm_head_bias"].astype(jnp.float32)
    if adapter_slots is not None:
        logits = with_lm_head_adapters(x, logits, params["adapters"][LM_HEAD], adapter_slots, num_rows)
    if spec.logit_divisor != 1:
        logits /= spec.logit_divisor
    return softcap(logits, spec.final_softcap)


def encoder_output(
    encoder: Encoder, x: Float[Array, "rows hidden"], context: LayerContext
) -> Float[Array, "rows output"]:
    """`lm_head` of an encoder: the vectors themselves, or a classifier's scores."""
    if context.spec.num_labels is None:
        return x.astype(jnp.float32)
    if encoder.head is not None:
        x = activate(encoder.head.value, linear_with_bias("head", x, context))
        x = normalise("head_norm", x, context) if encoder.head_norm else x
    scores = linear("score", x, context, dtype=jnp.float32, min_outputs=MIN_SCORES)
    return add(scores, context.params.get("score_bias"))


def dense_causal_attend(
    projection: Projection | compressed.CompressedProjection, pages: Pages, metadata: Metadata,
    options: AttentionOptions, sinks: Float[Array, " heads"] | None,
) -> tuple[Float[Array, "tokens heads head_dim"], Pages]:  # fmt: skip
    """Attention within sequences of equal length, which are concatenated. For training and checks.

    metadata: any array of shape [batch, length], with tokens = batch * length. Only its shape is used.
    pages: keys and values of an earlier layer, for a layer without its own. The result has them for later layers.
    Matmuls are in q's dtype with float32 sums. The softmax is in float32.
    """
    if isinstance(projection, compressed.CompressedProjection):
        return compressed.attend_in_sequences(projection, metadata[0]), pages
    batch, length = metadata.shape
    if projection.has_keys:
        q, k, v = projection.finish()
        pages = (k, v) if options.keeps_kv else pages
    else:
        q, (k, v) = projection.finish_queries(), pages
    kv_heads, head_dim = k.shape[1:]
    q = q.reshape(batch, length, kv_heads, -1, head_dim)
    values = k[..., : options.v_dim] if v is None else v
    k, v = (a.reshape(batch, length, kv_heads, -1) for a in (k, values))
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=jnp.float32) * options.scale
    scores = softcap(scores, options.softcap)
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    if options.alibi_slopes is not None:
        slopes = jnp.array(options.alibi_slopes, jnp.float32).reshape(kv_heads, -1, 1, 1)
        scores -= slopes * distance
    seen = distance >= 0
    if options.window is not None:
        seen &= distance < options.window
    if options.chunk is not None:
        chunks = jnp.arange(length) // options.chunk
        seen &= chunks[:, None] == chunks
    if projection.index is not None:
        chosen = chosen_in_sequences(projection.index, k[:, :, 0, head_dim - projection.index.dim :])
        pages = dataclasses.replace(pages, chosen=chosen) if isinstance(pages, ChosenPages) else pages
        seen = seen & chosen[:, None, None]
    elif isinstance(pages, ChosenPages):
        seen = seen & pages.chosen[:, None, None]
    scores = jnp.where(seen, scores, -1e30)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1), (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(batch * length, -1, v.shape[-1]), pages


LAYER_VECTORS = (
    "attn_norm", "attn_norm_bias", "attn_out_norm", "mlp_norm", "mlp_norm_bias", "mlp_out_norm", "attn_out_norm_bias",
    "mlp_out_norm_bias", "q_a_norm", "kv_a_norm", "q_a_bias", "kv_a_bias", "o_bias", "up_bias", "down_bias",
    "layer_out_norm", "layer_scalar", "altup_scale", "altup_router_norm", "laurel_norm", "router_norm",
    "dense_out_norm", "sparse_norm", "sparse_out_norm", "xielu",
)  # fmt: skip


def _embed(
    context: LayerContext, token_ids: Int[Array, " tokens"], positions: Int[Array, " tokens"],
    adapter_slots: Int[Array, " tokens"] | None = None, *, in_loop: bool = False,
    token_types: Int[Array, " tokens"] | None = None,
) -> Float[Array, "tokens hidden"]:  # fmt: skip
    spec, params = context.spec, context.params
    if adapter_slots is None:
        x = take_rows("embed", token_ids, context, in_loop=in_loop, scale=spec.embed_scale)
    else:
        x = take_rows("embed", token_ids, context, in_loop=in_loop)
        x = with_embedding_adapters(x, token_ids, params["adapters"][EMBED], adapter_slots, context.num_rows)
        x *= jnp.asarray(spec.embed_scale, x.dtype)
    if "project_in" in params:
        x = linear("project_in", x, context)
    if token_types is not None:
        x += jnp.take(params["type_embed"], token_types, axis=0, mode="clip")
    if spec.learned_positions:
        x += jnp.take(params["pos_embed"], positions + spec.position_offset, axis=0, mode="clip")
    return normalise("embed_norm", x, context) if spec.embed_norm else x


@functools.partial(jax.jit, static_argnames=("mixers", "attend"))
def _layer(
    x: Float[Array, "*streams tokens hidden"],
    normed: Float[Array, "tokens hidden"] | None,
    norms: LayerNorms | None,
    context: LayerContext,
    kept: Sequence[Pages | State],
    metadata: Sequence[Metadata],
    *,
    mixers: tuple[Mixer, ...],
    attend: Attend,
) -> tuple[
    Float[Array, "*streams tokens hidden"], Float[Array, "tokens hidden"] | None, tuple[Pages | State, ...],
    Int[Array, "tokens per_token"] | None,
]:  # fmt: skip
    """`_run_layer`, jitted. Layers with equal shapes and options share one trace.

    normed: x after the layer's first norm, from a fused layer before it; None: not computed yet.
    norms: of a fused layer, which applies the next layer's first norm to its output: the second result.
    """
    if norms is None:
        x, new, choice = _run_layer(x, context, kept, metadata, mixers, attend)
        return x, None, new, choice
    (options,) = mixers
    assert isinstance(options, AttentionOptions), "`refuse_fused` refuses recurrent layers"
    normed = normalise("attn_norm", x, context) if normed is None else normed
    sinks = context.params["sinks"] if context.spec.sinks else None
    out, pages = attend(_project(normed, context), kept[0], metadata[0], options, sinks)
    x, normed = finish_layer(x, out.reshape(x.shape[0], -1), context, norms)
    return x, normed, (pages,), None


def _run_layer(
    x: Float[Array, "*streams tokens hidden"],
    context: LayerContext,
    kept: Sequence[Pages | State],
    metadata: Sequence[Metadata],
    mixers: tuple[Mixer, ...],
    attend: Attend,
) -> tuple[Float[Array, "*streams tokens hidden"], tuple[Pages | State, ...], Int[Array, "tokens per_token"] | None]:
    """Attention, a recurrence, or the sum of both, then the feed-forward network, with norms and residual sums.

    With `DecoderSpec.lone_feed_forward`, only one of the two.
    kept, metadata: one for each of the mixers. Without experts, the third result is None.
    """
    if context.spec.compressed is not None:
        return compressed.run_layer(x, context, kept, metadata, mixers, attend)
    if context.spec.altup is not None:
        return _run_altup_layer(context.spec.altup, x, context, kept, metadata, mixers, attend)
    is_first = context.spec.norm_position in (NormPosition.PRE, NormPosition.SANDWICH)
    is_first &= "attn_norm" in context.params  # `DecoderSpec.first_norm`
    normed = normalise("attn_norm", x, context) if is_first else x
    return run_normed_layer(x, normed, context, kept, metadata, mixers, attend)


def _run_altup_layer(
    streams: AltUp, x: Float[Array, "streams tokens hidden"], context: LayerContext, kept: Sequence[Pages | State],
    metadata: Sequence[Metadata], mixers: tuple[Mixer, ...], attend: Attend,
) -> tuple[
    Float[Array, "streams tokens hidden"], tuple[Pages | State, ...], Int[Array, "tokens per_token"] | None
]:  # fmt: skip
    """`_run_layer` of a model with `AltUp`. The per-layer embedding is added to all streams but the first."""
    predictions = altup.predict(streams, x, context)
    active = predictions[streams.active]
    normed = normalise("attn_norm", active, context)
    alone = dataclasses.replace(context, layer_input=None)
    out, kept, choice = run_normed_layer(active, normed, alone, kept, metadata, mixers, attend)
    x = altup.correct(streams, predictions, out, context)
    if context.layer_input is not None:
        gating = x[streams.active] * context.params["altup_scale"] if streams.scales else x[streams.active]
        x = x.at[1:].add(gated_layer_input(gating, context.layer_input, context))
    return x, kept, choice


def run_normed_layer(
    x: Float[Array, "tokens hidden"],
    normed: Float[Array, "tokens width"],
    context: LayerContext,
    kept: Sequence[Pages | State],
    metadata: Sequence[Metadata],
    mixers: tuple[Mixer, ...],
    attend: Attend,
) -> tuple[Float[Array, "tokens hidden"], tuple[Pages | State, ...], Int[Array, "tokens per_token"] | None]:
    """`_run_layer` after its first norm. normed: input of q, k and v, which is wider than x in an EAGLE-3 head."""
    spec = context.spec

    def norm(name: str, x: Array, *positions: NormPosition) -> Array:
        """Apply the norm `name`, if this model has a norm in one of these positions."""
        return normalise(name, x, context) if spec.norm_position in positions else x

    if not mixers:
        h, choice = _feed_forward(x, normed, context)
        return x + scaled(h, spec.residual_scale), (), choice
    outs, new = [], []
    for mixer, of_mixer, tokens in zip(mixers, kept, metadata, strict=True):
        if isinstance(mixer, AttentionOptions):
            out, changed = _attention(normed, context, of_mixer, tokens, mixer, attend)
        else:
            out, changed = mix_by_state(mixer, normed, context, of_mixer, tokens)
        outs.append(out)
        new.append(changed)
    out = functools.reduce(jnp.add, outs)
    attended = x + scaled(norm("attn_out_norm", out, NormPosition.SANDWICH, NormPosition.OUTPUT), spec.residual_scale)
    if spec.laurel_rank:
        attended = altup.with_laurel(attended, normed, context)
    attended = norm("attn_norm", attended, NormPosition.POST)
    if spec.lone_feed_forward:
        return attended, tuple(new), None

    if not spec.shared_norm:
        source = x if spec.parallel_residual else attended
        normed = norm("mlp_norm", source, NormPosition.PRE, NormPosition.SANDWICH)
    h, choice = _feed_forward(attended, normed, context)
    x = attended + scaled(norm("mlp_out_norm", h, NormPosition.SANDWICH, NormPosition.OUTPUT), spec.residual_scale)
    if context.layer_input is not None:
        x += gated_layer_input(x, context.layer_input, context)
    if spec.layer_scalars:
        x *= context.params["layer_scalar"]
    return norm("mlp_norm", x, NormPosition.POST), tuple(new), choice


def _feed_forward(
    x: Float[Array, "tokens hidden"], normed: Float[Array, "tokens hidden"], context: LayerContext
) -> tuple[Float[Array, "tokens hidden"], Int[Array, "tokens per_token"] | None]:
    """Feed-forward network, dense or of experts. Returns (output, expert indices; None without experts).

    x: before the norm. normed: after it.
    """
    spec, choice = context.spec, None
    if spec.experts is not None and "router" in context.params:
        if spec.experts.beside_dense:
            h, choice = dense_and_sparse_feed_forward(spec.experts, x, normed, context)
        else:
            h, choice = sparse_feed_forward(spec.experts, normed, context)
    else:
        h = feed_forward(normed, context)
    return scaled(h, spec.feed_forward_scale), choice


def _attention(
    normed: Float[Array, "tokens width"], context: LayerContext, pages: Pages, metadata: Metadata,
    options: AttentionOptions, attend: Attend,
) -> tuple[Float[Array, "tokens hidden"], Pages]:  # fmt: skip
    """Attention, from the input of q, k and v to the output of the o projection."""
    spec, sinks = context.spec, context.params["sinks"] if context.spec.sinks else None
    projection = _project(normed, context)
    gate = None
    if spec.attention_gate and not isinstance(projection.product, tuple):
        gate = projection.product[:, :, : spec.q_per_kv]
        projection = dataclasses.replace(projection, product=projection.product[:, :, spec.q_per_kv :])
    out, pages = attend(projection, pages, metadata, options, sinks)
    if spec.latent is not None:
        out = latent_values(spec.latent, out, context)
    if gate is not None:
        out *= jax.nn.sigmoid(gate.reshape(out.shape))
    if spec.output_gates:
        gates = jax.nn.softplus(linear("output_gate", normed, context, dtype=jnp.float32))
        out = (out * gates.reshape(*out.shape[:2], spec.output_gates)).astype(out.dtype)
    out = linear_with_bias("o", out.reshape(normed.shape[0], -1), context)
    return scaled(out, spec.attention_out_scale), pages


def _project(x: Float[Array, "tokens hidden"], context: LayerContext) -> Projection:
    spec, params, cos, sin = context.spec, context.params, context.cos, context.sin
    if spec.latent is not None:
        q, k, index = latent_queries_and_keys(spec.latent, x, context)
        return Projection((q, k, None), None, None, None, None, None, spec.norm_eps, index)
    if spec.layer_kv:
        return _project_unlike(x, context)
    qkv, bias = _qkv(x, context)
    if context.query_factors is not None:
        qkv, bias = _grown(qkv, bias, context.query_factors), None
    if spec.qk_norm is None:
        return Projection(qkv, bias, None, None, cos, sin, spec.norm_eps)
    if spec.qk_norm is QKNorm.HEAD:
        q_gain, k_gain = params["q_norm"], params["k_norm"]
        if spec.norm is Norm.RMS_OFFSET:
            q_gain, k_gain = 1 + q_gain.astype(jnp.float32), 1 + k_gain.astype(jnp.float32)
        return Projection(qkv, bias, q_gain, k_gain, cos, sin, spec.norm_eps)
    # No kernel fuses these two with the write into the pages
    if spec.qk_norm is QKNorm.ROTATED:
        q, k, v = Projection(qkv, bias, None, None, cos, sin, spec.norm_eps).finish()
        q, k = rms_norm(q, params["q_norm"], spec.norm_eps), rms_norm(k, params["k_norm"], spec.norm_eps)
        return Projection((q, k, v), None, None, None, None, None, spec.norm_eps)
    # QKNorm.PROJECTION: a norm over all heads of a token
    q, k, v = Projection(qkv, bias, None, None, None, None, spec.norm_eps).finish()
    q, k = (
        normalise_split(name, part.reshape(x.shape[0], -1), context).reshape(part.shape)
        for name, part in (("q_norm", q), ("k_norm", k))
    )
    return Projection((q, k, v), None, None, None, cos, sin, spec.norm_eps)


def _project_unlike(x: Float[Array, "tokens hidden"], context: LayerContext) -> Projection:
    """`_project` of a model with `layer_kv`. All norms are applied."""
    spec, params, kv = context.spec, context.params, context.spec.kv_of(0)

    def heads(name: str) -> Array:
        return linear(name, x, context).reshape(x.shape[0], -1, spec.head_dim)

    if params.keys() & {"qkv", "v"}:
        q, k, v = Projection(*_qkv(x, context), None, None, None, None, spec.norm_eps).finish()
    else:
        q, k, v = heads("q"), heads("k") if kv.source is None else None, None
    q = normalise_heads(q, params["q_norm"], context)
    if k is not None:
        v = k if v is None else v
        v = normalise_heads(v, None, context) if spec.v_norm else v
        k = normalise_heads(k, params["k_norm"], context)
    return Projection((q, k, v), None, None, None, context.cos, context.sin, spec.norm_eps)


def _grown(
    product: Array | tuple[Array, Array, Array], bias: Array | None, factors: Float[Array, " tokens"]
) -> Array | tuple[Array, Array, Array]:
    """`Projection.product` with its bias, and with queries times their factors. Rope may follow: it is linear."""
    if isinstance(product, tuple):
        q, k, v = product
        return (q.astype(jnp.float32) * factors[:, None, None]).astype(q.dtype), k, v
    qkv = add(product, bias)
    is_query = jnp.arange(qkv.shape[2]) < qkv.shape[2] - 2
    by_head = jnp.where(is_query, factors[:, None], 1.0)[:, None, :, None]
    return (qkv.astype(jnp.float32) * by_head).astype(qkv.dtype)


def _qkv(
    x: Float[Array, "tokens hidden"], context: LayerContext
) -> tuple[Array | tuple[Array, Array, Array], Array | None]:
    """`Projection.product` and `Projection.bias`. Separate q, k and v have their bias already."""
    spec, bias = context.spec, context.params.get("qkv_bias")
    tokens, q_per_kv = x.shape[0], spec.q_per_kv
    if not context.layout.split_qkv:
        product = linear("qkv", x, context)
        return product.reshape(tokens, -1, spec.qkv_heads, spec.head_dim), bias
    kv_heads = context.params["k"].size // (spec.head_dim * x.shape[1])  # of this device
    parts = [linear(name, x, context).reshape(tokens, kv_heads, -1, spec.head_dim) for name in ("q", "k", "v")]
    if bias is not None:
        cuts = (slice(q_per_kv), slice(q_per_kv, q_per_kv + 1), slice(q_per_kv + 1, None))
        parts = [add(part, bias[:, cut]) for part, cut in zip(parts, cuts, strict=True)]
    return (parts[0].reshape(tokens, -1, spec.head_dim), parts[1][:, :, 0], parts[2][:, :, 0]), None


def query_factors(scaling: QueryScaling, positions: Int[Array, " tokens"]) -> Float[Array, " tokens"]:
    """float32 factor of each token's queries, for the layers that `scaling` applies to."""
    periods = (positions + scaling.first) // scaling.length
    return 1 + scaling.beta * jnp.log(1 + periods.astype(jnp.float32))
