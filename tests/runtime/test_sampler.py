"""The sampler against plain numpy, one row at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.engine.step_plan import RowInit, SamplerVariant
from jpaged.runtime import sampler
from jpaged.runtime.state import row_values

VOCAB = 1200  # not a multiple of the CDF's block


def fields(*rows):
    """Request-table rows with the given sampling parameters."""
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0, "sample_index": 0}
    inits = [RowInit(0, 0, 1, np.zeros(1, np.int32), **(neutral | row)) for row in rows]
    return jnp.asarray(np.stack([row_values(init) for init in inits]))


@functools.lru_cache
def compiled(variant, masked=False):
    call = functools.partial(sampler.sample, variant=variant, num_logprobs=5)
    return jax.jit(call) if masked else jax.jit(functools.partial(call, allowed=None))


def draw(logits, rows, positions=None, variant=SamplerVariant.FULL):
    positions = np.arange(len(rows)) if positions is None else positions
    return compiled(variant)(jnp.asarray(logits, jnp.float32), fields(*rows), jnp.asarray(positions, jnp.int32))


def kept_ids(logits, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """The ids that may be sampled and their probabilities, in float64: temperature, min_p, top_k, top_p in turn."""
    x = np.asarray(logits, np.float64) / temperature
    keep = x >= x.max() + np.log(min_p) if min_p else np.ones(len(x), bool)
    if top_k:
        keep &= x >= np.sort(np.where(keep, x, -np.inf))[-min(top_k, len(x))]
    p = np.where(keep, np.exp(x - x.max()), 0)
    p /= p.sum()
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        count = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
        keep &= p >= p[order[count - 1]]
        p = np.where(keep, p, 0)
        p /= p.sum()
    return keep & (p > 0), p


def random_logits(rows, seed=0, scale=3.0):
    return np.random.default_rng(seed).standard_normal((rows, VOCAB)).astype(np.float32) * scale


def test_greedy_is_argmax_in_every_variant_and_ties_go_to_the_lowest_id():
    logits = random_logits(8)
    logits[3, [7, 900]] = 99.0
    for variant in SamplerVariant:
        out = draw(logits, [{"temperature": 0.0}] * 8, variant=variant)
        np.testing.assert_array_equal(out.token_ids, logits.argmax(axis=1))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": VOCAB},
        {"top_p": 0.3},
        {"top_p": 1e-6},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=str,
)
def test_draws_follow_the_distribution_and_stay_inside_it(options):
    logits = random_logits(1)
    draws = 4096
    out = draw(np.repeat(logits, draws, axis=0), [options | {"seed": 11}] * draws)
    allowed, p = kept_ids(logits[0], **options)
    counts = np.bincount(np.asarray(out.token_ids), minlength=VOCAB)
    assert not counts[~allowed].any()
    # every id's share within 5 standard deviations, for those that are expected often enough
    often = p * draws > 5
    assert often.any()
    deviation = np.abs(counts - p * draws)[often] / np.sqrt(p * draws * (1 - p) + 1e-9)[often]
    assert deviation.max() < 5


def test_thresholds_keep_exactly_the_right_ids():
    """Ties of the k-th value stay; bisection on bits finds the threshold itself, not one near it."""
    x = np.full((1, VOCAB), -50.0, np.float32)
    x[0, [3, 5, 8, 13]] = [-1.0, -2.0, -2.0, np.nextafter(np.float32(-2.0), np.float32(-3.0))]
    kept = np.flatnonzero(np.isfinite(sampler._keep_top_k(jnp.asarray(x), jnp.asarray([2]))[0]))
    np.testing.assert_array_equal(kept, [3, 5, 8])
    for seed in range(5):
        x = random_logits(1, seed)
        x -= x.max()
        for k in (1, 2, 17, 1199):
            expected = np.sort(x[0])[-k]
            kept = np.asarray(sampler._keep_top_k(jnp.asarray(x), jnp.asarray([k])))[0]
            np.testing.assert_array_equal(np.isfinite(kept), x[0] >= expected)
        for top_p in (0.1, 0.5, 0.95):
            kept = np.asarray(sampler._keep_top_p(jnp.asarray(x), jnp.asarray([top_p], jnp.float32)))[0]
            np.testing.assert_array_equal(np.isfinite(kept), kept_ids(x[0], top_p=top_p)[0])


def test_a_draw_depends_on_seed_sample_and_position_and_on_nobody_else():
    logits = random_logits(8)
    rows = [{"seed": i, "top_p": 0.9} for i in range(8)]
    together = np.asarray(draw(logits, rows).token_ids)
    again = np.asarray(draw(logits[::-1], rows[::-1], np.arange(8)[::-1]).token_ids)[::-1]
    np.testing.assert_array_equal(together, again)
    flat = np.zeros((64, VOCAB), np.float32)
    same = {"seed": 2**63 + 5}
    first = np.asarray(draw(flat, [same] * 64, np.arange(64)).token_ids)
    assert len(set(first)) > 50  # positions differ
    np.testing.assert_array_equal(first, draw(flat, [same] * 64, np.arange(64)).token_ids)
    for other in ({"seed": 5}, {"seed": 2**63 + 6}, same | {"sample_index": 1}):  # both halves of the seed count
        assert (first != np.asarray(draw(flat, [other] * 64, np.arange(64)).token_ids)).mean() > 0.9


def test_masked_ids_are_never_sampled_and_logprobs_are_of_the_model():
    logits = random_logits(8)
    allowed = np.ones(VOCAB, bool)
    allowed[logits.argmax(axis=1)] = False
    for temperature in (0.0, 5.0):
        out = compiled(SamplerVariant.FULL, masked=True)(
            jnp.asarray(logits), fields(*[{"temperature": temperature}] * 8), jnp.arange(8), jnp.asarray(allowed)
        )
        assert allowed[np.asarray(out.token_ids)].all()
        exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(out.logprobs, exact[np.arange(8), np.asarray(out.token_ids)], atol=1e-5)
        order = np.argsort(-exact, axis=1)
        np.testing.assert_array_equal(out.top_ids, order[:, :5])
        np.testing.assert_allclose(out.top_logprobs, np.take_along_axis(exact, order[:, :5], 1), atol=1e-5)
        ranks = 1 + (exact > np.take_along_axis(exact, np.asarray(out.token_ids)[:, None], 1)).sum(axis=1)
        np.testing.assert_array_equal(out.ranks, ranks)


def test_tiny_temperatures_do_not_overflow():
    logits = random_logits(8)
    for temperature in (1e-38, 1e-6, 2e-5):
        out = draw(logits, [{"temperature": temperature}] * 8)
        np.testing.assert_array_equal(out.token_ids, logits.argmax(axis=1))


def test_a_lonely_weight_at_the_end_is_found():
    """Rounding in the two-level inversion must not land on an id without weight."""
    logits = np.full((8, VOCAB), -np.inf, np.float32)
    logits[:, VOCAB - 1] = 0.0
    out = draw(logits, [{"seed": i} for i in range(8)], variant=SamplerVariant.RANDOM)
    np.testing.assert_array_equal(out.token_ids, VOCAB - 1)
