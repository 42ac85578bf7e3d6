"""Runs calibration text through a model, one layer at a time, and sums x x^T over the inputs of each matrix."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jpaged.models.decoder import decode_layer, embed_tokens, layer_vectors
from jpaged.models.spec import DecoderSpec, Mixer, Params, QueryScaling, Rope

WINDOW = 512          # tokens per sequence
MOST_TOKENS = 32_768  # more tokens are dropped; the states of 32,768 take 0.5 GiB with hidden size 4,096
FEWEST_TOKENS = 2_048
_BATCH = 4            # sequences that a layer processes at once


class Calibration:
    """Hidden states of the calibration text before the next layer, float32 in host memory."""

    def __init__(self, spec: DecoderSpec, params: Params, token_ids: Sequence[int]):
        """Embed the tokens. token_ids: at least FEWEST_TOKENS ids. Tokens after the last full window are dropped.

        params: float32 leaves of the embedding, and the vectors of all layers.
        """
        self._spec = spec
        self._vectors = params
        length = min(WINDOW, spec.max_position)
        ids = np.asarray(token_ids[:MOST_TOKENS], np.int32)
        ids = ids[: len(ids) // length * length].reshape(-1, length)
        positions = jnp.arange(length)
        self._states = np.stack([np.asarray(embed_tokens(spec, params, row, positions)) for row in jnp.asarray(ids)])

    @property
    def num_tokens(self) -> int:
        """Number of tokens used."""
        return self._states.shape[0] * self._states.shape[1]

    def vectors(self, layer: int) -> dict[str, np.ndarray]:
        """Copies of a layer's vectors, float32."""
        return {name: np.array(value) for name, value in layer_vectors(self._vectors, layer).items()}

    def input_grams(self, layer: int, leaves: Params) -> dict[str, np.ndarray]:
        """Sum of x x^T over the inputs x of each matrix of the layer: float64[in, in] by name.

        leaves: the layer's matrices, and vectors that differ from the model's.
        """
        sums: dict[str, Any] = {}
        for start in range(0, len(self._states), _BATCH):
            found = self._run(layer, leaves, self._states[start : start + _BATCH], watched=True)[1]
            for name, value in found.items():
                sums[name] = sums.get(name, 0) + np.asarray(value, np.float64)
        return sums

    def advance(self, layer: int, leaves: Params) -> None:
        """Replace the states by the layer's outputs. leaves: as in `input_grams`."""
        for start in range(0, len(self._states), _BATCH):
            rows = slice(start, start + _BATCH)
            self._states[rows] = self._run(layer, leaves, self._states[rows], watched=False)[0]

    def _run(self, layer: int, leaves: Params, states: np.ndarray, *, watched: bool) -> tuple[Any, dict[str, Any]]:
        leaves = layer_vectors(self._vectors, layer) | leaves
        spec = self._spec
        growth = spec.query_scaling if spec.query_scaling is not None and spec.query_scaling.applies(layer) else None
        rope, mixers = spec.layer_rope(layer), spec.mixers(layer)
        return _run(spec.of_layer(layer), leaves, states, mixers, rope, growth, watched)


@functools.partial(jax.jit, static_argnames=("spec", "mixers", "rope", "growth", "watched"))
def _run(
    spec: DecoderSpec,
    leaves: Params,
    states: Float[Array, "batch length hidden"],
    mixers: tuple[Mixer, ...],
    rope: Rope | None,
    growth: QueryScaling | None,
    watched: bool,
) -> tuple[Float[Array, "batch length hidden"], dict[str, Float[Array, "in in"]]]:
    products: dict[str, Array] = {}

    def watch(name: str, x: Array) -> None:
        products[name] = lax.dot_general(x, x, (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)

    used = watch if watched else None
    out = decode_layer(spec, leaves, states, mixers=mixers, rope=rope, growth=growth, watch=used)
    return out, products
