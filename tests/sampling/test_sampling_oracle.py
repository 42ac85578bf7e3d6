"""The sampling oracle compared with Transformers' processors, and with cases worked out by hand."""

import itertools
import math
import types
from typing import Any

import numpy as np
import pytest

from jpaged import SamplingParams
from tests.golden.sampling import VOCAB, SamplingCase, cases
from tests.sampling.sampling_oracle import MODES, NEUTRAL, Oracle, chi_square, distribution, logprobs, rank, softmax
from tests.support.covering import all_pairs


def ask(logits: Any, *, processors: Any = (), **given: Any) -> Oracle:
    """The oracle's result for these logits. Arguments that it does not have are sampling parameters."""
    own = ("prompt_ids", "output_ids", "stop_ids", "bad_word_ids", "known_ids", "grammar_ids")
    context = {name: given.pop(name) for name in own if name in given}
    return distribution(np.array(logits), params=types.SimpleNamespace(**given), processors=processors, **context)


def of(*probs: float, **given: Any) -> Oracle:
    """The oracle's result for logits with these probabilities."""
    return ask(np.log(probs), **given)


def kept(row: Oracle) -> list[int]:
    return np.flatnonzero(row.kept).tolist()


def edge(row: Oracle) -> list[int]:
    return np.flatnonzero(row.edge).tolist()


@pytest.mark.parametrize("case", cases(), ids=str)
def test_agrees_with_transformers(case: SamplingCase):
    row = distribution(
        case.logits, params=types.SimpleNamespace(**case.params), prompt_ids=case.prompt_ids,
        output_ids=case.output_ids, stop_ids=case.stop_ids, bad_word_ids=case.bad_word_ids,
    )  # fmt: skip
    scores = np.array([-np.inf if score is None else score for score in case.scores])
    assert kept(row) == np.flatnonzero(scores > -np.inf).tolist()
    np.testing.assert_allclose(row.processed_logits, scores, atol=1e-11)
    np.testing.assert_allclose(row.probs, softmax(scores), atol=1e-12)


def test_every_parameter_of_transformers_is_recorded_alone_and_with_others():
    recorded = [{*case.params, *(["bad_words"] if case.bad_word_ids else [])} for case in cases()]
    for name in {*NEUTRAL, "bad_words"} - {"frequency_penalty", "presence_penalty", "top_n_sigma"}:
        assert {name} in recorded, name
        assert any(name in names and len(names) > 1 for names in recorded), name


def test_defaults_are_neutral():
    logits = np.random.default_rng(0).normal(size=VOCAB)
    for params in (SamplingParams(), types.SimpleNamespace(**NEUTRAL), object()):
        row = distribution(logits, params=params, prompt_ids=[1], output_ids=[2, 2])
        np.testing.assert_array_equal(row.processed_logits, logits)
        np.testing.assert_allclose(row.probs, np.exp(logits) / np.exp(logits).sum())
        assert row.kept.all()
        assert not row.edge.any()
    for name, field in SamplingParams.__dataclass_fields__.items():
        assert name not in NEUTRAL or field.default == NEUTRAL[name], name


# Before the temperature


def test_penalties_by_hand():
    """Token 0 occurs nowhere, 1 in the prompt, 2 once and 3 twice in the output, 4 in both. For x > 0 and x < 0."""
    context = {"prompt_ids": [1, 4, 4], "output_ids": [3, 2, 3, 4]}
    for sign, repeated in ((1, 2.0), (-1, 8.0)):
        x = np.full(5, 4.0 * sign)
        none, r = 4.0 * sign, repeated * sign
        got = ask(x, repetition_penalty=2.0, **context)
        assert got.processed_logits.tolist() == [none, r, r, r, r]
        got = ask(x, frequency_penalty=0.5, **context)
        assert got.processed_logits.tolist() == [none, none, none - 0.5, none - 1, none - 0.5]
        got = ask(x, presence_penalty=0.75, **context)
        assert got.processed_logits.tolist() == [none, none, none - 0.75, none - 0.75, none - 0.75]
        got = ask(x, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=-0.75, temperature=0.5, **context)
        assert got.processed_logits.tolist() == [2 * none, 2 * r, 2 * (r + 0.25), 2 * (r - 0.25), 2 * (r + 0.25)]
    assert ask([0.0, 1.0], repetition_penalty=3.0, prompt_ids=[0]).processed_logits.tolist() == [0.0, 1.0]


