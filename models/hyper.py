"""Hyper-connections (DeepSeek V4): several streams of hidden states, which are mixed around each block.

1. `spread` copies the embedding into all streams.
2. `collapse` adds the streams to one hidden state, the input of a block, with weights that depend on all streams.
3. `expand` adds the block's output to each stream, after it has mixed the streams with a doubly stochastic matrix.
4. `merge` adds the streams after the last layer.

Sums over streams are written out: on CPU, the bits of XLA's sums depend on the number of tokens.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jpaged.models.compressed_spec import HyperConnections
from jpaged.models.experts import row_max
from jpaged.models.layers import normalise_heads, row_sum
from jpaged.models.linear import LayerContext, linear

_MIN_OUTPUTS = 8  # of a matmul. With fewer, XLA for CPU gives other bits


def spread(hyper: HyperConnections, x: Float[Array, "tokens hidden"]) -> Float[Array, "streams tokens hidden"]:
    """The streams of an embedding: copies."""
    return jnp.broadcast_to(x, (hyper.streams, *x.shape))


def merge(
    hyper: HyperConnections, x: Float[Array, "streams tokens hidden"], context: LayerContext
) -> Float[Array, "tokens hidden"]:
    """The hidden state before the final norm. context: with the model's whole tree."""
    params = context.params
    weights = _weights("hc_head_fn", x, context)
    weights = jax.nn.sigmoid(weights * params["hc_head_scale"] + params["hc_head_base"]) + hyper.eps
    return _weighted(x, weights).astype(x.dtype)


def collapse(
    hyper: HyperConnections, block: str, x: Float[Array, "streams tokens hidden"], context: LayerContext
) -> tuple[
    Float[Array, "tokens hidden"], Float[Array, "tokens streams"], Float[Array, "tokens streams streams"]
]:  # fmt: skip
    """Input of a block, and the factors for `expand`: of the block's output, and of stream i in stream j at [i, j].

    block: "attn" or "ffn", a part of the names of leaves.
    """
    n, params, tokens = hyper.streams, context.params, x.shape[1]
    weights, offsets = _weights(f"hc_{block}_fn", x, context), params[f"hc_{block}_base"]
    scale_in, scale_out, scale_mix = params[f"hc_{block}_scale"]
    into = jax.nn.sigmoid(weights[:, :n] * scale_in + offsets[:n]) + hyper.eps
    out = 2 * jax.nn.sigmoid(weights[:, n : 2 * n] * scale_out + offsets[n : 2 * n])
    mix = (weights[:, 2 * n :] * scale_mix + offsets[2 * n :]).reshape(tokens, n, n)
    mix = jnp.exp(mix - row_max(mix)[..., None])
    mix = _over_columns(mix / row_sum(mix)[..., None] + hyper.eps, hyper.eps)
    mix = lax.fori_loop(1, hyper.iterations, functools.partial(_balance, eps=hyper.eps), mix)
    return _weighted(x, into).astype(x.dtype), out, mix


def expand(
    out: Float[Array, "tokens hidden"],
    x: Float[Array, "streams tokens hidden"],
    factors: Float[Array, "tokens streams"],
    mix: Float[Array, "tokens streams streams"],
) -> Float[Array, "streams tokens hidden"]:
    """The streams after a block. out: the block's output. factors, mix: from `collapse`."""
    wide, streams = out.astype(jnp.float32), range(x.shape[0])
    mixed = [_weighted(x, mix[:, :, j]) + factors[:, j, None] * wide for j in streams]
    return jnp.stack(mixed).astype(x.dtype)


def _weights(
    name: str, x: Float[Array, "streams tokens hidden"], context: LayerContext
) -> Float[Array, "tokens outputs"]:
    """float32 product of all streams, normalised together without weights, and the matrix `name`."""
    flat = jnp.concatenate(list(x), axis=1).astype(jnp.float32)
    normed = normalise_heads(flat[:, None], None, context)[:, 0]
    return linear(name, normed, context, dtype=jnp.float32, min_outputs=_MIN_OUTPUTS)


def _weighted(
    x: Float[Array, "streams tokens hidden"], weights: Float[Array, "tokens streams"]
) -> Float[Array, "tokens hidden"]:
    """float32 weighted sum of the streams."""
    return _sum([weights[:, i, None] * stream.astype(jnp.float32) for i, stream in enumerate(x)])


def _balance(_: Any, mix: Float[Array, "tokens streams streams"], *, eps: float) -> Array:
    """One iteration of Sinkhorn-Knopp: divide by the sums of rows, then of columns."""
    return _over_columns(mix / (row_sum(mix)[..., None] + eps), eps)


def _over_columns(mix: Float[Array, "tokens streams streams"], eps: float) -> Float[Array, "tokens streams streams"]:
    return mix / (_sum([mix[:, i] for i in range(mix.shape[1])])[:, None] + eps)


def _sum(parts: Sequence[Array]) -> Array:
    return functools.reduce(jnp.add, parts)
