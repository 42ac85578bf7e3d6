"""Measures the KL divergence between two models' predictions of a text, token by token.

Both models' weights are in memory. Log-probabilities of the whole vocabulary exist for ROWS tokens at a time. Attention
is dense. With an 8-bit KV type, it reads keys and values that are rounded as in the pages.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from jpaged.errors import RequestError
from jpaged.kv_groups import KVGroups, group_layers
from jpaged.loading import LoadedModel
from jpaged.models.decoder import Projection, decode, dense_causal_attend, lm_head
from jpaged.models.spec import AttentionOptions, DecoderSpec, Params, WeightLayout
from jpaged.runtime.kv_format import KVFormat
from pallas_kernels import KVPages

ROWS = 128  # tokens whose logits exist at once: 78 MB per model with a vocabulary of 151,936


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Distance of a model's predictions from another model's, over the tokens of a text."""

    per_token: np.ndarray  # float64[tokens]: KL(other || model) in nats
    same_top: np.ndarray   # bool[tokens]: both models' most probable tokens are equal

    @property
    def mean(self) -> float:
        """Mean KL divergence of a token."""
        return float(self.per_token.mean())

    @property
    def p99(self) -> float:
        """99th percentile of the tokens' KL divergences."""
        return float(np.percentile(self.per_token, 99))

    @property
    def top1_agreement(self) -> float:
        """Share of tokens for which both models' most probable tokens are equal."""
        return float(self.same_top.mean())


def divergence(
    model: LoadedModel, other: LoadedModel, windows: Sequence[Sequence[int]], kv_cache_dtype: str = "auto"
) -> Divergence:
    """Compare the predictions of every token of the windows except each window's first.

    windows: independent token sequences. All ids are below both models' vocabulary size.
    kv_cache_dtype: KV type of `model`, as in `EngineConfig`. The other model's keys and values keep its dtype.
    Raises RequestError if the models' vocabularies have different sizes.
    """
    if model.spec.vocab_size != other.spec.vocab_size:
        sizes = f"{other.spec.vocab_size:,} tokens, and {model.source} has {model.spec.vocab_size:,}"
        raise RequestError("against", other.source, f"has a vocabulary of {sizes}: name a model with the same one")
    length = -(-max(map(len, windows)) // ROWS) * ROWS  # one length for all windows, so each model is compiled once
    rounded = None
    if kv_cache_dtype != "auto":
        kv_format = KVFormat.choose(model.spec, kv_cache_dtype, model.dtype, jax.devices()[0], model.kv_scales)
        kv_groups = group_layers(model.spec.windows, length, model.spec.attends, model.spec.recurrent)
        rounded = kv_groups, tuple(kv_format.create_pages(model.spec, kv_groups, length, 1, None))
    kls, same = [], []
    total = sum(len(window) - 1 for window in windows)
    with tqdm(total=total, unit="token", desc="comparing", delay=2, disable=None) as progress:
        for window in windows:
            ids = np.zeros(length, np.int32)  # tokens cannot attend to the padding after them
            ids[: len(window)] = window
            hidden = [
                _hidden_states(one.spec, one.params, ids, one.layout, *(kv or ()))
                for one, kv in ((model, rounded), (other, None))
            ]
            for start in range(0, len(window) - 1, ROWS):
                rows = [states[start : start + ROWS] for states in hidden]
                count = min(ROWS, len(window) - 1 - start)
                kl, equal = _compare(
                    (model.spec, other.spec), (model.params, other.params), rows, (model.layout, other.layout)
                )
                kls.append(np.asarray(kl[:count], np.float64))
                same.append(np.asarray(equal[:count]))
                progress.update(count)
    # A sum of rounded terms can be slightly below 0, which a divergence never is
    return Divergence(np.maximum(np.concatenate(kls), 0), np.concatenate(same))


@functools.partial(jax.jit, static_argnames=("spec", "layout", "kv_groups"))
def _hidden_states(
    spec: DecoderSpec,
    params: Params,
    ids: Int[Array, " tokens"],
    layout: WeightLayout,
    kv_groups: KVGroups | None = None,
    pages: tuple[KVPages, ...] | None = None,
) -> Float[Array, "tokens hidden"]:
    """Hidden states of one sequence. pages: page arrays with one block for all tokens; None: KV is not rounded."""
    positions = jnp.arange(len(ids))
    if kv_groups is None or pages is None:
        attend, places, held, metadata = dense_causal_attend, None, [None] * spec.num_layers, ids[None]
    else:
        attend, places, held = _attend_rounded, kv_groups.places, (*pages, *[None] * sum(spec.recurrent))
        metadata = (ids[None],) * (len(kv_groups.windows) + 1)  # the last one for recurrent layers
    hidden, *_ = decode(
        spec, params, ids, positions, held, metadata, attend, layout=layout, rope_lens=positions + 1, places=places
    )
    return hidden


def _attend_rounded(
    projection: Projection, pages: KVPages, metadata: Int[Array, "batch length"], options: AttentionOptions,
    sinks: Float[Array, " heads"] | None,
) -> tuple[Float[Array, "tokens heads head_dim"], KVPages]:  # fmt: skip
    """Run `dense_causal_attend` on one sequence, with keys and values read back from one block."""
    q, k, v = projection.finish()
    pages = pages.scatter(k, v, jnp.arange(len(k)))
    k, v = (heads[0].swapaxes(0, 1) for heads in pages.gather(jnp.zeros((1, 1), jnp.int32), q.dtype))
    finished = Projection((q, k, v), None, None, None, None, None, projection.norm_eps)
    return dense_causal_attend(finished, None, metadata, options, sinks)[0], pages


@functools.partial(jax.jit, static_argnames=("specs", "layouts"))
def _compare(
    specs: tuple[DecoderSpec, DecoderSpec],
    params: tuple[Params, Params],
    hidden: Sequence[Float[Array, "rows hidden"]],
    layouts: tuple[WeightLayout, WeightLayout],
) -> tuple[Float[Array, " rows"], Array]:
    """KL(second || first) of each row, and whether the most probable tokens are equal."""
    first, second = (
        jax.nn.log_softmax(lm_head(spec, tree, states, layout=layout))
        for spec, tree, states, layout in zip(specs, params, hidden, layouts, strict=True)
    )
    # sum p (log p - log q) loses small divergences to rounding: its terms have both signs and cancel. With d = log q -
    # log p, the terms q - p - p d = p (exp(d) - 1 - d) have the same sum, as p and q both sum to 1, and no sign.
    p, d = jnp.exp(second), first - second
    small = p * d**2 * (0.5 + d / 6)
    terms = jnp.where(jnp.abs(d) < 0.01, small, jnp.exp(first) - p * (1 + d))
    return terms.sum(-1), first.argmax(-1) == second.argmax(-1)