def test_bias_then_processors_then_penalties():
    """(-1 + 5) / 2, not -1 * 2 + 5. A processor receives the biased logit."""
    assert ask([-1.0, 0.0], logit_bias={0: 5.0}, repetition_penalty=2.0, prompt_ids=[0]).processed_logits[0] == 2.0
    row = ask([-1.0, 0.0], logit_bias={0: 5.0}, repetition_penalty=2.0, prompt_ids=[0],
              processors=[lambda x: np.where(x > 3, -x, x), lambda x: x + 1])  # fmt: skip
    assert row.processed_logits.tolist() == [-6.0, 1.0]


@pytest.mark.parametrize(
    ("output", "word", "forbids"),
    [
        ([], [3], True),
        ([1], [3], True),
        ([], [1, 3], False),
        ([1], [1, 3], True),
        ([1, 2], [1, 3], False),
        ([2, 1], [1, 3], True),
        ([1], [2, 1, 3], False),  # 2 is in the prompt, which does not count
        ([2, 1], [2, 1, 3], True),
        ([0, 2, 1], [2, 1, 3], True),
    ],
)
def test_bad_words(output: list[int], word: list[int], forbids: bool):
    row = ask(np.zeros(4), prompt_ids=[1, 2], output_ids=output, bad_word_ids=[word])
    assert kept(row) == ([0, 1, 2] if forbids else [0, 1, 2, 3])


def test_no_bias_unmasks_an_id():
    known, grammar = np.arange(6) != 0, np.arange(6) != 1
    given = {"known_ids": known, "grammar_ids": grammar, "allowed_token_ids": [0, 1, 2, 3, 4], "bad_word_ids": [[2]]}
    assert kept(ask(np.zeros(6), **given)) == [3, 4]
    row = ask(np.zeros(6), **given, logit_bias=dict.fromkeys(range(6), 100.0), frequency_penalty=-2.0,
              repetition_penalty=0.1, output_ids=list(range(6)))  # fmt: skip
    assert kept(row) == [3, 4]
    assert kept(ask(np.zeros(6), **given, min_tokens=2, stop_ids=[3, 5], output_ids=[0])) == [4]
    assert kept(ask(np.zeros(6), **given, min_tokens=2, stop_ids=[3, 5], output_ids=[0, 0])) == [3, 4]
    with pytest.raises(ValueError, match="all ids are masked"):
        ask(np.zeros(6), **given, min_tokens=1, stop_ids=[3, 4])


# Greedy


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_is_the_most_likely_after_penalties(temperature: float):
    logits = [1.0, 5.0, 4.0, 4.0]
    row = ask(logits, temperature=temperature, frequency_penalty=2.0, output_ids=[1], top_k=1, top_p=0.1, min_p=1.0,
              typical_p=0.1)  # fmt: skip
    assert row.greedy == 2  # the lower id on a tie
    assert row.probs.tolist() == [0, 0, 1, 0]
    assert kept(row) == [2]
    assert edge(row) == []
    assert row.processed_logits.tolist() == [1.0, 3.0, 4.0, 4.0]  # no temperature, no filter
    np.testing.assert_allclose(logprobs("processed_logprobs", row), np.log(softmax(row.processed_logits)))


