"""The sampler against plain numpy, one row at a time."""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.engine.step_plan import NOT_FINITE, NOTHING_ALLOWED, SamplerVariant
from jpaged.params.sampling import COLUMNS
from jpaged.runtime.sampling import draws, sampler, vocab_search
from jpaged.runtime.sampling.sampler import SamplerOptions
from jpaged.runtime.state import NUM_FIELDS, Field, row_values
from tests.sampling.sampling_oracle import distribution
from tests.support.row_inits import make_row

VOCAB = 1200  # not a multiple of the CDF's block


def fields(*rows):
    """Rows of the request table with the given sampling parameters."""
    neutral = {"temperature": 1.0, "logprobs": True}
    inits = [make_row(0, 0, 1, np.zeros(1, np.int32), **(neutral | row)) for row in rows]
    return jnp.asarray(np.stack([row_values(init) for init in inits]))


def test_every_column_has_one_meaning():
    assert sorted([*Field, *COLUMNS.values()]) == list(range(NUM_FIELDS))


OPTIONS = SamplerOptions(num_logprobs=5)
QUICK = {(0.0, SamplerVariant.GREEDY), (1.0, SamplerVariant.FULL)}


@functools.lru_cache
def compiled(variant, masked=False, options=OPTIONS):
    call = functools.partial(sampler.sample_tokens, variant=variant, options=options)
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


@pytest.mark.parametrize(
    ("temperature", "variant"),
    [
        pytest.param(temperature, variant, marks=[pytest.mark.slow] * ((temperature, variant) not in QUICK))
        for temperature, variant in itertools.product((0.0, 1.0), SamplerVariant)
    ],
)
def test_rows_without_finite_logits_get_no_token(variant, temperature):
    logits = np.array(random_logits(6, seed=3))
    logits[1, 17], logits[2, 3], logits[3], logits[4, 5] = np.nan, np.inf, -np.inf, -np.inf
    rows = [{"temperature": temperature, "seed": i} for i in range(6)]
    token_ids = np.asarray(draw(logits, rows, variant=variant).token_ids)
    assert token_ids[1:4].tolist() == [NOT_FINITE, NOT_FINITE, NOTHING_ALLOWED]
    assert (token_ids[[0, 4, 5]] >= 0).all()


def random_logits(rows, seed=0, scale=3.0):
    return np.random.default_rng(seed).standard_normal((rows, VOCAB)).astype(np.float32) * scale


@pytest.mark.slow
def test_greedy_is_argmax_in_every_variant_and_the_lowest_id_on_a_tie():
    logits = random_logits(8)
    logits[3, [7, 900]] = 99.0
    for variant in SamplerVariant:
        out = draw(logits, [{"temperature": 0.0}] * 8, variant=variant)
        np.testing.assert_array_equal(out.token_ids, logits.argmax(axis=1))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"temperature": 0.7}, marks=pytest.mark.slow),
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
def test_draws_follow_the_distribution(options):
    logits = random_logits(1)
    draws = 4096
    out = draw(np.repeat(logits, draws, axis=0), [options | {"seed": 11}] * draws)
    allowed, p = kept_ids(logits[0], **options)
    counts = np.bincount(np.asarray(out.token_ids), minlength=VOCAB)
    assert not counts[~allowed].any()
    # the share of every id that is expected more than 5 times is within 5 standard deviations
    often = p * draws > 5
    assert often.any()
    deviation = np.abs(counts - p * draws)[often] / np.sqrt(p * draws * (1 - p) + 1e-9)[often]
    assert deviation.max() < 5


@jax.jit
def drawn(logits, rows):
    limits = draws.Limits.of(logits, rows, jnp.ones(len(rows), bool), typical=True)
    return draws.draw_rows(logits, jnp.zeros(len(rows), jnp.int32), jnp.zeros(len(rows)), limits)


@jax.jit
def holds(kept, logits):
    return kept.holds(logits.less_peak())


def kept_by(x, *, temperature=1.0, **sampling):
    """Ids that the sampler keeps in each row of x, whose largest is 0. The same for any number of rows in a search."""
    found, zeros = [], np.zeros(len(x), np.float32)
    largest = jax.jit(vocab_search.block_maxima, static_argnums=1)(x, 64)
    logits = draws.Logits(
        jnp.asarray(x), jnp.asarray(zeros), jnp.asarray(zeros + np.float32(1 / temperature)), largest, fixed=False,
        part=1,
    )
    for part in (1, len(x)):
        kept = drawn(logits.replace(part=part), fields(*[sampling] * len(x)))[1]
        found.append(np.asarray(holds(kept, logits)) & np.isfinite(x))
    np.testing.assert_array_equal(*found)
    return found[0]


