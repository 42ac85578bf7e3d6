"""Draft heads: one decoder layer that drafts tokens from the target model's hidden states.

Called by: the model drafters, with pages; tools/train_speculators.py, with dense attention.
Owns: the computation of an EAGLE-3 head and of an MTP layer, and the shapes of their parameters.
Never: knows requests or block tables, samples, or runs the target.

Index p of a head holds token p + 1 and the target's hidden state at p. Its output predicts token p + 2.

1. `target_state` turns the target's hidden states, which `decoder.decode` captured, into states.
2. `head_input` joins the embedding of token p + 1 with the state at p.
3. `head_layer` runs the layer over these rows. Attention is an argument, as in `decoder.decode`.
4. `head_logits` turns the layer's output into logits over the draft vocabulary, and `to_target_ids` draft ids into
   target ids.
5. `next_state` turns the layer's output at p into the state at p + 1. The next pass reads it with the drafted token:
   steps 2 to 5 again, at position p + 1.

EAGLE-3 (arXiv:2503.01840): `fc` reduces the states of three target layers to one. q, k and v read the normalised
embedding and the normalised state next to each other. MTP (arXiv:2412.19437, section 2.2): `fc` joins the normalised
embedding and the normalised state, and a whole layer of the target's kind follows.

The parameter tree is that of `spec.param_shapes` for one layer, with the head's own leaves. So everything that knows a
model's leaves (loaders, quantised formats, sharding) knows a head's layer, too.
"""

import dataclasses
import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jpaged.models import decoder
from jpaged.models.layers import normalise
from jpaged.models.linear import LayerContext, linear, take_rows
from jpaged.models.rope import rope_angles
from jpaged.models.sharding import WHOLE, Shards
from jpaged.models.spec import DecoderSpec, NormPosition, Params, WeightLayout, param_shapes


class HeadKind(enum.Enum):
    """Kind of a draft head. The values are the methods of `speculative_config`."""

    EAGLE3 = "eagle3"
    MTP = "mtp"


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """A draft head. Hashable, because it is a static argument of compiled programs."""

    kind: HeadKind
    # The head's layer, with num_layers=1. Its vocab_size is the target's. Of an MTP layer it is the target's spec with
    # one layer. Also the final norm, and how the lm_head is tied, divided and capped if the head shares the target's.
    layer: DecoderSpec
    target_hidden_size: int
    aux_layers: tuple[int, ...] = ()     # EAGLE-3: indices for `decoder.decode`'s `capture`; () = only the last state
    draft_vocab_size: int | None = None  # None: the head predicts all ids of the target
    norm_before_residual: bool = False   # EAGLE-3: the residual sum starts with the normalised state
    norm_before_fc: bool = False         # EAGLE-3: one norm over the concatenated states, before `fc`
    fc_norm: bool = False                # EAGLE-3: a norm for each of the states, before `fc`
    norm_output: bool = False            # the next pass reads the output after the final norm (Qwen3-Next, EAGLE 3.1)
    own_embed: bool = False              # False: the target's embedding
    own_head: bool = True                # False: the target's output matrix
    own_norm: bool = True                # False: the target's final norm (Ernie 4.5)

    @property
    def capture(self) -> tuple[int, ...]:
        """`capture` of the target's `decoder.decode`: layers whose input `target_state` reads; () = the result."""
        return self.aux_layers

    @property
    def num_logits(self) -> int:
        """Width of `head_logits`."""
        return self.layer.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size


class HeadInput(NamedTuple):
    """Input of a head's layer."""

    residual: Float[Array, "tokens hidden"]  # start of the residual sum
    normed: Float[Array, "tokens width"]     # input of q, k and v