def test_greedy_within_rounding():
    row = ask([1.0, 8.0, 8.0 + 1e-7], temperature=0.0)
    assert row.greedy == 2
    assert edge(row) == [1, 2]
    assert row.accepts(np.array([False, True, False]))
    assert not row.accepts(np.array([True, False, False]))
    assert row.probs_of(np.array([False, True, False])).tolist() == [0, 1, 0]


def test_lowest_temperature_that_is_not_greedy():
    assert kept(ask([1.0, 2.0], temperature=1e-5)) == [0, 1]


# Filters


def test_min_p():
    assert kept(of(0.5, 0.3, 0.15, 0.05, min_p=0.29)) == [0, 1, 2]
    assert kept(of(0.5, 0.3, 0.15, 0.05, min_p=0.31)) == [0, 1]
    np.testing.assert_allclose(of(0.5, 0.3, 0.15, 0.05, min_p=0.31).probs, [0.625, 0.375, 0, 0])
    assert kept(of(0.4, 0.2, 0.4, min_p=1.0)) == [0, 2]
    # After the temperature: at 2 the ratio 0.3 of the probabilities is 0.55.
    assert kept(of(0.5, 0.15, 0.35, min_p=0.5, temperature=2.0)) == [0, 1, 2]


def test_top_k_keeps_ids_equal_to_the_last():
    assert kept(ask([3.0, 1.0, 2.0, 2.0, 0.0], top_k=2)) == [0, 2, 3]
    assert edge(ask([3.0, 1.0, 2.0, 2.0, 0.0], top_k=2)) == []
    for top_k in (0, -1, 5, 99):
        assert ask([3.0, 1.0, 2.0, 2.0, 0.0], top_k=top_k).kept.all()
    assert kept(ask([3.0, 1.0, 2.0], top_k=2, allowed_token_ids=[1])) == [1]


def test_top_p():
    for top_p, want in ((1e-9, [1]), (0.49, [1]), (0.51, [1, 2]), (0.79, [1, 2]), (0.81, [0, 1, 2]), (1.0, [0, 1, 2])):
        assert kept(of(0.2, 0.5, 0.3, top_p=top_p)) == want
    np.testing.assert_allclose(of(0.2, 0.5, 0.3, top_p=0.6).probs, [0, 0.625, 0.375])
    assert kept(ask(np.zeros(4), top_p=0.5)) == [0, 1, 2, 3]  # on a tie all stay
    assert kept(of(0.4, 0.2, 0.2, 0.1, 0.1, top_p=0.55)) == [0, 1, 2]


def test_typical_p_prefers_ids_nearest_to_the_entropy():
    """The entropy is 1.471; of 0.4, 0.2 and 0.1 the surprise is 0.916, 1.609 and 2.303."""
    probs = (0.4, 0.2, 0.2, 0.1, 0.1)
    assert kept(of(*probs, typical_p=0.1)) == [1, 2]
    assert kept(of(*probs, typical_p=0.39)) == [1, 2]
    assert kept(of(*probs, typical_p=0.41)) == [0, 1, 2]
    assert kept(of(*probs, typical_p=0.81)) == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(of(*probs, typical_p=0.3).probs, [0, 0.5, 0.5, 0, 0])


def test_filters_in_order():
    """Each filter takes its share of the mass that earlier filters kept: 0.8 / 0.95 > 0.83, but 0.8 / 1 < 0.83."""
    probs = (0.5, 0.3, 0.15, 0.05)
    assert kept(of(*probs, top_p=0.83)) == [0, 1, 2]
    assert kept(of(*probs, top_p=0.83, min_p=0.2)) == [0, 1]
    assert kept(of(*probs, top_p=0.83, top_k=3)) == [0, 1]
    # min_p is before top_p. In the other order, three tokens would have the mass of 0.9.
    assert kept(of(*probs, top_p=0.9, min_p=0.4)) == [0, 1]
    # typical_p is after top_p. Of (0.625, 0.375) it keeps the first, whose surprise is closer to the entropy of 0.66.
    assert kept(of(*probs, typical_p=0.2)) == [1]
    assert kept(of(*probs, typical_p=0.2, top_p=0.7)) == [0]


