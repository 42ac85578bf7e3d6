"""The decoder: one transformer for every family, driven by a DecoderSpec.

1. `decode` embeds the tokens, then runs the layers in an unrolled loop. Tokens of many requests lie behind each other
   in one axis; only attention knows which belong together.
2. Attention is handed in (`attend`): over KV pages when serving, dense and causal when training or checking. The
   decoder threads `pages` through it, and never looks inside: layers may share an entry (`jpaged.kv_groups`).
3. `lm_head` turns the hidden states that somebody wants logits of into logits; of a model that pools, into its result.

Every layer is the same jitted function, so tracing and lowering cost one layer whatever the depth.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jpaged.kv_groups import KVPlace
from jpaged.models import rope as rotary
from jpaged.models.experts import sparse_feed_forward
from jpaged.models.latent import latent_queries_and_keys, latent_values
from jpaged.models.layers import Params, add, feed_forward, normalise, product, softcap
from jpaged.models.spec import AttentionOptions, DecoderSpec, Norm, NormPlace, QKNorm, Rope, WeightLayout
from pallas_kernels.write_qkv.reference import finish

MIN_SCORES = 8  # labels that a classifier is computed for, at least


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["product", "bias", "q_norm", "k_norm", "cos", "sin"], meta_fields=["norm_eps"],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class Projection:
    """The product of a layer's input with its q, k and v matrices, and what has still to be done to it.

    Not done yet, because serving does it in one kernel with the write into the pages; `finish` does it in jnp.
    """

    # [tokens, kv_heads, q_per_kv + 2, head_dim]; or (q, k, v), bias added. Latent attention: v is None
    product: Any
    bias: Any     # [kv_heads, q_per_kv + 2, head_dim] or None
    q_norm: Any   # [head_dim] or None; k_norm likewise
    k_norm: Any
    cos: Any      # float32[tokens, half] or None; sin likewise
    sin: Any
    norm_eps: float

    def finish(self) -> tuple[Array, Array, Array | None]:
        """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], ready for attention."""
        if isinstance(self.product, tuple):
            q, k, v = self.product
        else:
            qkv = add(self.product, self.bias)
            q, k, v = qkv[:, :, :-2].reshape(qkv.shape[0], -1, qkv.shape[3]), qkv[:, :, -2], qkv[:, :, -1]
        q, k = finish(
            q, k, cos=self.cos, sin=self.sin, q_norm=self.q_norm, k_norm=self.k_norm, norm_eps=self.norm_eps
        )
        return q, k, v


@runtime_checkable
class Attend(Protocol):
    """Attention of one layer. Must be hashable and the same object from call to call: it is a static argument."""

    def __call__(
        self, projection: Projection, pages: Any, metadata: Any, options: AttentionOptions, sinks: Array | None
    ) -> tuple[Float[Array, "tokens heads head_dim"], Any]:
        """Finish the projection, store keys and values, attend, and give (output, pages). sinks: [heads] or None."""
        ...


def decode(
    spec: DecoderSpec,
    params: Params,
    token_ids: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    pages: Sequence[Any],
    metadata: Any,
    attend: Attend,
    *,
    layout: WeightLayout = WeightLayout(),
    rope_lens: Int[Array, " tokens"] | None = None,
    real: Bool[Array, " tokens"] | None = None,
    places: Sequence[KVPlace] | None = None,
) -> tuple[Float[Array, "tokens hidden"], tuple[Any, ...]]:
    """Hidden states after the last layer (before the final norm: see `lm_head`), and the pages with the new KV.

    token_ids, positions: ids in [0, vocab_size) and places in their own sequences; checked by the caller.
    pages:     one entry a layer, whatever `attend` keeps there (None when it keeps nothing).
    metadata:  a pytree that `attend` understands.
    rope_lens: the sequence length that dynamic rope scaling and longrope go by, a token; only needed for those.
    real:      which tokens are no padding, so that padding goes to no expert; None = all.
    places:    of each layer, which entry of `pages` and of `metadata` are its own: pages are then one entry an array,
               metadata is a sequence with one entry a group.
    """
    x = jnp.take(params["embed"], token_ids, axis=0, mode="clip")
    if spec.embed_scale != 1:
        x *= jnp.asarray(spec.embed_scale, x.dtype)
    if "project_in" in params:
        x = product(x, params["project_in"], "project_in" in layout.transposed)
    if spec.embed_norm:
        x = normalise(spec, x, params["embed_norm"], params.get("embed_norm_bias"))
    if spec.learned_positions:
        x += jnp.take(params["pos_embed"], positions + spec.position_offset, axis=0, mode="clip")
    ropes = {rope for i in range(spec.num_layers) if (rope := spec.layer_rope(i)) is not None}
    angles = {rope: _rope_angles(spec, rope, positions, rope_lens) for rope in ropes}
    if places is None:
        metadata, places = (metadata,), [KVPlace(group=0, array=i) for i in range(len(pages))]
    new_pages = list(pages)
    for i, (matrices, place) in enumerate(zip(params["layers"], places, strict=True)):
        vectors = {name: params[name][i] for name in _LAYER_VECTORS if name in params}
        rope = spec.layer_rope(i)
        x, new_pages[place.array] = _layer(
            matrices, vectors, x, None if rope is None else angles[rope], new_pages[place.array],
            metadata[place.group], real, spec=spec, options=spec.attention(i), layout=layout, attend=attend,
        )  # fmt: skip
    return x, tuple(new_pages)


def lm_head(
    spec: DecoderSpec,
    params: Params,
    hidden: Float[Array, "rows hidden"],
    *,
    layout: WeightLayout = WeightLayout(),
) -> Float[Array, "rows output"]:
    """Final norm and output matrix: float32 logits of the given hidden states.

    Of a spec that pools: the normed states themselves, or a classifier's scores of its labels, in float32.
    """
    x = hidden
    if spec.final_norm:
        x = normalise(spec, x, params["final_norm"], params.get("final_norm_bias"))
    if "project_out" in params:
        x = product(x, params["project_out"], "project_out" in layout.transposed)
    if spec.num_labels is not None:
        # With one label XLA on CPU multiplies by a vector, and the last rows of an odd number of them get other bits.
        score = jnp.pad(params["score"], ((0, max(0, MIN_SCORES - spec.num_labels)), (0, 0)))
        return product(x, score, False, jnp.float32)[:, : spec.num_labels]
    if spec.pools:
        return x.astype(jnp.float32)
    name = "embed" if spec.tie_embeddings else "lm_head"
    logits = product(x, params[name], name in layout.transposed, jnp.float32)
    if spec.logit_divisor != 1:
        logits /= spec.logit_divisor
    return softcap(logits, spec.final_softcap)


def dense_causal_attend(
    projection: Projection, pages: Any, metadata: Int[Array, "batch length"], options: AttentionOptions,
    sinks: Float[Array, " heads"] | None,
) -> tuple[Float[Array, "tokens heads head_dim"], Any]:  # fmt: skip
    """Attention inside equally long sequences that lie behind each other: for training and for checking.

    metadata: any array of shape [batch, length], tokens = batch * length; only its shape is used.
    Products and softmax are in float32 where q is, else the products are in q's dtype with float32 sums.
    """
    batch, length = metadata.shape
    q, k, v = projection.finish()
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
    scores = jnp.where(seen, scores, -1e30)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1), (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(batch * length, -1, v.shape[-1]), pages


_LAYER_VECTORS = (
    "attn_norm", "attn_norm_bias", "attn_out_norm", "mlp_norm", "mlp_norm_bias", "mlp_out_norm", "q_norm", "k_norm",
    "attn_out_norm_bias", "mlp_out_norm_bias", "q_a_norm", "kv_a_norm", "q_a_bias", "kv_a_bias", "qkv_bias", "o_bias",
    "up_bias", "down_bias", "sinks",
)  # fmt: skip


@functools.partial(jax.jit, static_argnames=("spec", "options", "layout", "attend"))
def _layer(
    matrices: Params,
    vectors: Params,
    x: Float[Array, "tokens hidden"],
    angles: tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]] | None,
    pages: Any,
    metadata: Any,
    real: Bool[Array, " tokens"] | None,
    *,
    spec: DecoderSpec,
    options: AttentionOptions,
    layout: WeightLayout,
    attend: Attend,
) -> tuple[Float[Array, "tokens hidden"], Any]:
    """One layer: attention and feed-forward, each with its norm and its residual sum."""
    place = spec.norm_place

    def norm(name: str, x: Array, *places: NormPlace) -> Array:
        """The layer's norm of that name, where this model has its norms there."""
        return normalise(spec, x, vectors[name], vectors.get(f"{name}_bias")) if place in places else x

    cos, sin = angles or (None, None)
    normed = norm("attn_norm", x, NormPlace.PRE, NormPlace.SANDWICH)
    projection = _project(spec, layout, matrices, vectors, normed, cos, sin)
    out, pages = attend(projection, pages, metadata, options, vectors["sinks"] if spec.sinks else None)
    if spec.latent is not None:
        out = latent_values(spec.latent, matrices, out)
    out = add(product(out.reshape(x.shape[0], -1), matrices["o"], "o" in layout.transposed), vectors.get("o_bias"))
    attended = x + _scaled(spec, norm("attn_out_norm", out, NormPlace.SANDWICH, NormPlace.OUTPUT))
    attended = norm("attn_norm", attended, NormPlace.POST)

    if not spec.shared_norm:
        source = x if spec.parallel_residual else attended
        normed = norm("mlp_norm", source, NormPlace.PRE, NormPlace.SANDWICH)
    if spec.experts is not None and "router" in matrices:
        h = sparse_feed_forward(spec, spec.experts, matrices, normed, real)
    else:
        h = feed_forward(spec, layout, matrices, vectors, normed)
    x = attended + _scaled(spec, norm("mlp_out_norm", h, NormPlace.SANDWICH, NormPlace.OUTPUT))
    return norm("mlp_norm", x, NormPlace.POST), pages