def head_param_shapes(spec: HeadSpec, dtype: DTypeLike) -> Params:
    """The parameter tree of a head, as ShapeDtypeStructs.

    The layer's leaves are those of `spec.param_shapes(spec.layer)`. The tree adds these:

    | leaf           | shape                   | EAGLE-3                       | MTP (DeepSeek-V3, Qwen3-Next) |
    |----------------|-------------------------|-------------------------------|-------------------------------|
    | fc             | [hidden, in]            | fc, in = states * target size | eh_proj, fc, in = 2 * hidden  |
    | hidden_norm    | [hidden]                | midlayer.hidden_norm          | hnorm, pre_fc_norm_hidden     |
    | embedding_norm | [hidden]                | (it is attn_norm)             | enorm, pre_fc_norm_embedding  |
    | final_norm     | [hidden]                | norm                          | shared_head.norm, norm        |
    | lm_head        | [num_logits, hidden]    | lm_head                       | shared_head.head, lm_head     |
    | embed          | [vocab_size, hidden]    | embed_tokens                  | embed_tokens                  |
    | d2t            | int32[num_logits]       | d2t                           |                               |
    | input_norm     | [states * target size]  | input_norm                    |                               |
    | fc_norm        | [states, target size]   | fc_norm.N                     |                               |

    An EAGLE-3 head without `fc` (no aux_layers) reads the target's last state. `final_norm`, `lm_head`, `embed` and
    `d2t` are there only if the head has them. attn_norm is the checkpoint's input_layernorm, and mlp_norm its
    post_attention_layernorm.
    """
    layer, hidden = spec.layer, spec.layer.hidden_size

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype))

    tree = param_shapes(layer, dtype)
    tree = {name: shape for name, shape in tree.items() if name not in ("embed", "lm_head")}
    tree |= {"final_norm": leaf(hidden), "hidden_norm": leaf(hidden)}
    if not spec.own_norm:
        del tree["final_norm"]
    if spec.kind is HeadKind.EAGLE3:
        states = len(spec.aux_layers)
        if states:
            tree["fc"] = leaf(hidden, states * spec.target_hidden_size)
        if spec.norm_before_fc:
            tree["input_norm"] = leaf(states * spec.target_hidden_size)
        if spec.fc_norm:
            tree["fc_norm"] = leaf(states, spec.target_hidden_size)
        matrices = dict(tree["layers"][0])
        matrices["qkv"] = leaf(*matrices["qkv"].shape[:-1], 2 * hidden)
        tree["layers"] = (matrices,)
    else:
        tree |= {"fc": leaf(hidden, 2 * hidden), "embedding_norm": leaf(hidden)}
    if spec.own_embed:
        tree["embed"] = leaf(layer.vocab_size, hidden)
    if spec.own_head:
        tree["lm_head"] = leaf(spec.num_logits, hidden)
    if spec.draft_vocab_size is not None:
        tree["d2t"] = jax.ShapeDtypeStruct((spec.draft_vocab_size,), np.dtype(np.int32))
    return tree


def target_state(
    spec: HeadSpec,
    params: Params,
    target_spec: DecoderSpec,
    target_params: Params,
    hidden: tuple[Float[Array, "tokens target_hidden"], ...],
    *,
    layout: WeightLayout = WeightLayout(),
    num_tokens: Int[Array, ""] | None = None,
    shards: Shards = WHOLE,
) -> Float[Array, "tokens hidden"]:
    """State of each token, for `head_input`, from the target's hidden states.

    hidden: the states that `decoder.decode` captured with `spec.capture`. With an empty `capture`, only the target's
            hidden states after the last layer: MTP reads them after the target's final norm.
    """
    context = LayerContext(spec.layer, layout, params, num_rows=num_tokens, shards=shards)
    if not spec.aux_layers:
        (last,) = hidden
        of_target = LayerContext(target_spec, WeightLayout(), target_params, num_rows=num_tokens, shards=shards)
        return normalise("final_norm", last, of_target) if target_spec.final_norm else last
    joined = jnp.concatenate(hidden, axis=1)
    if spec.norm_before_fc:
        joined = normalise("input_norm", joined, context)
    if spec.fc_norm:  # after input_norm, as in vLLM and speculators
        norms = {str(i): params["fc_norm"][i] for i in range(len(hidden))}
        of_norms = dataclasses.replace(context, params=norms)
        parts = jnp.split(joined, len(hidden), axis=1)
        joined = jnp.concatenate([normalise(str(i), each, of_norms) for i, each in enumerate(parts)], axis=1)
    return linear("fc", joined, context)


def embed_for_head(
    spec: HeadSpec,
    params: Params,
    target_spec: DecoderSpec,
    target_params: Params,
    token_ids: Int[Array, " tokens"],
    *,
    num_tokens: Int[Array, ""] | None = None,
    shards: Shards = WHOLE,
) -> Float[Array, "tokens hidden"]:
    """Embedding of each token for `head_input`: the head's own matrix, or the target's with its scale."""
    of, leaves = (spec.layer, params) if spec.own_embed else (target_spec, target_params)
    context = LayerContext(of, WeightLayout(), leaves, num_rows=num_tokens, shards=shards)
    x = take_rows("embed", token_ids, context, in_loop=num_tokens is not None)
    if spec.own_embed:
        return x
    return x if target_spec.embed_scale == 1 else x * jnp.asarray(target_spec.embed_scale, x.dtype)