# Where float32 may differ


def test_edge_of_top_p():
    row = of(0.5, 0.3, 0.15, 0.05, top_p=0.8)
    assert edge(row) == [2]
    both = [np.array([True, True, False, False]), np.array([True, True, True, False])]
    assert all(row.accepts(way) for way in both)
    np.testing.assert_allclose(row.probs_of(both[0]), [0.625, 0.375, 0, 0])
    np.testing.assert_allclose(row.probs_of(both[1]), np.array([0.5, 0.3, 0.15, 0]) / 0.95)
    assert not row.accepts(np.array([True, True, True, True]))
    assert not row.accepts(np.array([True, False, True, False]))
    assert edge(of(0.5, 0.3, 0.15, 0.05, top_p=0.80001)) == []
    assert edge(of(0.5, 0.5 - 1e-9, 1e-9, top_p=0.3)) == [0, 1]  # either may come first
    assert edge(of(1 - 1e-9, 1e-9, top_p=1e-9)) == []  # the most likely id always stays


def test_edge_of_min_p_and_top_k():
    assert edge(of(0.5, 0.3, 0.15, 0.05, min_p=0.3)) == [2]
    assert edge(of(0.5, 0.3, 0.15, 0.05, min_p=0.30001)) == []
    assert edge(ask([3.0, 2.0, 2.0 - 1e-8], top_k=2)) == [1, 2]
    assert edge(ask([3.0, 2.0, 2.0 - 1e-8], top_k=1)) == []
    assert edge(ask([2.0, 2.0 - 1e-8], top_k=1)) == [0, 1]
    assert edge(ask([3.0, 2.0, 2.0 - 1e-8], top_k=2, logit_bias={2: 1e-4})) == []
    assert edge(ask([3.0, 2.0, 2.0 - 5e-7], top_k=2, temperature=0.01)) == [1, 2]
    assert edge(ask([3.0, 2.0, 2.0 - 5e-5], top_k=2, temperature=100.0)) == []
    assert edge(ask([3000.0, 2.0, 2.0 - 1e-5], top_k=2)) == [1, 2]  # one rounding of 3000 is 1e-4


def test_edge_of_typical_p():
    row = of(0.4, 0.2, 0.2, 0.1, 0.1, typical_p=0.8)
    assert edge(row) == [3, 4]
    assert edge(of(0.4, 0.2, 0.2, 0.1, 0.1, typical_p=0.79)) == []


def test_edge_is_carried_to_later_filters():
    """If top_k drops the token at its edge, top_p reaches its mass one token earlier."""
    logits = [*np.log([0.5, 0.3, 0.1]), math.log(0.1) - 1e-9]
    assert edge(ask(logits, top_k=3)) == [2, 3]
    assert kept(ask(logits, top_k=3, top_p=0.85)) == [0, 1]
    assert edge(ask(logits, top_k=3, top_p=0.85)) == [2, 3]
    assert edge(ask(logits, top_k=3, top_p=0.7)) == []


def test_a_probability_below_float32_is_at_the_edge():
    row = ask([0.0, -100.0, -1.0])
    assert kept(row) == [0, 1, 2]
    assert edge(row) == [1]


# Log-probabilities


def test_modes_of_log_probabilities():
    row = of(0.5, 0.3, 0.2, logit_bias={2: 1.0}, temperature=2.0, top_k=2)
    raw, processed = np.log([0.5, 0.3, 0.2]), np.array([math.log(0.5) / 2, -np.inf, (math.log(0.2) + 1) / 2])
    np.testing.assert_allclose(logprobs("raw_logits", row), raw)
    np.testing.assert_allclose(logprobs("raw_logprobs", row), raw)
    np.testing.assert_allclose(logprobs("processed_logits", row), processed)
    np.testing.assert_allclose(logprobs("processed_logprobs", row), processed - math.log(np.exp(processed).sum()))
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(logprobs("processed_logprobs", row), np.log(row.probs))
    shifted = ask(np.log([0.5, 0.3, 0.2]) + 7)
    np.testing.assert_allclose(logprobs("raw_logits", shifted), raw + 7)
    np.testing.assert_allclose(logprobs("raw_logprobs", shifted), raw)
    with pytest.raises(ValueError, match="no logprobs_mode 'raw'"):
        logprobs("raw", row)
    assert len(MODES) == 4