def _project(
    spec: DecoderSpec, layout: WeightLayout, matrices: Params, vectors: Params, x: Float[Array, "tokens hidden"],
    cos: Array | None, sin: Array | None,
) -> Projection:  # fmt: skip
    """Queries, keys and values of a layer's input."""
    if spec.latent is not None and cos is not None and sin is not None:
        q, k = latent_queries_and_keys(spec.latent, matrices, vectors, x, cos, sin)
        return Projection((q, k, None), None, None, None, None, None, spec.norm_eps)
    qkv, bias = _qkv(spec, layout, matrices, vectors.get("qkv_bias"), x)
    if spec.qk_norm is None:
        return Projection(qkv, bias, None, None, cos, sin, spec.norm_eps)
    if spec.qk_norm is QKNorm.HEAD:
        gains = [vectors["q_norm"], vectors["k_norm"]]
        if spec.norm is Norm.RMS_OFFSET:
            gains = [1 + gain.astype(jnp.float32) for gain in gains]
        return Projection(qkv, bias, *gains, cos, sin, spec.norm_eps)
    # a norm over all heads of a token: no kernel does that together with the write
    q, k, v = Projection(qkv, bias, None, None, None, None, spec.norm_eps).finish()
    q, k = (
        normalise(spec, part.reshape(x.shape[0], -1), weight).reshape(part.shape)
        for part, weight in ((q, vectors["q_norm"]), (k, vectors["k_norm"]))
    )
    return Projection((q, k, v), None, None, None, cos, sin, spec.norm_eps)