@pytest.mark.slow
def test_thresholds_keep_exactly_the_right_ids():
    """Ids equal to the k-th value stay. Bisection on bits finds the exact threshold."""
    x = np.full((1, VOCAB), -50.0, np.float32)
    x[0, 1] = 0
    x[0, [3, 5, 8, 13]] = [-1.0, -2.0, -2.0, np.nextafter(np.float32(-2.0), np.float32(-3.0))]
    np.testing.assert_array_equal(np.flatnonzero(kept_by(x, top_k=3)[0]), [1, 3, 5, 8])
    # flat distributions need a search beyond the candidates, steep ones do not
    x = np.concatenate([random_logits(3, scale=scale) for scale in (0.05, 0.5, 3)])
    x -= x.max(axis=1, keepdims=True)
    for k in (1, 2, 17, draws.CANDIDATES, draws.CANDIDATES + 1, 1199):
        expected = np.sort(x, axis=1)[:, -k, None]
        np.testing.assert_array_equal(kept_by(x, top_k=k), x >= expected)
    for options in (
        {"top_p": 0.1}, {"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 0.9, "top_k": 40}, {"top_p": 0.9, "top_k": 500},
        {"min_p": 0.02}, {"min_p": 0.3, "top_p": 0.7, "top_k": 300},
    ):  # fmt: skip
        expected = np.stack([kept_ids(row, **options)[0] for row in x])
        np.testing.assert_array_equal(kept_by(x, **options), expected, err_msg=str(options))


def test_ties_beyond_the_candidates_all_stay():
    x = np.full((1, VOCAB), -3.0, np.float32)
    x[0, :100] = 0
    assert kept_by(x, top_k=120).all()
    assert kept_by(x, top_k=100)[0].sum() == 100
    assert kept_by(x, top_p=0.99).all()


@pytest.mark.parametrize("sampling", [{"top_n_sigma": 0.7}, {"top_n_sigma": 2.0}, {"top_n_sigma": 1.5, "top_k": 30}])
def test_top_n_sigma_keeps_what_the_oracle_keeps(sampling):
    """Deviations are of the allowed ids. A row of equal logits keeps all."""
    x = np.random.default_rng(3).normal(size=(4, VOCAB)).astype(np.float32)
    x[1, ::2], x[2] = -np.inf, 0
    x -= x.max(axis=1, keepdims=True)
    for row, kept in zip(x, kept_by(x, **sampling), strict=True):
        assert distribution(row, params=types.SimpleNamespace(**sampling)).accepts(kept)
    assert kept_by(x, top_n_sigma=0.7).sum() < kept_by(x, top_n_sigma=2.0).sum()
    assert kept_by(x, top_n_sigma=0.7)[2].all()
    assert (kept_by(x, top_n_sigma=0.7, temperature=1e25) == kept_by(x, top_n_sigma=0.7)).all()


@pytest.mark.parametrize("typical_p", [0.2, 0.9])
@pytest.mark.parametrize("others", [{}, {"top_k": 30}, {"top_k": 700}], ids=str)
def test_typical_p_keeps_ids_nearest_to_the_entropy(typical_p, others):
    """Meister et al. 2022: ids sorted by the distance of surprise from entropy, up to the wanted mass."""
    x = np.concatenate([random_logits(3, scale=scale) for scale in (0.05, 0.5, 3)])
    x -= x.max(axis=1, keepdims=True)
    for row, kept in zip(x, kept_by(x, typical_p=typical_p, **others), strict=True):
        before, p = kept_ids(row, **others)
        surprise = np.where(before, -np.log(np.where(before, p, 1)), np.inf)
        distance = np.abs(surprise - (p * np.where(before, surprise, 0)).sum())
        order = np.argsort(distance, kind="stable")
        count = int(np.searchsorted(np.cumsum(p[order]), typical_p)) + 1
        expected = np.zeros(VOCAB, bool)
        expected[order[:count]] = True
        differ = np.flatnonzero(expected != kept)
        assert len(differ) <= 1  # only the id at the edge, where float32 sums differ
        assert all(abs(np.cumsum(p[order])[count - 1] - typical_p) < 1e-5 + p[i] for i in differ)


@pytest.mark.slow
def test_a_search_for_another_row_changes_nothing():
    """A flat row needs a search over the whole vocabulary. A steep row in the same batch draws the same token."""
    steep, flat = random_logits(8, 1), random_logits(8, 2, scale=0.01)
    rows = [{"seed": i, "top_p": 0.9, "temperature": 0.8} for i in range(8)]
    alone = draw(steep, rows, variant=SamplerVariant.RANDOM).token_ids
    both = draw(np.concatenate([steep, flat]), rows + rows, np.tile(np.arange(8), 2), SamplerVariant.RANDOM).token_ids
    np.testing.assert_array_equal(alone, both[:8])


@pytest.mark.parametrize(
    ("platform", "vocab"),
    [("default", 64 * 512), pytest.param("tpu", 64 * 512, marks=pytest.mark.slow), ("tpu", 128 * 131)],
)
def test_likeliest_agrees_with_a_sort(platform, vocab, monkeypatch):
    """tpu: the form for TPU, with blocks of 512 and 64, then of 128 and 64."""
    choose = lambda *args, **forms: forms.get(platform, forms["default"])(*args)  # noqa: E731
    monkeypatch.setattr(jax.lax, "platform_dependent", choose)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 50, (16, vocab)).astype(np.float32)  # ties everywhere
    x[1] = -np.inf
    x[1, 77] = 3
    for count in (1, 20, 100):
        likeliest = functools.partial(vocab_search.likeliest, count=count)  # JAX traces every new function
        values, ids = jax.jit(likeliest)(jnp.asarray(x))
        order = np.argsort(-x, axis=1, kind="stable")[:, :count]
        np.testing.assert_array_equal(values, np.take_along_axis(x, order, 1))
        np.testing.assert_array_equal(ids, order)
    largest, ids = jax.jit(lambda x: vocab_search.argmax(x))(jnp.asarray(x))
    np.testing.assert_array_equal(ids, x.argmax(axis=1))
    np.testing.assert_array_equal(largest, x.max(axis=1))
    x[9, -1], x[11, 64] = np.nan, -np.nan
    for block in (vocab_search.BLOCK, vocab_search.CANDIDATE_BLOCK):
        _, is_nan = jax.jit(lambda x, block=block: vocab_search.block_maxima_and_nan(x, x, block))(jnp.asarray(x))
        np.testing.assert_array_equal(np.nonzero(is_nan)[0], [9, 11])


