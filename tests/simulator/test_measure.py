"""Measuring steps: a runner with step times from a known model gives measurements from which `fit` finds that model."""

import dataclasses

import pytest

from jpaged.engine.engine import Engine, EngineOptions
from jpaged.errors import RequestError
from jpaged.simulator.cost import CostModel, fit
from jpaged.simulator.measure import StepTimer, designed_cases, measure_steps
from jpaged.simulator.step_load import EngineShape, LoadMeter
from tests.engine.fake_runner import FakeRunner

TRUE = CostModel(fixed=4e-3, per_token=3e-5, per_row=2e-5, per_kv_token=6e-7, per_prompt_pair=2e-9)
SIZES = {"num_blocks": 400, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 160}
SHAPE = EngineShape(**SIZES)


class TimedRunner(FakeRunner):
    """A device with a simulated clock: the true model gives the time of each step."""

    def __post_init__(self):
        super().__post_init__()
        self.now, self.ends, self.meter = 0.0, [], LoadMeter(SHAPE)

    def dispatch(self, plan):
        self.now += TRUE.seconds(self.meter.measure(plan, plan.rows.astype(int)))
        self.ends.append(self.now)
        return super().dispatch(plan)

    def collect(self, handle):
        self.collected = self.ends[handle.number]
        return super().collect(handle)


def test_the_true_model_is_found(monkeypatch):
    runner = TimedRunner(**SIZES)
    engine = Engine(runner, options=EngineOptions(enable_prefix_caching=False))
    monkeypatch.setattr(StepTimer.__init__, "__defaults__", (lambda: runner.collected,))
    cases = []
    steps = list(measure_steps(engine, SHAPE, repeats=2, progress=cases.append))
    assert len(cases) == 2 * len(designed_cases(SHAPE))
    assert engine.runner is runner
    assert not engine.has_work
    found = fit(steps, origin="a test", engine=SHAPE)
    for name in ("fixed", "per_token", "per_row", "per_kv_token", "per_prompt_pair"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name
    decodes = [step for step in steps if step.load.prompt_pairs == 0]
    assert {step.load.rows for step in decodes} >= {1, 2, 4, 8}
    assert len(steps) - len(decodes) >= 10


def test_cases_fit_the_engine():
    for shape in (SHAPE, dataclasses.replace(SHAPE, max_num_seqs=1), dataclasses.replace(SHAPE, num_blocks=45),
                  dataclasses.replace(SHAPE, windows=(None, 8)), EngineShape(8192, 16, 256, 2048, 32768)):  # fmt: skip
        cases = designed_cases(shape)
        assert len(cases) == len(set(cases)) >= 2
        for case in cases:
            assert case.rows + bool(case.prompt) <= shape.max_num_seqs
            assert max(case.context, case.prompt) + 20 <= shape.max_model_len
            assert case.rows * case.context + case.prompt <= shape.num_blocks * shape.block_size


def test_zero_repeats_are_refused():
    with pytest.raises(RequestError, match="repeats must be at least 1, got 0"):
        next(measure_steps(Engine(FakeRunner(**SIZES)), SHAPE, repeats=0))
