"""The decoder: one transformer for every family, driven by a DecoderSpec.

1. `decode` embeds the tokens, then runs the layers in an unrolled loop. Tokens of many requests lie behind each other
   in one axis; only attention knows which belong together.
2. Attention is handed in (`attend`): over KV pages when serving, dense and causal when training or checking. The
   decoder threads `pages` through it, and never looks inside: layers may share an entry (`jpaged.kv_groups`).
3. `head` turns the hidden states that somebody wants logits of into logits.

Every layer is the same jitted function, so tracing and lowering cost one layer whatever the depth.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.kv_groups import KVPlace
from jpaged.models import rope as rotary
from jpaged.models.spec import Activation, DecoderSpec, Norm, Rope, WeightLayout
from pallas_kernels.write_qkv.reference import finish, rms_norm

Params = dict[str, Any]  # the tree of spec.param_shapes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["product", "bias", "q_norm", "k_norm", "cos", "sin"], meta_fields=["norm_eps"],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class Projection:
    """The product of a layer's input with its q, k and v matrices, and what has still to be done to it.

    Not done yet, because serving does it in one kernel with the write into the pages; `finish` does it in jnp.
    """

    product: Any  # [tokens, kv_heads, group + 2, head_dim]; or (q, k, v) where the matrices are apart, bias added
    bias: Any     # [kv_heads, group + 2, head_dim] or None
    q_norm: Any   # [head_dim] or None; k_norm likewise
    k_norm: Any
    cos: Any      # float32[tokens, half] or None; sin likewise
    sin: Any
    norm_eps: float

    def finish(self) -> tuple[Array, Array, Array]:
        """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], ready for attention."""
        if isinstance(self.product, tuple):
            q, k, v = self.product
        else:
            qkv = _add(self.product, self.bias)
            q, k, v = qkv[:, :, :-2].reshape(qkv.shape[0], -1, qkv.shape[3]), qkv[:, :, -2], qkv[:, :, -1]
        q, k = finish(
            q, k, cos=self.cos, sin=self.sin, q_norm=self.q_norm, k_norm=self.k_norm, norm_eps=self.norm_eps
        )
        return q, k, v


@runtime_checkable
class Attend(Protocol):
    """Attention of one layer. Must be hashable and the same object from call to call: it is a static argument."""

    def __call__(
        self, projection: Projection, pages: Any, metadata: Any, *, scale: float, window: int | None,
        softcap: float | None,
    ) -> tuple[Float[Array, "tokens heads head_dim"], Any]:
        """Finish the projection, store keys and values, attend, and give (output, pages)."""
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
    places: Sequence[KVPlace] | None = None,
) -> tuple[Float[Array, "tokens hidden"], tuple[Any, ...]]:
    """Hidden states after the last layer (before the final norm: see `head`), and the pages with the new KV.

    token_ids, positions: ids in [0, vocab_size) and places in their own sequences; checked by the caller.
    pages:     one entry a layer, whatever `attend` keeps there (None when it keeps nothing).
    metadata:  a pytree that `attend` understands.
    rope_lens: the sequence length that dynamic rope scaling goes by, a token; only needed for that.
    places:    of each layer, which entry of `pages` and of `metadata` are its own: pages are then one entry an array,
               metadata is a sequence with one entry a group.
    """
    x = jnp.take(params["embed"], token_ids, axis=0, mode="clip")
    if spec.embed_scale != 1:
        x *= jnp.asarray(spec.embed_scale, x.dtype)
    if "project_in" in params:
        x = _product(x, params["project_in"], "project_in" in layout.transposed)
    if spec.rope is None:
        x += jnp.take(params["pos_embed"], positions + spec.position_offset, axis=0, mode="clip")
        angles = None
    else:
        angles = _rope_angles(spec, spec.rope, positions, rope_lens)
    if places is None:
        metadata, places = (metadata,), [KVPlace(group=0, array=i) for i in range(len(pages))]
    new_pages = list(pages)
    for i, (matrices, place) in enumerate(zip(params["layers"], places, strict=True)):
        vectors = {name: params[name][i] for name in _LAYER_VECTORS if name in params}
        x, new_pages[place.array] = _layer(
            matrices, vectors, x, angles if spec.uses_rope(i) else None, new_pages[place.array], metadata[place.group],
            spec=spec, window=spec.window(i), layout=layout, attend=attend,
        )  # fmt: skip
    return x, tuple(new_pages)


def head(
    spec: DecoderSpec,
    params: Params,
    hidden: Float[Array, "rows hidden"],
    *,
    layout: WeightLayout = WeightLayout(),
) -> Float[Array, "rows vocab"]:
    """Final norm and output matrix: float32 logits of the given hidden states."""
    x = hidden
    if spec.final_norm:
        x = _norm(spec, x, params["final_norm"], params.get("final_norm_bias"))
    if "project_out" in params:
        x = _product(x, params["project_out"], "project_out" in layout.transposed)
    name = "embed" if spec.tie_embeddings else "lm_head"
    logits = _product(x, params[name], name in layout.transposed, jnp.float32)
    if spec.logit_divisor != 1:
        logits /= spec.logit_divisor
    return _softcap(logits, spec.final_softcap)


def dense_causal_attend(
    projection: Projection, pages: Any, metadata: Int[Array, "batch length"], *, scale: float, window: int | None,
    softcap: float | None,
) -> tuple[Float[Array, "tokens heads head_dim"], Any]:  # fmt: skip
    """Attention inside equally long sequences that lie behind each other: for training and for checking.

    metadata: any array of shape [batch, length], tokens = batch * length; only its shape is used.
    Products and softmax are in float32 where q is, else the products are in q's dtype with float32 sums.
    """
    batch, length = metadata.shape
    q, k, v = projection.finish()
    kv_heads, head_dim = k.shape[1:]
    q = q.reshape(batch, length, kv_heads, -1, head_dim)
    k, v = (a.reshape(batch, length, kv_heads, head_dim) for a in (k, v))
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=jnp.float32) * scale
    scores = _softcap(scores, softcap)
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(batch * length, -1, head_dim), pages


_LAYER_VECTORS = (
    "attn_norm", "attn_norm_bias", "attn_out_norm", "mlp_norm", "mlp_norm_bias", "mlp_out_norm", "q_norm", "k_norm",
    "qkv_bias", "o_bias", "up_bias", "down_bias",
)  # fmt: skip


@functools.partial(jax.jit, static_argnames=("spec", "window", "layout", "attend"))
def _layer(
    matrices: Params,
    vectors: Params,
    x: Float[Array, "tokens hidden"],
    angles: tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]] | None,
    pages: Any,
    metadata: Any,
    *,
    spec: DecoderSpec,
    window: int | None,
    layout: WeightLayout,
    attend: Attend,
) -> tuple[Float[Array, "tokens hidden"], Any]:
    """One layer: attention and feed-forward, each with its norm and its residual sum."""
    attn_norm = functools.partial(_norm, spec, weight=vectors["attn_norm"], bias=vectors.get("attn_norm_bias"))
    mlp_norm = functools.partial(_norm, spec, weight=vectors["mlp_norm"], bias=vectors.get("mlp_norm_bias"))

    cos, sin = angles or (None, None)
    norms = (vectors["q_norm"], vectors["k_norm"]) if spec.qk_norm else (None, None)
    projection = Projection(
        *_qkv(spec, layout, matrices, vectors.get("qkv_bias"), x if spec.post_norm else attn_norm(x)),
        *norms, cos, sin, spec.norm_eps,
    )  # fmt: skip
    out, pages = attend(
        projection, pages, metadata, scale=spec.scale, window=window, softcap=spec.attention_softcap
    )
    out = _add(_product(out.reshape(x.shape[0], -1), matrices["o"], "o" in layout.transposed), vectors.get("o_bias"))
    x += _scaled(spec, _norm(spec, out, vectors["attn_out_norm"], None) if spec.sandwich_norm else out)
    if spec.post_norm:
        x = attn_norm(x)

    h = _feed_forward(spec, layout, matrices, vectors, x if spec.post_norm else mlp_norm(x))
    x += _scaled(spec, _norm(spec, h, vectors["mlp_out_norm"], None) if spec.sandwich_norm else h)
    return (mlp_norm(x) if spec.post_norm else x), pages


def _qkv(
    spec: DecoderSpec, layout: WeightLayout, matrices: Params, bias: Array | None, x: Float[Array, "tokens hidden"]
) -> tuple[Any, Array | None]:
    """A Projection's product, and the bias that it still needs."""
    tokens, group = x.shape[0], spec.group
    if not layout.split_qkv:
        weight = matrices["qkv"]
        flat = _product(x, weight.reshape(-1, weight.shape[-1]), transposed=False)
        return flat.reshape(tokens, spec.num_kv_heads, group + 2, spec.head_dim), bias
    parts = [
        _product(x, matrices[n], n in layout.transposed).reshape(tokens, spec.num_kv_heads, -1, spec.head_dim)
        for n in ("q", "k", "v")
    ]
    if bias is not None:
        cuts = (slice(group), slice(group, group + 1), slice(group + 1, None))
        parts = [_add(part, bias[:, cut]) for part, cut in zip(parts, cuts, strict=True)]
    return (parts[0].reshape(tokens, spec.num_heads, spec.head_dim), parts[1][:, :, 0], parts[2][:, :, 0]), None