@pytest.mark.parametrize("search", [vocab_search.bound_by_halves, vocab_search.bound_by_sixteenths])
def test_searches_over_all_values_agree_with_a_sort(search):
    """For the whole range of float32, with infinities and ties. Weights are whole numbers, so the sums are exact."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 0x7F800001, (64, 500), np.int32)
    bits[:2], bits[2:4], bits[4, ::2], bits[5, :400], bits[6] = 0, 0x7F800000, 7, 0x7F800000, bits[6, 0]
    x = bits.view(np.float32)
    weights = rng.integers(0, 4, x.shape).astype(np.float32)
    order = np.argsort(x, axis=1)
    sums = np.cumsum(np.take_along_axis(weights, order, 1), axis=1)
    for share in (0.0, 0.01, 0.5, 1.0, 1.01):
        wanted = np.floor(share * sums[:, -1]) if share < 1 else share * sums[:, -1]
        count = np.sum(sums < wanted[:, None], axis=1)
        values = np.take_along_axis(x, np.take_along_axis(order, np.minimum(count, 499)[:, None], 1), 1)[:, 0]
        expected = np.where(wanted == 0, 0, np.where(count < 500, values, np.inf))
        np.testing.assert_array_equal(jax.jit(search)(x, weights, wanted), expected)
    ones = np.ones(x.shape, np.int32)
    np.testing.assert_array_equal(jax.jit(search)(x, ones, np.full(64, 123, np.int32)), np.sort(x, axis=1)[:, 122])


@pytest.mark.slow
def test_a_draw_depends_only_on_seed_sample_index_and_position():
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


@pytest.mark.slow
def test_masked_ids_are_never_sampled_and_logprobs_are_the_models():
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


def test_the_only_possible_id_is_drawn_even_at_the_end():
    """Rounding in the two-level inversion must not select an id without weight."""
    logits = np.full((8, VOCAB), -np.inf, np.float32)
    logits[:, VOCAB - 1] = 0.0
    out = draw(logits, [{"seed": i} for i in range(8)], variant=SamplerVariant.RANDOM)
    np.testing.assert_array_equal(out.token_ids, VOCAB - 1)