def head_input(
    spec: HeadSpec,
    params: Params,
    token_embeddings: Float[Array, "tokens hidden"],
    state: Float[Array, "tokens hidden"],
    *,
    layout: WeightLayout = WeightLayout(),
    num_tokens: Int[Array, ""] | None = None,
    shards: Shards = WHOLE,
) -> HeadInput:
    """Input of the layer at index p.

    token_embeddings: of the tokens at p + 1, from `embed_for_head`.
    state:            the states at p, from `target_state` or, in later passes, `next_state`.
    """
    leaves = params | decoder.layer_vectors(params, 0)
    context = LayerContext(spec.layer, layout, leaves, num_rows=num_tokens, shards=shards)
    normed_state = normalise("hidden_norm", state, context)
    if spec.kind is HeadKind.EAGLE3:
        embedding = normalise("attn_norm", token_embeddings, context)
        residual = normed_state if spec.norm_before_residual else state
        return HeadInput(residual, jnp.concatenate([embedding, normed_state], axis=1))
    embedding = normalise("embedding_norm", token_embeddings, context)
    x = linear("fc", jnp.concatenate([embedding, normed_state], axis=1), context)
    is_first = spec.layer.norm_position in (NormPosition.PRE, NormPosition.SANDWICH)
    return HeadInput(x, normalise("attn_norm", x, context) if is_first else x)


def head_layer(
    spec: HeadSpec,
    params: Params,
    x: HeadInput,
    positions: Int[Array, " tokens"],
    pages: decoder.Pages,
    metadata: decoder.Metadata,
    attend: decoder.Attend,
    *,
    layout: WeightLayout = WeightLayout(),
    rope_lens: Int[Array, " tokens"] | None = None,
    real: Bool[Array, " tokens"] | None = None,
    num_tokens: Int[Array, ""] | None = None,
    gated_dot: str | None = None,
    shards: Shards = WHOLE,
) -> tuple[Float[Array, "tokens hidden"], decoder.Pages]:
    """Run the layer. Returns its output before the final norm, and the pages with the new KV.

    positions: index p of each row, which is also its position for rope. Published heads are trained with p or p + 1,
               which gives the same scores.
    pages, metadata, attend, and the other arguments: as for `decoder.decode`, of one layer.
    """
    rope = spec.layer.layer_rope(0)
    cos, sin = (None, None) if rope is None else rope_angles(spec.layer, rope, positions, rope_lens)
    leaves = params["layers"][0] | decoder.layer_vectors(params, 0)
    context = LayerContext(spec.layer, layout, leaves, cos, sin, real, num_tokens, gated_dot, shards)
    hidden, (pages,), _ = decoder.run_normed_layer(
        x.residual, x.normed, context, (pages,), (metadata,), spec.layer.mixers(0), attend
    )
    return hidden, pages


def next_state(
    spec: HeadSpec, params: Params, target_params: Params, hidden: Float[Array, "tokens hidden"], *,
    num_tokens: Int[Array, ""] | None = None,
) -> Float[Array, "tokens hidden"]:  # fmt: skip
    """State at p + 1 for the next pass, from the layer's output at p. `target_params` has a shared final norm."""
    if not spec.norm_output:
        return hidden
    leaves = params if spec.own_norm else target_params
    return normalise("final_norm", hidden, LayerContext(spec.layer, WeightLayout(), leaves, num_rows=num_tokens))


def head_logits(
    spec: HeadSpec,
    params: Params,
    hidden: Float[Array, "rows hidden"],
    target_params: Params,
    *,
    layout: WeightLayout = WeightLayout(),
    num_rows: Int[Array, ""] | None = None,
    shards: Shards = WHOLE,
) -> Float[Array, "rows num_logits"]:
    """float32 logits over the draft vocabulary, from the layer's output.

    target_params: has the output matrix and the final norm, if they are shared.
    layout:        of the matrix that is used: the head's own, or the target's.
    """
    norm = (params if spec.own_norm else target_params)["final_norm"]
    if spec.own_head:
        layer, leaves = dataclasses.replace(spec.layer, tie_embeddings=False), params | {"final_norm": norm}
    else:
        name = "embed" if spec.layer.tie_embeddings else "lm_head"
        layer, leaves = spec.layer, {"final_norm": norm, name: target_params[name]}
    return decoder.lm_head(layer, leaves, hidden, layout=layout, num_rows=num_rows, shards=shards)


def to_target_ids(params: Params, draft_ids: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Ids of the target for ids of the draft vocabulary. d2t holds the difference of the two, as in checkpoints."""
    return draft_ids + params["d2t"][draft_ids] if "d2t" in params else draft_ids