def _feed_forward(
    spec: DecoderSpec, layout: WeightLayout, matrices: Params, vectors: Params, x: Float[Array, "tokens hidden"]
) -> Float[Array, "tokens hidden"]:
    bias = vectors.get("up_bias")
    if not spec.gated:
        h = _activate(spec, _add(_product(x, matrices["up"], "up" in layout.transposed), bias))
    else:
        if layout.split_gate_up:
            gate, up = (_product(x, matrices[n], n in layout.transposed) for n in ("gate", "up"))
        else:
            weight = matrices["gate_up"]
            both = _product(x, weight.reshape(-1, weight.shape[-1]), transposed=False)
            gate, up = both[:, : spec.intermediate_size], both[:, spec.intermediate_size :]
        if bias is not None:
            gate, up = _add(gate, bias[0]), _add(up, bias[1])
        h = _activate(spec, gate) * up
    return _add(_product(h, matrices["down"], "down" in layout.transposed), vectors.get("down_bias"))


def _product(x: Array, weight: Array, transposed: bool, dtype: Any = None) -> Array:
    """x [rows, in] times weight [out, in] ([in, out] if transposed); float32 is true float32 on every platform."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (0 if transposed else 1,)), ((), ()))
    return lax.dot_general(x, weight, dims, precision=exact, preferred_element_type=dtype or x.dtype)


def _add(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias


def _scaled(spec: DecoderSpec, x: Array) -> Array:
    """What a block adds to the residual stream."""
    return x if spec.residual_scale == 1 else (x.astype(jnp.float32) * spec.residual_scale).astype(x.dtype)


def _softcap(x: Array, cap: float | None) -> Array:
    return x if cap is None else cap * jnp.tanh(x / cap)


def _activate(spec: DecoderSpec, x: Array) -> Array:
    """The non-linearity, in float32: bf16 transcendentals lose digits and do not lower in every kernel back end."""
    y = x.astype(jnp.float32)
    match spec.activation:
        case Activation.SILU:
            y = jax.nn.silu(y)
        case Activation.GELU:
            y = jax.nn.gelu(y, approximate=False)
        case Activation.GELU_TANH:
            y = jax.nn.gelu(y, approximate=True)
        case Activation.RELU:
            y = jax.nn.relu(y)
    return y.astype(x.dtype)


def _norm(spec: DecoderSpec, x: Array, weight: Array, bias: Array | None) -> Array:
    if spec.norm is Norm.RMS:
        return rms_norm(x, weight, spec.norm_eps)
    y = x.astype(jnp.float32)
    if spec.norm is Norm.RMS_OFFSET:
        y *= lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + spec.norm_eps)
        return (y * (1 + weight.astype(jnp.float32))).astype(x.dtype)
    y -= y.mean(-1, keepdims=True)
    y *= lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + spec.norm_eps)
    y = y * weight.astype(jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)


def _rope_angles(
    spec: DecoderSpec, rope: Rope, positions: Int[Array, " tokens"], rope_lens: Int[Array, " tokens"] | None
) -> tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]:
    """cos and sin of every token's angles, float32, the attention factor of yarn multiplied in."""
    if rope.scaling == "dynamic":
        seq_len = positions + 1 if rope_lens is None else rope_lens
        frequencies, factor = rotary.dynamic_inv_freq(rope, spec.rope_dim, seq_len), 1.0
    else:
        inv_freq, factor = rotary.inv_freq(rope, spec.rope_dim, spec.max_position)
        frequencies = jnp.asarray(inv_freq)[None, :]
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor
