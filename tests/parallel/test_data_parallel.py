"""Several engines with one front end: the answers of one engine, routing, metrics, and engines that fail."""

import asyncio
import contextlib
import dataclasses
import random
import threading
import time
import types
from collections import Counter
from unittest import mock

import httpx
import jax
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jpaged import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine, EngineOptions, SchedulingOptions
from jpaged.errors import CapacityError, EngineError, ModelLoadError, RequestError
from jpaged.frontend import engine_devices
from jpaged.frontend.build import BuiltEngine
from jpaged.frontend.engine_config import engine_config
from jpaged.frontend.engine_devices import devices_of_engines
from jpaged.routing import ROUTERS
from jpaged.serving.app_options import AppOptions
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from tests.engine.fake_runner import FakeRunner, alone
from tests.support.http_server import running
from tests.support.random_requests import OPTIONS, answers, workload
from tests.support.slow_runner import SlowRunner, collect, until
from tests.support.tiny_engine import sampling_programs

CACHED = OPTIONS | {"enable_prefix_caching": True, "max_model_len": 256}
GREEDY = SamplingParams(temperature=0, max_tokens=6)
ENDLESS = SamplingParams(temperature=0, max_tokens=None)


@pytest.fixture(scope="module")
def two(checkpoint):
    """Two engines on one device, which is what a CPU has."""
    found = jax.devices()[:1]
    with mock.patch.object(engine_devices, "jax", types.SimpleNamespace(devices=lambda: found)):
        llm = LLM(checkpoint, **CACHED, data_parallel_size=2)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def one(checkpoint):
    with LLM(checkpoint, **CACHED) as llm:
        yield llm


# -- a real model


def test_the_answers_are_those_of_one_engine_bit_for_bit(one, two):
    """Greedy and sampled, with and without seeds, log-probabilities, parallel samples and beams."""
    prompts, params = workload(24, seed=1)
    params = [dataclasses.replace(each, seed=None if i % 4 == 2 else each.seed) for i, each in enumerate(params)]
    params[3:6] = [dataclasses.replace(each, n=3, temperature=0.9) for each in params[3:6]]
    both = [llm.generate(prompts, params, use_tqdm=False) for llm in (one, two)]
    assert answers(both[0]) == answers(both[1])
    of_samples = [[answer.token_ids for output in outputs for answer in output.outputs] for outputs in both]
    assert of_samples[0] == of_samples[1]
    beams = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    found = [[s.tokens for o in llm.beam_search(prompts[:4], beams) for s in o.sequences] for llm in (one, two)]
    assert found[0] == found[1]

    each, total = [two.stats(engine) for engine in (0, 1)], two.stats()
    assert [stats.finished_requests for stats in each] == [14, 14]
    assert total.generated_tokens == sum(stats.generated_tokens for stats in each) == one.stats().generated_tokens
    assert total.compiles_after_ready == 0
    first, second = (jax.tree.leaves(engine.runner.params) for engine in two.engines)
    assert all(a is b for a, b in zip(first, second, strict=True))  # the weights are there once


def test_one_error_ends_the_call_and_the_next_one_runs(one, two, monkeypatch):
    prompts, params = workload(8, seed=3)
    with monkeypatch.context() as broken:
        broken.setattr(two.engines[1].runner, "dispatch", lambda plan: 1 / 0)
        with pytest.raises(EngineError, match="a step failed"):
            two.generate(prompts, params, use_tqdm=False)
    assert two.stats().num_running == two.stats().num_waiting == 0
    found = [answers(llm.generate(prompts, params, use_tqdm=False)) for llm in (one, two)]
    assert found[0] == found[1]


def test_a_call_is_shown_and_sleep_frees_all_engines(two):
    assert [two.inspect(engine).engine for engine in (0, 1)] == [0, 1]
    assert two.inspect().num_engines == 2
    with pytest.raises(RequestError, match="index of an engine, from 0 to 1"):
        two.inspect(2)
    two.sleep()
    assert all(engine.runner.state is None for engine in two.engines)
    two.wake_up()
    assert all(engine.runner.state is not None for engine in two.engines)
    assert two.reset_prefix_cache()


