"""Histograms of /metrics: every event of a run is counted exactly once."""

import dataclasses
import time
from concurrent.futures import Future

import pytest

from jpaged.engine.adapters.loaded_adapter import LoadedAdapter
from jpaged.engine.engine import Engine, EngineOptions, SchedulingOptions, StepError
from jpaged.engine.step_plan import NOT_FINITE
from jpaged.engine.strategies.pooled_outputs import Pooling
from jpaged.errors import CapacityError
from jpaged.metric_families import families_of, metrics_of
from jpaged.metrics import Histogram, RequestHistograms, token_count_bounds
from jpaged.params.pooling import PoolingParams
from jpaged.params.sampling import SamplingParams
from tests.engine.fake_runner import FakeRunner, PoolingRunner
from tests.engine.greedy_requests import greedy, prompt_of, run


def figures(engine: Engine):
    snapshot = engine.metrics()
    assert snapshot is not None
    return snapshot


def counts(requests: RequestHistograms) -> dict[str, tuple[int, float]]:
    """(observations, sum) of the histograms that count tokens and requests."""
    names = (
        "prompt_tokens", "prefill_computed_tokens", "generation_tokens", "max_generation_tokens", "params_n",
        "params_max_tokens", "num_preemptions",
    )  # fmt: skip
    return {name: (getattr(requests, name).count, getattr(requests, name).sum) for name in names}


def test_a_histogram_counts_each_value_in_the_first_bucket_that_reaches_it():
    histogram = Histogram((1.0, 2.0, 5.0))
    for value, count in ((0.5, 1), (1.0, 2), (1.5, 1), (5.0, 1), (6.0, 3)):
        histogram.observe(value, count)
    assert histogram.counts == [3, 1, 1, 3]
    assert (histogram.count, histogram.sum) == (8, 0.5 + 2 * 1.0 + 1.5 + 5.0 + 3 * 6.0)
    copy = histogram.copy()
    histogram.reset()
    assert (copy.count, histogram.count, histogram.sum) == (8, 0, 0.0)


def test_bounds_of_token_counts_are_vllms_series():
    assert token_count_bounds(250) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert token_count_bounds(1) == (1,)


def test_facts_of_requests_with_one_and_several_answers():
    engine = Engine(FakeRunner())
    engine.add_request("a", prompt_of(5), greedy(8))
    run(engine)
    engine.add_request("b", prompt_of(5), greedy(3, n=2))  # its first block is in the prefix cache
    run(engine)
    seen = figures(engine)
    assert counts(seen.requests) == {
        "prompt_tokens": (2, 10), "prefill_computed_tokens": (2, 5 + 1), "generation_tokens": (3, 8 + 3 + 3),
        "max_generation_tokens": (2, 8 + 3), "params_n": (2, 3), "params_max_tokens": (2, 11),
        "num_preemptions": (2, 0),
    }  # fmt: skip
    assert seen.finished == {"stop": 0, "length": 3, "repetition": 0, "abort": 0, "error": 0}
    requests = seen.requests
    assert requests.time_to_first_token.count == requests.time_per_output_token.count == 2
    assert requests.inter_token_latency.count == 7 + 2 + 2
    for field in dataclasses.fields(RequestHistograms):
        assert getattr(requests, field.name).count >= 2, field.name
    assert requests.e2e_latency.sum >= requests.queue_time.sum + requests.inference_time.sum
    assert requests.inference_time.sum == pytest.approx(requests.prefill_time.sum + requests.decode_time.sum)


def test_steps_by_kind_and_their_tokens():
    engine = Engine(runner := FakeRunner(max_num_batched_tokens=8))
    engine.add_request("a", prompt_of(12), greedy(8))
    for _ in range(4):
        engine.step()
    engine.add_request("b", prompt_of(6, 50), greedy(2))
    run(engine)
    seen = figures(engine)
    kinds = ["prefill" if not p.num_decodes else "mixed" if len(p.prompt_tokens) else "decode" for p in runner.plans]
    assert {"prefill", "mixed", "decode"} == set(kinds)
    assert {kind: h.count for kind, h in seen.step_seconds.items()} == {kind: kinds.count(kind) for kind in set(kinds)}
    assert seen.step_tokens.sum == sum(plan.total_tokens for plan in runner.plans)
    assert all(seconds > 0 for seconds in dataclasses.astuple(seen.phases))


def test_aborts_failures_and_broken_logits():
    class Broken(FakeRunner):
        def collect(self, handle):
            result = super().collect(handle)
            if len(self.plans) == 3:
                result.token_ids[0] = NOT_FINITE
            return result

    engine = Engine(Broken())
    engine.add_request("broken", prompt_of(4), greedy(8))
    run(engine)
    engine.add_request("early", prompt_of(4, 20), greedy(8))
    engine.abort(["early"])
    engine.add_request("late", prompt_of(4, 40), greedy(8))
    for _ in range(3):
        engine.step()
    engine.abort(["late"])
    run(engine)
    seen = figures(engine)
    assert seen.finished == {"stop": 0, "length": 0, "repetition": 0, "abort": 2, "error": 1}
    assert seen.corrupted_requests == 1
    assert seen.stats.generated_tokens == seen.requests.generation_tokens.sum
    assert seen.requests.queue_time.count == 2  # "early" never ran
    assert seen.requests.time_to_first_token.count == 2

    engine = Engine(FakeRunner(fail_at=frozenset({("collect", 2)})))
    engine.add_request("a", prompt_of(4), greedy(8))
    with pytest.raises(StepError):
        run(engine)
    assert figures(engine).finished["error"] == 1
    engine.add_request("b", prompt_of(4), greedy(8))
    engine.start_over()
    assert figures(engine).finished["abort"] == 1


