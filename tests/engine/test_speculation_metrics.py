"""Metrics of speculative decoding: counters, families of /metrics, and totals of several engines."""

import dataclasses
import pathlib
import re

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from jpaged.engine.engine import Engine, EngineOptions
from jpaged.engine.observe.engine_metrics import STEP_KINDS, VERIFY, EngineMetrics
from jpaged.engine.observe.engine_stats import FRESH, EngineCounters, SpeculationCounters, total_stats
from jpaged.engine.step_plan import StepPlan
from jpaged.metric_families import Vector, families_of, metrics_of
from jpaged.metrics import EngineMetricsSnapshot, PhaseSeconds
from jpaged.outputs import SpeculationStats
from jpaged.serving.admin.metrics import EngineCollector
from tests.engine.fake_runner import FakeRunner

ROOT = pathlib.Path(__file__).resolve().parents[2]
STATS = SpeculationStats(3, 5, 14, 7, (4, 2, 1), 2.8)


def plan_of(*num_tokens: int, decodes: int | None = None, prompt: int = 0) -> StepPlan:
    rows = np.arange(len(num_tokens), dtype=np.int32)
    return StepPlan(
        rows=rows, num_tokens=np.array(num_tokens, np.int32), num_decodes=len(rows) if decodes is None else decodes,
        samples=np.ones(len(rows), bool), prompt_tokens=np.zeros(prompt, np.int32),
        block_updates=np.zeros((0, 4), np.int32),
    )  # fmt: skip


def snapshot_of(stats: SpeculationStats | None) -> EngineMetricsSnapshot:
    snapshot = Engine(FakeRunner()).metrics()
    assert snapshot is not None
    return dataclasses.replace(snapshot, stats=dataclasses.replace(snapshot.stats, speculation=stats))


def test_counters_of_a_verify_step():
    counters = SpeculationCounters.of(3)
    counters.note_step(plan_of(4, 1, 3, 4), np.array([3, 0, 1, 0], np.int32))
    assert counters.stats() == SpeculationStats(3, 3, 8, 4, (2, 1, 1), pytest.approx(FRESH * 8 / 4))
    counters.note_step(plan_of(2), np.array([1], np.int32))
    stats = counters.stats()
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (4, 9, 5)
    assert stats.accepted_per_position == (3, 1, 1)
    assert sum(stats.accepted_per_position) == stats.accepted_tokens
    assert (stats.acceptance_rate, stats.tokens_per_draft) == (5 / 9, 1 + 5 / 4)


def test_steps_without_drafts_lower_the_number_of_drafts_per_row():
    counters = SpeculationCounters.of(2)
    for _ in range(200):
        counters.note_step(plan_of(3, 3), np.array([2, 0], np.int32))
    assert counters.drafts_per_row == pytest.approx(2)
    counters.note_step(plan_of(7, decodes=0, prompt=7), None)  # has no decodes: says nothing about drafts
    assert counters.drafts_per_row == pytest.approx(2)
    counters.note_step(plan_of(1, 1), None)
    assert counters.drafts_per_row == pytest.approx(2 * (1 - FRESH))
    before = counters.drafts_per_row
    counters.reset()
    assert counters.stats() == SpeculationStats(2, 0, 0, 0, (0, 0), before)
    assert (counters.stats().acceptance_rate, counters.stats().tokens_per_draft) == (0, 1)


def test_reset_of_all_counters():
    counters = EngineCounters(speculation=SpeculationCounters([2], 3, 3, 2))
    counters.reset()
    assert counters.speculation == SpeculationCounters([0])
    EngineCounters().reset()  # without speculation


def test_families_have_vllms_names():
    families = {family.name: family for family in families_of([snapshot_of(STATS)], "m")}
    found = {name: family.metrics[0].value for name, family in families.items() if "spec_decode" in name}
    assert found == {
        "vllm:spec_decode_num_drafts": 5, "vllm:spec_decode_num_draft_tokens": 14,
        "vllm:spec_decode_num_accepted_tokens": 7, "vllm:spec_decode_num_accepted_tokens_per_pos": 4,
        "jpaged:spec_decode_drafts_per_row": 2.8,
    }  # fmt: skip
    by_position = families["vllm:spec_decode_num_accepted_tokens_per_pos"].metrics
    assert [(metric.labels["position"], metric.value) for metric in by_position] == [("0", 4), ("1", 2), ("2", 1)]
    assert not any("spec_decode" in family.name for family in families_of([snapshot_of(None)], "m"))


def test_get_metrics_has_vllms_vector():
    other = dataclasses.replace(STATS, accepted_per_position=(3, 3, 1))
    found = metrics_of(families_of([snapshot_of(STATS), snapshot_of(other)], "m"))
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    assert [metric for metric in found if metric.name == name] == [
        Vector(name, {"model_name": "m", "engine": "0"}, [4, 2, 1]),
        Vector(name, {"model_name": "m", "engine": "1"}, [3, 3, 1]),
    ]
    assert sum(metric.name == "vllm:prompt_tokens" for metric in found) == 2


def test_the_docs_list_every_metric():
    text = (ROOT / "docs/speculative_decoding.md").read_text()
    listed = re.findall(r"^\| `(\w+:\w+)` \| (\w+) \|", text, re.MULTILINE)
    families = [family for family in families_of([snapshot_of(STATS)], "m") if "spec_decode" in family.name]
    kinds = {family.name: type(family.metrics[0]).__name__.lower() for family in families}
    assert dict(listed) == {f"{name}_total" if kind == "counter" else name: kind for name, kind in kinds.items()}


def test_prometheus_text_of_two_engines():
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: [snapshot_of(STATS), snapshot_of(STATS)], "m"))
    text = generate_latest(registry).decode()
    for engine in "01":
        labels = f'engine="{engine}",model_name="m"'
        assert f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} 14.0\n" in text
        assert f'per_pos_total{{{labels},position="2"}} 1.0\n' in text
        assert f"jpaged:spec_decode_drafts_per_row{{{labels}}} 2.8\n" in text


def test_totals_of_several_engines():
    one = dataclasses.replace(Engine(FakeRunner()).stats(), speculation=STATS)
    other = dataclasses.replace(one, speculation=SpeculationStats(3, 1, 2, 1, (1, 0, 0), 1.2))
    assert total_stats([one, other]).speculation == SpeculationStats(3, 6, 16, 8, (5, 2, 1), 2.0)
    without = dataclasses.replace(one, speculation=None)
    assert total_stats([without, without]).speculation is None
    assert total_stats([one]) is one


def test_kind_and_tokens_of_a_verify_step():
    metrics = EngineMetrics(64, PhaseSeconds(), speculates=True)
    metrics.note_step(plan_of(4, 1, 3, 0, decodes=3), 0.01)
    assert {kind: times.count for kind, times in metrics._step_seconds.items()} == {
        **dict.fromkeys(STEP_KINDS, 0), VERIFY: 1,
    }  # fmt: skip
    assert metrics._step_tokens.sum == 8
    assert EngineMetrics(64, PhaseSeconds())._step_seconds.keys() == set(STEP_KINDS)


def test_an_engine_without_speculation_has_no_such_statistics():
    engine = Engine(FakeRunner(), options=EngineOptions())
    assert engine.stats().speculation is None
