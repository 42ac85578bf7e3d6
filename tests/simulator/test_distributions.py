"""Histogram, timeline and generated loads: compared with numpy, and with the requested distributions."""

import itertools

import numpy as np
import pytest

from jpaged.errors import RequestError
from jpaged.simulator.histogram import Histogram
from jpaged.simulator.load import CHUNK, NO_PREFIX, ArrivalTimes, GeneratedLoad, LengthDistribution
from jpaged.simulator.timeline import NUM_BINS, Timeline


@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0])
def test_percentiles_are_numpys_within_half_a_percent(spread):
    # With 20,003 values no percentile below falls between two of them.
    values = np.random.default_rng(1).lognormal(-3, spread, 20_003)
    one_by_one, in_bulk = Histogram(), Histogram()
    for value in values[:10_000].tolist():
        one_by_one.add(value)
    one_by_one.add_many(values[10_000:])
    in_bulk.add_many(values)
    for percent in (0.01, 1, 10, 50, 90, 99, 99.9, 100):
        expected = np.percentile(values, percent, method="inverted_cdf")
        assert one_by_one.percentile(percent) == in_bulk.percentile(percent) == pytest.approx(expected, rel=0.0051)
    assert in_bulk.mean == pytest.approx(values.mean())
    assert (in_bulk.smallest, in_bulk.largest, in_bulk.count) == (values.min(), values.max(), 20_003)
    edges, shares = in_bulk.shares_up_to()
    assert shares[-1] == 1
    assert np.interp(np.median(values), edges, shares) == pytest.approx(0.5, abs=0.3 if spread < 0.1 else 0.02)


def test_a_weight_of_n_counts_as_n_values():
    weighted, single = Histogram(), Histogram()
    for value, weight in ((0.0, 3), (0.5, 7), (1e9, 1), (1e-9, 2)):
        weighted.add(value, weight)
        for _ in range(weight):
            single.add(value)
    assert [weighted.percentile(p) for p in range(1, 101)] == [single.percentile(p) for p in range(1, 101)]
    assert weighted.total == pytest.approx(single.total)
    assert weighted.percentile(20) == 0.0
    assert weighted.percentile(100) == 1e9


def test_a_histogram_without_values_has_no_percentiles():
    assert np.isnan(Histogram().percentile(50))
    assert np.isnan(Histogram().mean)


@pytest.mark.parametrize("end", [0.3, 40.0, 5000.0])
def test_a_timeline_keeps_sums_and_is_bounded(end):
    rng = np.random.default_rng(2)
    cuts = [0.0, *np.sort(rng.uniform(0, end, 3000)).tolist(), end]
    timeline, area, tokens = Timeline(), 0.0, 0
    for start, stop in itertools.pairwise(cuts):
        running, output = int(rng.integers(0, 50)), int(rng.integers(0, 50))
        timeline.add(start, stop, running, 2 * running, 0.5, 0, output)
        area += running * (stop - start)
        tokens += output
    points = timeline.points()
    assert len(points) <= NUM_BINS
    assert len(points) > min(NUM_BINS / 2 - 1, end / 1e-3 - 1)
    spans, begin = [], 0.0
    for point in points:
        spans.append(2 * (point.time - begin))
        begin += spans[-1]
    assert begin == pytest.approx(end)
    assert sum(p.running * s for p, s in zip(points, spans, strict=True)) == pytest.approx(area)
    assert sum(p.waiting * s for p, s in zip(points, spans, strict=True)) == pytest.approx(2 * area)
    assert sum(p.output_tokens * s for p, s in zip(points, spans, strict=True)) == pytest.approx(tokens)
    assert all(p.kv_use == pytest.approx(0.5) for p in points)


def load(**fields) -> GeneratedLoad:
    lengths = LengthDistribution("prompt_tokens", "64"), LengthDistribution("output_tokens", "32")
    given = {"num_requests": 3 * CHUNK + 5, "times": ArrivalTimes("poisson", 10.0), "prompt_tokens": lengths[0],
             "output_tokens": lengths[1], "max_model_len": 4096}  # fmt: skip
    return GeneratedLoad(**{**given, **fields})


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [("100", 100, 0), ("uniform:50:149", 99.5, 28.9), ("lognormal:200:0.5", 200, 100), ("lognormal:64:0", 64, 0)],
)
def test_lengths_have_the_mean_and_the_spread(text, mean, deviation):
    drawn = LengthDistribution("prompt_tokens", text).draw(np.random.default_rng(3), 40_000)
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert drawn.std() == pytest.approx(deviation, rel=0.05)
    assert drawn.min() >= 1
    assert LengthDistribution("prompt_tokens", text).mean == mean