def test_an_engine_that_discards_shared_weights_deletes_none_of_the_others(two, checkpoint):
    first, second = two.engines
    for _ in range(2):  # the weights of the start, and those of an update
        first.sleep(discard_weights=True)
        assert first.runner.weights_problem() is not None
        assert second.runner.weights_problem() is None
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(second.runner.params))
        first.wake_up()
        two.update_weights(checkpoint)
    assert first.runner.weights_problem() is None
    assert all(a is b for a, b in zip(*(jax.tree.leaves(each.runner.params) for each in two.engines), strict=True))


def test_engines_on_devices_of_their_own_have_copies_of_the_weights(one, checkpoint):
    prompts, _ = workload(6, seed=5)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with sampling_programs(), LLM(checkpoint, **CACHED, data_parallel_size=2) as llm:
        placed = [{leaf.device for leaf in jax.tree.leaves(engine.runner.params)} for engine in llm.engines]
        found = answers(llm.generate(prompts, params, use_tqdm=False))
        assert [llm.stats(index).finished_requests for index in (0, 1)] == [3, 3]
    assert placed == [{jax.devices()[0]}, {jax.devices()[1]}]
    assert found == answers(one.generate(prompts, params, use_tqdm=False))


@pytest.mark.slow
def test_two_engines_on_two_devices_each(checkpoint):
    prompts, params = workload(16, seed=6)
    found = []
    for size in (1, 2):
        with LLM(checkpoint, **CACHED, tensor_parallel_size=2, data_parallel_size=size) as llm:
            found.append(answers(llm.generate(prompts, params, use_tqdm=False)))
            placed = [set(leaf.devices()) for e in llm.engines for leaf in jax.tree.leaves(e.runner.params)[:1]]
    assert found[0] == found[1]
    assert placed == [set(jax.devices()[:2]), set(jax.devices()[2:4])]


@pytest.mark.slow
def test_a_server_on_two_engines_gives_the_answers_of_one(one, checkpoint):
    prompts, params = workload(24, seed=7)

    async def main(engine):
        last = await asyncio.gather(*(collect(engine, *each) for each in zip(prompts, params, strict=True)))
        return [outputs[-1] for outputs in last]

    with contextlib.closing(AsyncLLM(checkpoint, **CACHED, data_parallel_size=2)) as engine:
        found = asyncio.run(main(engine))
        assert min(engine.stats(index).finished_requests for index in (0, 1)) > 6
    assert answers(found) == answers(one.generate(prompts, params, use_tqdm=False))


# -- the front end, on runners in plain Python


@pytest.fixture
def make(monkeypatch):
    """Makes an AsyncLLM, or an LLM, of several engines without a model."""
    made = []

    def make(routing="prefix_affine", count=2, kind=AsyncLLM, **scheduling):
        def build(model, params, given, **how):
            runners = [SlowRunner(max_model_len=2000, num_blocks=2000) for _ in range(count)]
            options = EngineOptions(scheduling=SchedulingOptions(**scheduling))
            first, *others = (Engine(runner, None, options) for runner in runners)
            return BuiltEngine(first, engine_config(model, given), None, None, GREEDY, tuple(others))

        monkeypatch.setattr(f"jpaged.{'llm' if kind is LLM else 'async_llm'}.build_engine", build)
        made.append(kind("model", data_parallel_size=count, data_parallel_routing=routing))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def shared_prefixes(count):
    """Prompts of 4 blocks, each with one of 6 prefixes of 3 blocks, in random order."""
    rng, size = random.Random(0), FakeRunner().block_size
    prompts = [[prefix] * 3 * size + [6 + i % 90] * size for i in range(count) for prefix in range(6)]
    rng.shuffle(prompts)
    return prompts