def test_ranks():
    values = np.array([1.0, 3.0, 2.0, 3.0])
    assert [rank(values, token) for token in range(4)] == [4, 2, 3, 2]


# Draws


@pytest.mark.parametrize(
    ("degrees", "statistic", "p_value"),
    [  # a table's critical values
        (1, 3.841, 0.05), (3, 7.815, 0.05), (5, 11.070, 0.05), (10, 18.307, 0.05), (10, 23.209, 0.01),
        (10, 29.588, 0.001), (30, 43.773, 0.05), (100, 124.342, 0.05), (100, 149.449, 0.001), (100, 77.929, 0.95),
    ],
)  # fmt: skip
def test_chi_square_has_the_p_of_the_tables(degrees: int, statistic: float, p_value: float):
    """Draws with the statistic of the table: equal counts, except for two ids that are off by the same number."""
    each = 10_000
    off = round(math.sqrt(statistic * each / 2))
    counts = np.full(degrees + 1, each)
    counts[0], counts[1] = each + off, each - off
    got = chi_square(np.repeat(np.arange(degrees + 1), counts), np.full(degrees + 1, 1 / (degrees + 1)))
    assert got.degrees == degrees
    assert got.statistic == pytest.approx(statistic, rel=0.02)
    assert got.p_value == pytest.approx(p_value, rel=0.15)


def test_chi_square_accepts_right_draws_and_rejects_wrong_ones():
    rng = np.random.default_rng(0)
    probs = softmax(rng.normal(size=1000) * 3)
    p_values = [chi_square(rng.choice(1000, 20_000, p=probs), probs).p_value for _ in range(200)]
    assert min(p_values) > 1e-4
    assert 0.35 < np.mean(p_values) < 0.65
    assert 0.01 < np.mean(np.array(p_values) < 0.1) < 0.2
    hotter = softmax(np.log(probs) / 1.1)
    assert chi_square(rng.choice(1000, 20_000, p=hotter), probs).p_value < 1e-6


def test_chi_square_of_ids_with_probability_0():
    probs = np.array([0.5, 0.5, 0.0])
    assert chi_square(np.array([0, 1] * 50), probs).p_value == pytest.approx(1, abs=0.05)
    assert chi_square(np.array([0, 1] * 50 + [2]), probs).p_value == 0
    assert chi_square(np.array([0, 1] * 50 + [3]), probs).p_value == 0
    assert chi_square(np.zeros(9, int), np.array([1.0, 0.0])).p_value == 1


def test_chi_square_merges_rare_ids():
    probs = np.array([0.9, *[0.001] * 100])
    assert chi_square(np.repeat([0, 1], [900, 100]), probs).degrees == 20  # 100 ids of 1 in 1,000: bins of 5 or more
    rare = np.array([1 - 1e-6, 1e-6])
    assert chi_square(np.zeros(1000, int), rare).degrees == 0


# Combinations


def test_all_pairs():
    factors = {"a": range(4), "b": "xyz", "c": [True, False], "d": [None, 1.5, 2.5, 3.5, 4.5], "e": ["only"]}
    rows = all_pairs(factors)
    for one, other in itertools.combinations(factors, 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(itertools.product(factors[one], factors[other])), (one, other)
    assert len(rows) <= 28  # 20 are needed, all are 120
    assert rows == all_pairs(factors)