@pytest.mark.parametrize(("text", "spread"), [("poisson", 1.0), ("gamma:3", 3.0), ("gamma:0.5", 0.5)])
def test_arrivals_have_the_rate_and_the_burstiness(text, spread):
    gaps = np.diff([a.time for a in load(num_requests=60_000, times=ArrivalTimes(text, 25.0))])
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 25, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.06)


def test_on_off_arrivals_pause():
    times = np.array([a.time for a in load(num_requests=20_000, times=ArrivalTimes("onoff:2:6", 5.0))])
    assert (times % 8 < 2).all()
    assert len(times) / times[-1] == pytest.approx(5, rel=0.05)


def test_a_load_is_made_by_its_seed_alone():
    first, again, other = list(load(seed=7)), list(load(seed=7)), list(load(seed=8))
    assert first == again != other
    assert len(first) == 3 * CHUNK + 5
    # Another distribution of output lengths leaves the arrival times unchanged.
    longer = list(load(seed=7, output_tokens=LengthDistribution("output_tokens", "uniform:1:9")))
    assert [a.time for a in longer] == [a.time for a in first]


def test_prefixes_have_zipf_popularity():
    arrivals = list(load(num_requests=40_000, prefixes=4, prefix_tokens=48, prefix_zipf=1.0, prefix_share=0.5))
    ids = np.array([a.prefix_id for a in arrivals])
    assert (ids == NO_PREFIX).mean() == pytest.approx(0.5, abs=0.01)
    shares = np.bincount(ids[ids != NO_PREFIX]) / (ids != NO_PREFIX).sum()
    assert shares == pytest.approx(np.array([1, 1 / 2, 1 / 3, 1 / 4]) / (25 / 12), abs=0.01)
    for arrival in arrivals:
        shared = 0 if arrival.prefix_id == NO_PREFIX else 48
        assert (arrival.prefix_tokens, arrival.prompt_tokens) == (shared, shared + 64)


def test_lengths_are_cut_to_the_model():
    lengths = LengthDistribution("prompt_tokens", "lognormal:100:2"), LengthDistribution("o", "lognormal:100:2")
    arrivals = list(load(prompt_tokens=lengths[0], output_tokens=lengths[1], max_model_len=150))
    totals = [a.prompt_tokens + a.output_tokens for a in arrivals]
    assert max(totals) == 150
    assert min(a.output_tokens for a in arrivals) == 1


def test_priorities_come_in_their_shares():
    priorities = [a.priority for a in load(num_requests=20_000, priorities=((0, 3.0), (5, 1.0)))]
    assert set(priorities) == {0, 5}
    assert np.mean(priorities) == pytest.approx(5 / 4, rel=0.05)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LengthDistribution("prompt_tokens", "many"), "prompt_tokens: 'many' is not a number, got 'many'"),
        (lambda: LengthDistribution("prompt_tokens", "0"), "at least 1 token"),
        (lambda: LengthDistribution("prompt_tokens", "1.5"), "whole numbers"),
        (lambda: LengthDistribution("output_tokens", "uniform:9:3"), "highest must not be below"),
        (lambda: LengthDistribution("output_tokens", "normal:9:3"), "must be N, uniform:"),
        (lambda: LengthDistribution("output_tokens", "lognormal:9"), "must be N, uniform:"),
        (lambda: LengthDistribution("output_tokens", "lognormal:9:-1"), "spread"),
        (lambda: ArrivalTimes("poisson", 0), "rate"),
        (lambda: ArrivalTimes("poisson", float("nan")), "rate"),
        (lambda: ArrivalTimes("gamma", 1), "must be poisson, gamma:"),
        (lambda: ArrivalTimes("gamma:0", 1), "more than 0"),
        (lambda: ArrivalTimes("onoff:1:-1", 1), "more than 0"),
        (lambda: load(num_requests=0), "num_requests"),
        (lambda: load(prefixes=3), "prefix_tokens"),
        (lambda: load(prefixes=3, prefix_tokens=4095), "must be at most max_model_len - 2 = 4094"),
        (lambda: load(prefix_share=1.5), "prefix_share"),
        (lambda: load(seed=-1), "seed"),
        (lambda: load(priorities=((0, 0.0),)), "share above 0"),
    ],
)  # fmt: skip
def test_faulty_options_are_refused(make, says):
    with pytest.raises(RequestError) as error:
        make()
    assert says in str(error.value)