@pytest.mark.slow
def test_prefixes_are_found_more_often_with_prefix_affine_routing(make):
    async def main(engine):
        for prompt in shared_prefixes(5):
            await collect(engine, prompt)

    rates = {}
    for routing in ROUTERS:
        engine = make(routing)
        asyncio.run(main(engine))
        figures = [engine.metrics(index) for index in (0, 1)]
        started = sum(each.requests.prefill_computed_tokens.count for each in figures)
        assert started == 30
        rates[routing] = sum(each.prefix_hit_requests for each in figures) / started
    assert rates["prefix_affine"] == 24 / 30  # each prefix is computed once
    assert max(rates["round_robin"], rates["least_loaded"]) < 0.7  # and here once on each engine


def test_metrics_of_both_engines_agree_with_the_requests(make):
    engine = make()
    prompts = [[i % 90] * (4 + i) for i in range(20)]
    app = create_app(Server(engine=engine, model_names=("fake",)), AppOptions(admin_keys=("look",)))
    with running(app) as base, httpx.Client(base_url=base) as client:
        for i, prompt in enumerate(prompts):
            body = {"prompt": prompt, "max_tokens": 5, "n": 1 + i % 3}
            assert client.post("/v1/completions", json=body).status_code == 200
        text = client.get("/metrics").text
        client.headers["Authorization"] = "Bearer look"
        seen = [client.get(f"/admin/inspect?engine={i}").json() for i in (0, 1)]
        assert [(each["engine"], each["num_engines"]) for each in seen] == [(0, 2), (1, 2)]
        for wrong in ("2", "-1", "one"):
            assert client.get(f"/admin/inspect?engine={wrong}").status_code == 400
    sums, engines = Counter(), {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value
            engines.setdefault(sample.name, []).append(sample.labels.get("engine"))
    assert sums["vllm:request_prompt_tokens_count"] == 20
    assert sums["vllm:request_prompt_tokens_sum"] == sums["vllm:prompt_tokens_total"] == sum(map(len, prompts))
    answers_sent = sum(1 + i % 3 for i in range(20))
    assert sums["vllm:request_success_total"] == answers_sent
    assert sums["vllm:generation_tokens_total"] == 5 * answers_sent
    assert engines["vllm:num_requests_running"] == ["0", "1"]
    assert sums["jpaged:build_info"] == 1
    assert all(engine.stats(index).finished_requests >= 5 for index in (0, 1))


def test_an_engine_that_ends_loses_only_its_requests(make, monkeypatch, caplog):
    engine, fatal = make(), []
    engine.when_fatal(fatal.append)

    async def main():
        left = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        tasks = [asyncio.create_task(collect(engine, [10 + i] * 40, left)) for i in range(8)]
        await until(lambda: all(engine.stats(index).generated_tokens > 8 for index in (0, 1)))
        assert [engine.stats(index).num_running for index in (0, 1)] == [4, 4]
        monkeypatch.setattr(engine.engines[1], "step", lambda: 1 / 0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [result for result in results if isinstance(result, Exception)]
        assert len(failed) == 4
        assert all(isinstance(error, EngineError) and "has ended" in str(error) for error in failed)
        for i, result in enumerate(results):
            if not isinstance(result, Exception):
                assert result[-1].outputs[0].token_ids == alone([10 + i] * 40, 200, 97)
        with pytest.raises(EngineError, match="engine 1: the engine has ended"):
            await engine.check_health()
        assert not fatal
        for i in range(6):  # the next ones go to the other engine
            assert (await collect(engine, [i], GREEDY))[-1].outputs[0].token_ids == alone([i], 6, 97)
        await engine.pause_generation()
        await engine.resume_generation()
        with monkeypatch.context() as broken:
            broken.setattr(engine.engine.runner, "dispatch", lambda plan: 1 / 0)
            with pytest.raises(EngineError, match="a step failed"):
                await collect(engine, [1], GREEDY)
        for i in range(4):  # unhealthy, but not ended
            assert (await collect(engine, [i], GREEDY))[-1].finished
        monkeypatch.setattr(engine.engine, "step", lambda: 1 / 0)
        for _ in range(2):
            with pytest.raises(EngineError, match="has ended"):
                await collect(engine, [1], GREEDY)
        await until(lambda: fatal)

    asyncio.run(main())
    assert len(fatal) == 1
    assert "engine 1 has ended, 1 engines continue" in caplog.text


def test_after_a_failed_step_the_other_engine_is_preferred(make, monkeypatch):
    engine = make()

    async def main():
        assert (await collect(engine, [1] * 40))[-1].finished
        assert engine.stats(0).finished_requests == 1
        with monkeypatch.context() as broken:
            broken.setattr(engine.engine.runner, "dispatch", lambda plan: 1 / 0)
            with pytest.raises(EngineError, match="a step failed"):
                await collect(engine, [1] * 40)
        with pytest.raises(EngineError, match="engine 0: a step failed"):
            await engine.check_health()
        assert (await collect(engine, [1] * 40))[-1].finished
        assert engine.stats(1).finished_requests == 1
        monkeypatch.setattr("jpaged.frontend.engine_turns.RETRY_SECONDS", 0)
        assert (await collect(engine, [1] * 40))[-1].finished
        assert engine.stats(0).finished_requests == 3
        await engine.check_health()

    asyncio.run(main())


def test_admin_calls_reach_all_engines(make):
    engine = make("round_robin")

    async def main():
        tasks = [asyncio.create_task(collect(engine, [7] * 40, ENDLESS, f"r{i}")) for i in range(4)]
        await until(lambda: all(engine.stats(index).num_running == 2 for index in (0, 1)))
        assert [len((await engine.inspect(index)).running) for index in (0, 1)] == [2, 2]
        assert not await engine.reset_prefix_cache()
        await engine.abort(["r0", "r1"])
        for task in tasks[:2]:
            assert (await task)[-1].outputs[0].finish_reason == "abort"
        assert [engine.stats(index).num_running for index in (0, 1)] == [1, 1]
        await engine.pause_generation(mode="keep")
        assert await engine.is_paused()
        steps = engine.stats().steps
        late = [asyncio.create_task(collect(engine, [8], GREEDY)) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert engine.stats().steps == steps
        await engine.resume_generation()
        for task in late:
            assert (await task)[-1].outputs[0].token_ids == alone([8], 6, 97)
        await engine.sleep()
        for task in tasks[2:]:
            assert (await task)[-1].outputs[0].finish_reason == "abort"
        assert await engine.is_sleeping()
        assert all(each.runner.released for each in engine.engines)
        with pytest.raises(RequestError, match="wake it up"):
            await engine.resume_generation()
        await engine.wake_up()
        assert not await engine.is_sleeping()
        assert await engine.reset_prefix_cache()
        assert (await collect(engine, [8], GREEDY))[-1].finished

    asyncio.run(main())
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(collect(engine, [8], GREEDY))


def test_the_queue_is_full_when_those_of_all_engines_are(make):
    """The prompts begin alike, but the engine that they prefer is full first."""
    engine = make(max_queued_requests=1)
    rows, prompt = engine.engine.runner.max_num_seqs, [7] * 40

    async def main():
        def placed(count):
            """All requests have arrived, and on both engines those that wait found no row free.

            A step may have no tokens left for a prompt, which then waits although a row is free, and fills the queue.
            The next request would be refused. The queue looks full until the step after the next.
            """
            each = [engine.stats(i) for i in (0, 1)]
            room = any(thread.arrivals.has_room(40) for thread in engine._engine_thread.threads)
            settled = all(stats.num_waiting == 0 or stats.num_running == rows for stats in each)
            arrived = sum(stats.num_running + stats.num_waiting for stats in each)
            return settled and arrived == count and room == (count < 2 * rows + 2)

        tasks = []
        for count in range(1, 2 * rows + 3):
            tasks.append(asyncio.create_task(collect(engine, prompt, ENDLESS)))
            await until(lambda count=count: placed(count))
        await until(lambda: engine.stats().num_running == 2 * rows)
        assert [engine.stats(index).num_waiting for index in (0, 1)] == [1, 1]
        with pytest.raises(CapacityError, match="max_queued_requests"):
            await collect(engine, prompt, ENDLESS)
        assert sum(engine.metrics(index).rejected_requests for index in (0, 1)) == 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


def test_an_interrupt_ends_a_call_on_all_engines(make):
    """It is raised where the call waits. The threads have ended then, and the next call runs."""
    llm = make(kind=LLM, count=3)
    prompts, long = [[i] for i in range(9)], SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)

    class Bar:
        def __init__(self, total):
            self.total = total

        def set_postfix_str(self, text):
            assert "tokens/s" in text

        def update(self, count):
            raise KeyboardInterrupt

        def close(self):
            seen.append([thread.name for thread in threading.enumerate() if "jpaged-engine-" in thread.name])

    seen = []
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, [GREEDY, *[long] * 8], use_tqdm=Bar)
    assert seen == [[]]
    assert llm.stats().num_running == 0
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [alone([i], 6, 97) for i in range(9)]
    assert [llm.stats(index).num_running for index in range(3)] == [0, 0, 0]


def test_each_engine_is_shown_while_a_call_runs(make):
    llm = make(kind=LLM)
    long = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    calls = threading.Thread(target=lambda: llm.generate([[1], [2], [3]], [GREEDY, long, GREEDY], use_tqdm=False))
    calls.start()
    while not llm.stats(1).num_running:  # the first and the third request are on the first engine
        time.sleep(0.001)
    shown = [llm.inspect(index) for index in (0, 1)]
    assert calls.is_alive()
    calls.join()
    assert [request.request_id for request in shown[1].running] == ["1"]
    assert [(each.engine, each.num_engines) for each in shown] == [(0, 2), (1, 2)]


# -- devices


def found_devices(count, monkeypatch, platform="gpu", kind="H100", processes=1):
    found = [
        types.SimpleNamespace(platform=platform, device_kind=kind, process_index=i * processes // count)
        for i in range(count)
    ]
    monkeypatch.setattr(engine_devices, "jax", types.SimpleNamespace(devices=lambda: found))
    return found


@pytest.mark.parametrize(
    ("found", "engines", "size", "says"),
    [
        (4, 3, 2, "needs 6 devices, there are 4 .H100.: use data_parallel_size=2 or tensor_parallel_size=1$"),
        (4, 8, 1, "needs 8 devices, there are 4 .H100.: use data_parallel_size=4$"),
        (2, 4, 4, "there are 2 .H100.: use data_parallel_size=2 and tensor_parallel_size=1$"),
    ],
)
def test_too_few_accelerators_are_refused_with_sizes_that_fit(found, engines, size, says, monkeypatch):
    found_devices(found, monkeypatch)
    with pytest.raises(ModelLoadError, match=says):
        LLM("nowhere", data_parallel_size=engines, tensor_parallel_size=size)  # before the model is looked for


def test_each_engine_has_devices_of_its_own_on_accelerators(monkeypatch):
    a, b, c, d = found_devices(4, monkeypatch)
    config = EngineConfig(model="x", data_parallel_size=2, tensor_parallel_size=2)
    assert devices_of_engines(config, live=False) == [(a, b), (c, d)]
    with pytest.raises(ModelLoadError, match="live arrays are used without a copy"):
        devices_of_engines(config, live=True)


def test_only_engines_on_one_cpu_device_share_it(monkeypatch):
    """With several devices each, their sums over devices would wait for each other."""
    found_devices(2, monkeypatch, "cpu", "cpu")
    config = EngineConfig(model="x", data_parallel_size=3)
    assert devices_of_engines(config, live=False) is None
    assert devices_of_engines(config, live=True) is None
    with pytest.raises(ModelLoadError, match=r"use data_parallel_size=1, or set .*device_count=6$"):
        devices_of_engines(dataclasses.replace(config, tensor_parallel_size=2), live=False)


def test_several_processes_are_refused(monkeypatch):
    found_devices(4, monkeypatch, processes=2)
    with pytest.raises(ModelLoadError, match="all engines run in one process"):
        devices_of_engines(EngineConfig(model="x", data_parallel_size=2), live=False)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"data_parallel_size": 0}, "must be a number of engines, from 1"),
        ({"data_parallel_size": 2, "nnodes": 2, "tensor_parallel_size": 2}, "all engines are in one process"),
        ({"data_parallel_routing": "random"}, "must be prefix_affine, least_loaded, round_robin"),
    ],
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(RequestError, match=says):
        LLM("nowhere", **options)
