"""Encoders: the decoder's layers with attention in both directions, and the pooling of a text into one vector.

Called by: the forward program of an encoder (`jpaged.runtime.step.encode`).
Owns: attention without pages, and the pooling of hidden states.
Never: knows requests.

The tokens of all texts are on one axis, as in `decoder.decode`, but each text has the same number of slots: text i has
the tokens from i * row_len on. The slots after its last token are padding. So attention is one batched matmul.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jpaged.models import decoder
from jpaged.models.layers import normalise
from jpaged.models.linear import LayerContext
from jpaged.models.spec import AttentionOptions, DecoderSpec, Params, TextPooling, WeightLayout

# Longer texts attend in blocks of this many queries. All scores of one text of 8,192 tokens would take 3.2 GB (12
# heads, float32), a block's take 201 MB.
QUERY_BLOCK = 512
HIDDEN_SCORE = -1e30  # of a key that a query does not see


@dataclasses.dataclass(frozen=True)
class BidirectionalAttend:
    """The decoder's `attend` for encoders. There are no pages. `metadata` has the number of tokens of each text.

    Matmuls are in the model's dtype with float32 sums. The softmax is in float32.
    """

    row_len: int  # slots of a text

    def __call__(
        self, projection: decoder.Projection, pages: Any, metadata: Int[Array, " rows"], options: AttentionOptions,
        sinks: Float[Array, " heads"] | None,
    ) -> tuple[Float[Array, "tokens heads head_dim"], Any]:  # fmt: skip
        q, k, v = projection.finish()
        assert v is not None, "encoders have no latent attention"
        q, k, v = (jnp.swapaxes(each.reshape(-1, self.row_len, *each.shape[1:]), 1, 2) for each in (q, k, v))
        real = jnp.arange(self.row_len) < metadata[:, None]
        if self.row_len <= QUERY_BLOCK:
            out = _attend(q, k, v, real, jnp.int32(0), options)
        else:
            starts = jnp.arange(0, self.row_len, QUERY_BLOCK)
            blocks = lax.map(lambda start: _attend(_queries(q, start), k, v, real, start, options), starts)
            # [blocks, rows, heads, QUERY_BLOCK, dim] -> [rows, heads, row_len, dim]; the last block may overhang
            out = jnp.moveaxis(blocks, 0, 2).reshape(*q.shape[:2], -1, q.shape[3])[:, :, : self.row_len]
        return jnp.swapaxes(out, 1, 2).reshape(-1, q.shape[1], q.shape[3]), pages


def _queries(q: Float[Array, "rows heads length dim"], start: Int[Array, ""]) -> Float[Array, "rows heads block dim"]:
    """A block of queries. Those past the end repeat the last one."""
    index = jnp.minimum(start + jnp.arange(QUERY_BLOCK), q.shape[2] - 1)
    return jnp.take(q, index, axis=2)


def _attend(
    q: Float[Array, "rows heads queries dim"], k: Float[Array, "rows heads keys dim"],
    v: Float[Array, "rows heads keys dim"], real: Bool[Array, "rows keys"], start: Int[Array, ""],
    options: AttentionOptions,
) -> Float[Array, "rows heads queries dim"]:  # fmt: skip
    """Attention of some queries to all keys. start: position of the first query. real: False for padding."""
    exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = jnp.einsum("rhqd,rhkd->rhqk", q, k, precision=exact, preferred_element_type=jnp.float32) * options.scale
    seen = real[:, None, None, :]
    if options.window is not None:
        distance = start + jnp.arange(q.shape[2])[:, None] - jnp.arange(k.shape[2])
        seen &= jnp.abs(distance) <= options.window // 2
    weights = jax.nn.softmax(jnp.where(seen, scores, HIDDEN_SCORE), axis=-1).astype(v.dtype)
    return jnp.einsum("rhqk,rhkd->rhqd", weights, v, precision=exact, preferred_element_type=v.dtype)


def encode(
    spec: DecoderSpec,
    params: Params,
    token_ids: Int[Array, "rows row_len"],
    num_tokens: Int[Array, " rows"],
    type_1_from: Int[Array, " rows"],
    *,
    layout: WeightLayout = WeightLayout(),
    gated_dot: str | None = None,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "rows hidden"]]:
    """Hidden states of all slots after the final norm, and the pooled vector of each text.

    token_ids:   padding may have any id.
    num_tokens:  of each text. Texts without tokens come last, and have undefined results.
    type_1_from: position of the first token of type 1 in each text, the second text of a pair.
    """
    assert spec.encoder is not None
    rows, row_len = token_ids.shape
    positions = jnp.tile(jnp.arange(row_len), rows)
    types = None
    if spec.encoder.token_types:
        types = (positions.reshape(rows, row_len) >= type_1_from[:, None]).astype(jnp.int32).reshape(-1)
    needed = jnp.sum(num_tokens > 0, dtype=jnp.int32) * row_len
    x, *_ = decoder.decode(
        spec, params, token_ids.reshape(-1), positions, (None,) * spec.num_layers, num_tokens,
        BidirectionalAttend(row_len), layout=layout, num_tokens=needed, gated_dot=gated_dot, token_types=types,
    )  # fmt: skip
    if spec.final_norm:
        x = normalise("final_norm", x, LayerContext(spec, layout, params, num_rows=needed))
    return x, pool_texts(spec.encoder.pooling, x.reshape(rows, row_len, -1), num_tokens)


def pool_texts(
    pooling: TextPooling, x: Float[Array, "rows row_len hidden"], num_tokens: Int[Array, " rows"]
) -> Float[Array, "rows hidden"]:
    """One vector of each text. Means are summed in float32."""
    match pooling:
        case TextPooling.CLS:
            return x[:, 0]
        case TextPooling.LAST:
            last = jnp.maximum(num_tokens - 1, 0)
            return jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
        case TextPooling.MEAN:
            real = jnp.arange(x.shape[1]) < num_tokens[:, None]
            total = jnp.sum(jnp.where(real[..., None], x.astype(jnp.float32), 0), axis=1)
            return (total / jnp.maximum(num_tokens, 1)[:, None]).astype(x.dtype)
