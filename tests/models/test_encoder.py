"""Attention in both directions, and pooling, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models import encoder
from jpaged.models.decoder import Projection
from jpaged.models.spec import AttentionOptions, TextPooling

ROWS, LENGTH, HEADS, DIM = 3, 40, 2, 8
COUNTS = np.array([40, 17, 1], np.int32)


def oracle(q, k, v, count: int, window: int | None) -> np.ndarray:
    """float64[count, heads, dim] of one text."""
    scores = np.einsum("qhd,khd->hqk", q[:count], k[:count]) / DIM**0.5
    distance = np.abs(np.arange(count)[:, None] - np.arange(count))
    if window is not None:
        scores = np.where(distance <= window // 2, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v[:count])


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("block", [512, 16])  # queries at a time; 16 does not divide the length
def test_attention_in_both_directions(window, block, monkeypatch):
    monkeypatch.setattr(encoder, "QUERY_BLOCK", block)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((ROWS * LENGTH, HEADS, DIM)) for _ in range(3))
    projection = Projection(tuple(jnp.float32(each) for each in (q, k, v)), None, None, None, None, None, 1e-6)
    options = AttentionOptions(DIM**-0.5, window)
    out, _ = encoder.BidirectionalAttend(LENGTH)(projection, None, jnp.array(COUNTS), options, None)
    ours = np.asarray(out).reshape(ROWS, LENGTH, HEADS, DIM)
    for row, count in enumerate(COUNTS):
        one = slice(row * LENGTH, (row + 1) * LENGTH)
        assert np.abs(ours[row, :count] - oracle(q[one], k[one], v[one], count, window)).max() < 1e-5


@pytest.mark.parametrize("pooling", TextPooling)
def test_pooling(pooling):
    x = np.random.default_rng(0).standard_normal((ROWS, LENGTH, 16))
    made = np.asarray(encoder.pool_texts(pooling, jnp.float32(x), jnp.array(COUNTS)))
    for row, count in enumerate(COUNTS):
        states = x[row, :count]
        wanted = {"mean": states.mean(0), "cls": states[0], "lasttoken": states[-1]}[pooling.value]
        assert np.abs(made[row] - wanted).max() < 1e-6