def test_preemptions_and_sharing():
    engine = Engine(FakeRunner(num_blocks=18, max_num_seqs=3))
    for i in range(3):
        engine.add_request(str(i), prompt_of(12, 30 * i), greedy(40))
    run(engine)
    seen = figures(engine)
    assert seen.requests.num_preemptions.sum == seen.stats.preemptions > 0
    assert seen.stats.recomputed_tokens > 0
    assert seen.requests.prefill_computed_tokens.sum == 36  # what a preemption cost is not in it

    engine = Engine(FakeRunner())
    engine.add_request("a", prompt_of(7), greedy(20, n=3))
    while engine.stats().num_running < 3:
        engine.step()
    sharing, manager = figures(engine).sharing, engine.scheduler.manager
    assert sharing.shared_blocks >= 1
    assert sharing.saved_blocks == manager.num_held - manager.pool.num_used > 0
    assert 0 < figures(engine).kv_waste < 1


@pytest.mark.parametrize("params", [
    SamplingParams(temperature=1, n=1, best_of=3, max_tokens=4, seed=1),
    SamplingParams(temperature=0, n=2, best_of=3, use_beam_search=True, max_tokens=4),
])  # fmt: skip
def test_only_returned_answers_count(params):
    engine = Engine(FakeRunner(max_logprobs=6))
    engine.add_request("a", prompt_of(5), params)
    output = run(engine)["a"]
    seen = figures(engine)
    assert sum(seen.finished.values()) == len(output.outputs) == params.n
    assert seen.requests.generation_tokens.sum == sum(len(answer.token_ids) for answer in output.outputs)
    latencies = seen.requests.inter_token_latency
    assert latencies.sum < 60  # no latency since the start of the clock


def test_rejections_by_limit():
    fields = {"max_queued_requests": "rejected_requests", "max_queued_tokens": "rejected_tokens"}
    for limits, field in (({limit: 8 if "tokens" in limit else 1}, field) for limit, field in fields.items()):
        options = EngineOptions(scheduling=SchedulingOptions(**limits))
        engine = Engine(FakeRunner(max_num_seqs=1), options=options)
        refused = 0
        for i in range(5):
            group = engine.inputs.process(str(i), prompt_of(6, i), greedy(2))
            try:
                engine.admission.check_capacity(group)
            except CapacityError:
                refused += 1
            else:
                engine.add(group)
        run(engine)
        assert getattr(figures(engine), field) == refused > 0


def test_a_pooled_prompt_has_no_token_figures():
    engine = Engine(PoolingRunner(), options=EngineOptions(pooling=Pooling(2)))
    engine.add_request("a", {"prompt_token_ids": prompt_of(5)}, PoolingParams())
    run(engine)
    seen = figures(engine)
    assert (seen.requests.prompt_tokens.sum, seen.requests.e2e_latency.count, seen.finished["stop"]) == (5, 1, 1)
    assert seen.requests.generation_tokens.count == seen.requests.time_to_first_token.count == 0


def test_reset_and_disable():
    engine = Engine(FakeRunner())
    engine.add_request("a", prompt_of(5), greedy(4))
    run(engine)
    engine.reset_stats()
    seen = figures(engine)
    assert sum(seen.finished.values()) == seen.step_tokens.count == sum(dataclasses.astuple(seen.phases)) == 0
    assert all(getattr(seen.requests, field.name).count == 0 for field in dataclasses.fields(seen.requests))

    engine = Engine(FakeRunner(), options=EngineOptions(disable_log_stats=True))
    engine.add_request("a", prompt_of(5), greedy(4))
    assert run(engine)["a"].outputs[0].finish_reason == "length"
    assert engine.metrics() is None
    assert engine.stats().generated_tokens == 4


def test_adapters_and_the_requests_that_wait_for_their_slots():
    engine = Engine(FakeRunner(num_adapter_slots=1, max_num_seqs=4))
    assert figures(Engine(FakeRunner())).adapters is None

    def add(name, adapter):
        future = Future()
        future.set_result(LoadedAdapter(adapter, adapter, 1, len(adapter), ""))
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        engine.add(engine.inputs.process(name, [1, 2, 3], params, adapter=future))

    def info():
        [found] = [metric for metric in metrics_of(families_of([figures(engine)], "m")) if "lora_req" in metric.name]
        assert abs(found.value - time.time()) < 60
        return found.labels

    add("first", "sql")
    add("second", "code")
    engine.step()
    assert info() == {"max_lora": "1", "running_lora_adapters": "sql", "waiting_lora_adapters": "code"}
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_for_adapters) == (1, 1, 1)
    assert engine.admission.queue_length().queued == 1
    answer = Future()
    engine.inspect(answer)
    snapshot = answer.result().snapshot()
    assert [request.adapter for request in (*snapshot.running, *snapshot.waiting)] == ["sql", "code"]
    while engine.has_work:
        engine.step()
    assert info() == {"max_lora": "1", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert engine.stats().adapter_loads == 2