def _qkv(
    spec: DecoderSpec, layout: WeightLayout, matrices: Params, bias: Array | None, x: Float[Array, "tokens hidden"]
) -> tuple[Any, Array | None]:
    """A Projection's product, and the bias that it still needs."""
    tokens, q_per_kv = x.shape[0], spec.q_per_kv
    if not layout.split_qkv:
        weight = matrices["qkv"]
        flat = product(x, weight.reshape(-1, weight.shape[-1]), transposed=False)
        return flat.reshape(tokens, spec.num_kv_heads, q_per_kv + 2, spec.head_dim), bias
    parts = [
        product(x, matrices[n], n in layout.transposed).reshape(tokens, spec.num_kv_heads, -1, spec.head_dim)
        for n in ("q", "k", "v")
    ]
    if bias is not None:
        cuts = (slice(q_per_kv), slice(q_per_kv, q_per_kv + 1), slice(q_per_kv + 1, None))
        parts = [add(part, bias[:, cut]) for part, cut in zip(parts, cuts, strict=True)]
    return (parts[0].reshape(tokens, spec.num_heads, spec.head_dim), parts[1][:, :, 0], parts[2][:, :, 0]), None


def _scaled(spec: DecoderSpec, x: Array) -> Array:
    """What a block adds to the residual stream."""
    return x if spec.residual_scale == 1 else (x.astype(jnp.float32) * spec.residual_scale).astype(x.dtype)


def _rope_angles(
    spec: DecoderSpec, rope: Rope, positions: Int[Array, " tokens"], rope_lens: Int[Array, " tokens"] | None
) -> tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]:
    """cos and sin of every token's angles, float32, the scaling's attention factor multiplied in."""
    seq_len = positions + 1 if rope_lens is None else rope_lens
    if rope.scaling == "dynamic":
        frequencies, factor = rotary.dynamic_inv_freq(rope, spec.rope_dim, seq_len), 1.0
    elif rope.scaling == "longrope":
        frequencies, factor = rotary.longrope_inv_freq(rope, spec.rope_dim, seq_len)
    else:
        inv_freq, factor = rotary.inv_freq(rope, spec.rope_dim, spec.max_position)
        frequencies = jnp.asarray(inv_freq)[None, :]
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor
