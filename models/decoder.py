"""The decoder: one transformer for every family, driven by a DecoderSpec.

1. `decode` embeds the tokens, then runs the layers in an unrolled loop. Tokens of many requests lie behind each other
   in one axis; only attention knows which belong together.
2. Attention is handed in (`attend`): over KV pages when serving, dense and causal when training or checking. The
   decoder threads `pages`, one entry a layer, through it, and never looks inside.
3. `head` turns the hidden states that somebody wants logits of into logits.

Every layer is the same jitted function, so tracing and lowering cost one layer whatever the depth.
"""

import functools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.models import rope as rotary
from jpaged.models.spec import Activation, DecoderSpec, Norm, Rope, WeightLayout

Params = dict[str, Any]  # the tree of spec.param_shapes


@runtime_checkable
class Attend(Protocol):
    """Attention of one layer. Must be hashable and the same object from call to call: it is a static argument."""

    def __call__(
        self,
        q: Float[Array, "tokens heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        pages: Any,
        metadata: Any,
        *,
        scale: float,
        window: int | None,
    ) -> tuple[Float[Array, "tokens heads head_dim"], Any]:
        """Store k and v, attend, and give (output, pages)."""
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
) -> tuple[Float[Array, "tokens hidden"], tuple[Any, ...]]:
    """Hidden states after the last layer (before the final norm: see `head`), and the pages with the new KV.

    token_ids, positions: ids in [0, vocab_size) and places in their own sequences; checked by the caller.
    pages:     one entry a layer, whatever `attend` keeps there (None when it keeps nothing).
    metadata:  a pytree that `attend` understands.
    rope_lens: the sequence length that dynamic rope scaling goes by, a token; only needed for that.
    """
    x = jnp.take(params["embed"], token_ids, axis=0, mode="clip")
    if "project_in" in params:
        x = _product(x, params["project_in"], "project_in" in layout.transposed)
    if spec.rope is None:
        x += jnp.take(params["pos_embed"], positions + spec.position_offset, axis=0, mode="clip")
        angles = None
    else:
        angles = _rope_angles(spec, spec.rope, positions, rope_lens)
    new_pages = []
    for i, (matrices, page) in enumerate(zip(params["layers"], pages, strict=True)):
        vectors = {name: params[name][i] for name in _LAYER_VECTORS if name in params}
        x, page = _layer(
            matrices, vectors, x, angles, page, metadata,
            spec=spec, window=spec.window(i), layout=layout, attend=attend,
        )  # fmt: skip
        new_pages.append(page)
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
    return _product(x, params[name], name in layout.transposed, jnp.float32)


def dense_causal_attend(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    pages: Any,
    metadata: Int[Array, "batch length"],
    *,
    scale: float,
    window: int | None,
) -> tuple[Float[Array, "tokens heads head_dim"], Any]:
    """Attention inside equally long sequences that lie behind each other: for training and for checking.

    metadata: any array of shape [batch, length], tokens = batch * length; only its shape is used.
    Products and softmax are in float32 where q is, else the products are in q's dtype with float32 sums.
    """
    batch, length = metadata.shape
    kv_heads, head_dim = k.shape[1:]
    q = q.reshape(batch, length, kv_heads, -1, head_dim)
    k, v = (a.reshape(batch, length, kv_heads, head_dim) for a in (k, v))
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=jnp.float32) * scale
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(batch * length, -1, head_dim), pages


_LAYER_VECTORS = (
    "attn_norm", "attn_norm_bias", "mlp_norm", "mlp_norm_bias", "q_norm", "k_norm",
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

    q, k, v = _qkv(spec, layout, matrices, vectors.get("qkv_bias"), x if spec.post_norm else attn_norm(x))
    if spec.qk_norm:
        q, k = _rms_norm(q, vectors["q_norm"], spec.norm_eps), _rms_norm(k, vectors["k_norm"], spec.norm_eps)
    if angles is not None:
        q, k = _rotate(q, *angles), _rotate(k, *angles)
    out, pages = attend(q, k, v, pages, metadata, scale=spec.scale, window=window)
    x += _add(_product(out.reshape(x.shape[0], -1), matrices["o"], "o" in layout.transposed), vectors.get("o_bias"))
    if spec.post_norm:
        x = attn_norm(x)

    h = _feed_forward(spec, layout, matrices, vectors, x if spec.post_norm else mlp_norm(x))
    x += h
    return (mlp_norm(x) if spec.post_norm else x), pages


def _qkv(
    spec: DecoderSpec, layout: WeightLayout, matrices: Params, bias: Array | None, x: Float[Array, "tokens hidden"]
) -> tuple[Array, Array, Array]:
    """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]."""
    tokens, group = x.shape[0], spec.group
    if layout.split_qkv:
        parts = [
            _product(x, matrices[n], n in layout.transposed).reshape(tokens, spec.num_kv_heads, -1, spec.head_dim)
            for n in ("q", "k", "v")
        ]
        if bias is not None:
            cuts = (slice(group), slice(group, group + 1), slice(group + 1, None))
            parts = [_add(part, bias[:, cut]) for part, cut in zip(parts, cuts, strict=True)]
        q, k, v = parts[0], parts[1][:, :, 0], parts[2][:, :, 0]
    else:
        weight = matrices["qkv"]
        flat = _product(x, weight.reshape(-1, weight.shape[-1]), transposed=False)
        qkv = _add(flat.reshape(tokens, spec.num_kv_heads, group + 2, spec.head_dim), bias)
        q, k, v = qkv[:, :, :group], qkv[:, :, group], qkv[:, :, group + 1]
    return q.reshape(tokens, spec.num_heads, spec.head_dim), k, v


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
        return _rms_norm(x, weight, spec.norm_eps)
    y = x.astype(jnp.float32)
    y -= y.mean(-1, keepdims=True)
    y *= lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + spec.norm_eps)
    y = y * weight.astype(jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    y = x.astype(jnp.float32)
    y *= lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return y.astype(x.dtype) * weight


def _rope_angles(
    spec: DecoderSpec, rope: Rope, positions: Int[Array, " tokens"], rope_lens: Int[Array, " tokens"] | None
) -> tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]:
    """cos and sin of every token's angles, float32, the attention factor of yarn multiplied in."""
    if rope.scaling == "dynamic":
        seq_len = positions + 1 if rope_lens is None else rope_lens
        frequencies, factor = rotary.dynamic_inv_freq(rope, spec.head_dim, seq_len), 1.0
    else:
        inv_freq, factor = rotary.inv_freq(rope, spec.head_dim, spec.max_position)
        frequencies = jnp.asarray(inv_freq)[None, :]
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def _rotate(x: Float[Array, "tokens heads head_dim"], cos: Array, sin: Array) -> Float[Array, "tokens heads head_dim"]:
    """Rotary embedding in the rotate-half form: dimension i is paired with i + head_dim / 2."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :], sin[:, None, :]
    y = x.astype(jnp.float32)
    a, b = y[..., :half], y[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
