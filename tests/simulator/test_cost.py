"""The cost model: a fit finds the coefficients that generated the steps, and files read back equal."""

import dataclasses
import json

import numpy as np
import pytest

from jpaged.engine.step_plan import RowInit, StepPlan
from jpaged.errors import RequestError
from jpaged.simulator.cost import COEFFICIENTS, CostModel, MeasuredStep, fit, read_cost_model, relative_errors, to_json
from jpaged.simulator.step_load import EngineShape, LoadMeter, StepLoad

SHAPE = EngineShape(100, 16, 8, 64, 512, (None, 32), (2, 8), (16, 64))
TRUE = CostModel(fixed=3e-3, per_token=2e-5, per_row=1e-4, per_kv_token=4e-8, per_prompt_pair=6e-10)


def steps(model: CostModel, noise: float = 0.0) -> list[MeasuredStep]:
    rng = np.random.default_rng(5)
    made = []
    for _ in range(200):
        rows = int(rng.integers(1, 257))
        chunk = int(rng.choice([0, rng.integers(1, 2049)]))
        kv = rows * int(rng.integers(1, 4000))
        load = StepLoad(rows + chunk, rows, kv, chunk * int(rng.integers(1, 4000)), 0)
        made.append(MeasuredStep(load, model.seconds(load) * float(np.exp(rng.normal(0, noise))), 5, "x"))
    return made


def test_a_fit_finds_the_coefficients():
    found = fit(steps(TRUE), origin="a test", engine=SHAPE)
    for name in COEFFICIENTS:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)
    noisy = fit(steps(TRUE, noise=0.05), origin="a test", engine=SHAPE)
    assert np.abs(relative_errors(noisy, steps(TRUE))).max() < 0.05


def test_no_coefficient_is_negative():
    """Steps get faster with more rows here. Plain least squares gives a negative coefficient, `fit` gives 0."""
    measured = steps(TRUE)
    falling = [dataclasses.replace(s, seconds=s.seconds + 4e-2 - 1.5e-4 * s.load.rows) for s in measured]
    features = np.array([[1, *dataclasses.astuple(s.load)[:4]] for s in falling])
    seconds = np.array([s.seconds for s in falling])
    assert np.linalg.lstsq(features / seconds[:, None], np.ones(len(seconds)), rcond=None)[0].min() < 0
    found = fit(falling, origin="a test", engine=SHAPE)
    assert min(getattr(found, name) for name in COEFFICIENTS) == 0


def test_too_few_steps_are_refused():
    with pytest.raises(RequestError, match="too few"):
        fit(steps(TRUE)[:3], origin="a test", engine=SHAPE)


def test_a_written_model_is_read_back(tmp_path):
    measured = steps(TRUE, noise=0.1)
    model = fit(measured, origin="a test", engine=SHAPE)
    path = tmp_path / "model.json"
    path.write_text(json.dumps(to_json(model, measured, {"machine": {"cpus": 2}})))
    assert read_cost_model(str(path)) == model
    assert model.goes_beyond(StepLoad(1, 1, 1e9, 0, 0))
    assert not model.goes_beyond(measured[0].load)
    assert not TRUE.goes_beyond(StepLoad(1, 1, 1e9, 0, 0))  # by hand: nothing was measured


def test_coefficients_by_hand():
    model = read_cost_model("fixed=0.004, per_kv_token=5e-8")
    assert (model.fixed, model.per_kv_token, model.per_token) == (0.004, 5e-8, 0)
    assert "by hand" in model.origin


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h100", "no such file; there are"),
        ("fixed=1,speed=3", "'speed'"),
        ("fixed=1,fixed=2", "at most once"),
        ("fixed=fast", "must be a number"),
        ("fixed=-1", "fixed"),
        ("fixed=inf", "fixed"),
        ("fixed=0", "no time"),
    ],
)
def test_faulty_coefficients_are_refused(text, says):
    with pytest.raises(RequestError) as error:
        read_cost_model(text)
    assert says in str(error.value)


@pytest.mark.parametrize("change", ["[]", "{}", '{"format": 99}', '{"format": 1}', "x"])
def test_faulty_files_are_refused(tmp_path, change):
    path = tmp_path / "a.json"
    path.write_text(change)
    with pytest.raises(RequestError, match="cost_model"):
        read_cost_model(str(path))


def plan(rows, counts, decodes, inits=()):
    return StepPlan(
        np.array(rows, np.int32), np.array(counts, np.int32), decodes, np.ones(len(rows), bool),
        np.zeros(sum(counts[decodes:]), np.int32), np.zeros((0, 4), np.int32),
        tuple(RowInit(r, n, 0, np.zeros((0, 3), np.int32), 0, 0) for r, n in inits),
    )  # fmt: skip


def test_load_of_a_plan():
    unpadded = dataclasses.replace(SHAPE, row_buckets=(), token_buckets=())
    padded, plain = LoadMeter(SHAPE), LoadMeter(unpadded)

    def measure(a):
        return padded.measure(a, a.rows.astype(np.intp)), plain.measure(a, a.rows.astype(np.intp))

    # A prompt of 40 tokens with 16 cached: 24 tokens, which see 17, 18, ... 40. One KV group sees all 40, one 32.
    pairs = sum(range(17, 41))
    first = measure(plan([3], [24], 0, [(3, 16)]))
    assert first == (StepLoad(64, 8, 36, pairs, 0), StepLoad(24, 1, 36, pairs, 0))
    decode = measure(plan([3], [1], 1))
    assert decode == (StepLoad(2, 2, (41 + 32) / 2, 0, 0), StepLoad(1, 1, (41 + 32) / 2, 0, 0))
    both = measure(plan([3, 0], [1, 10], 1, [(0, 0)]))
    assert both == (StepLoad(16, 8, (42 + 32) / 2 + 10, 55, 0), StepLoad(11, 2, (42 + 32) / 2 + 10, 55, 0))


def test_buckets_of_a_resized_shape_end_at_its_limits():
    larger = SHAPE.resized(max_num_seqs=40, max_num_batched_tokens=300)
    assert (larger.row_buckets, larger.token_buckets) == ((2, 8, 16, 32, 40), (16, 64, 128, 256, 300))
    smaller = SHAPE.resized(max_num_seqs=4, max_num_batched_tokens=16)
    assert (smaller.row_buckets, smaller.token_buckets) == ((2, 4), (16,))
    assert SHAPE.resized(max_num_seqs=8, max_num_batched_tokens=64) == SHAPE
