"""`update_weights` of LLM and AsyncLLM: what running requests do, and the version in every output."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, AsyncLLM, EngineError, ModelLoadError, NoWeightsError, RequestError, SamplingParams
from jpaged.engine.engine import Engine
from jpaged.frontend.build import BuiltEngine
from jpaged.frontend.engine_config import engine_config
from jpaged.frontend.engine_threads import EngineThreads
from jpaged.frontend.pausing import UpdateMode, check_version
from jpaged.models.spec import DecoderSpec, Rope
from tests.engine.fake_runner import FakeRunner, alone
from tests.support.random_decoder import random_params
from tests.support.slow_runner import SlowRunner, last, started, until_idle
from tests.support.tiny_engine import sampling_programs

LONG = SamplingParams(temperature=0, max_tokens=60)
SHORT = SamplingParams(temperature=0, max_tokens=4)


class NumberUpdater:
    """Makes the leaves of FakeRunner's weights, which are numbers."""

    def prepare(self, weights: Any, layout: Any) -> list[Any]:
        if weights < 0:
            raise ModelLoadError("params.embed is missing")
        return [lambda: [weights, weights]]


@pytest.fixture
def runner() -> SlowRunner:
    return SlowRunner(max_model_len=2000, num_blocks=2000)


@pytest.fixture
def engine(runner: SlowRunner, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncLLM]:
    def build(model: Any, params: Any, options: Any, **how: Any) -> BuiltEngine:
        config = engine_config(model, options)
        return BuiltEngine(Engine(runner), config, None, None, SHORT, updater=NumberUpdater())

    monkeypatch.setattr("jpaged.async_llm.build_engine", build)
    engine = AsyncLLM("model")
    yield engine
    engine.close()


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort", "wait"])
def test_running_requests(engine: AsyncLLM, runner: SlowRunner, mode: str):
    async def main() -> None:
        tasks = await started(engine, 4, LONG)
        updating = asyncio.create_task(engine.update_weights(1, mode=mode, version="step-1"))
        if mode == "wait":
            await asyncio.sleep(0.01)
            late = asyncio.create_task(last(engine, [50, 51], SHORT))
            assert not updating.done()
        else:
            await updating
            late = asyncio.create_task(last(engine, [50, 51], SHORT))
        for i, answer in enumerate(await asyncio.gather(*tasks)):
            tokens = alone([i, i + 1, 7], 60, 97)
            assert answer.token_ids == tokens[: len(answer.token_ids)]
            if mode in ("keep", "recompute"):
                assert answer.token_ids == tokens
                first, second = answer.weight_changes
                assert first == (0, 0)
                assert 0 < second[0] < 60
                assert second[1] == answer.weight_version == "step-1"
            else:
                assert answer.finish_reason == ("abort" if mode == "abort" else "length")
                assert answer.weight_changes == ((0, 0),)
        result = await updating
        assert (result.version, engine.weight_version) == ("step-1", "step-1")
        answer = await late
        assert answer.token_ids == alone([50, 51], 4, 97)
        assert answer.weight_changes == ((0, "step-1"),)
        assert engine.stats().preemptions == (4 if mode == "recompute" else 0)
        await until_idle(engine)

    run(main)
    engine.engine.check_integrity()


def test_a_waiting_update_and_a_pause(engine: AsyncLLM):
    async def main() -> None:
        tasks = await started(engine, 2, LONG)
        await engine.pause_generation(mode="keep", clear_cache=False)
        with pytest.raises(RequestError, match="the engine is paused with running requests"):
            await engine.update_weights(1, mode="wait")
        await engine.update_weights(1)
        await engine.resume_generation()
        updating = asyncio.create_task(engine.update_weights(2, mode="wait"))
        await asyncio.sleep(0.01)
        await engine.pause_generation(mode="abort")  # the last request ends, and the update begins
        assert (await updating).version == 2
        late = asyncio.create_task(last(engine, [50, 51], SHORT))
        await asyncio.sleep(0.01)
        assert not late.done()
        await engine.resume_generation()
        assert (await late).weight_changes == ((0, 2),)
        assert all(task.done() for task in tasks)

    run(main)


def test_refused_and_failed_updates(engine: AsyncLLM, runner: SlowRunner):
    async def main() -> None:
        [task] = await started(engine, 1, LONG)
        with pytest.raises(ModelLoadError, match="embed is missing"):
            await engine.update_weights(-1)
        with pytest.raises(RequestError, match="mode must be one of"):
            await engine.update_weights(1, mode="later")
        with pytest.raises(RequestError, match="version must be an integer or a text"):
            await engine.update_weights(1, version=1.5)
        with pytest.raises(RequestError, match="version must not be empty"):
            await engine.update_weights(1, version="")
        assert engine.weight_version == 0
        too_many = engine._engine_thread.update_weights([lambda: [1, 1, 1]], UpdateMode.KEEP, None)
        with pytest.raises(ValueError, match="too many values"):  # in the middle
            await asyncio.wrap_future(too_many)
        assert "half of the weights" in str(engine.weights_problem)
        with pytest.raises(EngineError, match="half of the weights"):
            await task
        with pytest.raises(EngineError, match="half of the weights"):
            await last(engine, [50, 51], SHORT)
        assert (await engine.update_weights(2)).version == 1
        assert (await last(engine, [50, 51], SHORT)).weight_version == 1

    run(main)


SPEC = DecoderSpec(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position=256, rope=Rope(),
)  # fmt: skip
OPTIONS = {
    "max_num_seqs": 8, "row_buckets": (8,), "max_num_batched_tokens": 64, "token_buckets": (64,), "block_size": 16,
    "kv_cache_memory_bytes": 1 << 22,
}  # fmt: skip


def test_live_arrays_of_two_engines():
    """Both engines use the caller's buffers, before and after. Each new tree gives other answers."""
    trees = [random_params(SPEC, seed) for seed in range(2)]
    prompts = [[*range(40), i] for i in range(4)]
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with sampling_programs(), LLM(SPEC, params=trees[0], data_parallel_size=2, **OPTIONS) as llm:
        answers = []
        for number, tree in enumerate([*trees, trees[0]]):
            if number:
                result = llm.update_weights(tree, version=7 if number == 2 else None)
                assert (result.copied_bytes, result.num_by_reference) == (0, result.num_leaves)
                assert result.version == llm.weight_version == (7 if number == 2 else 1)
            for engine in llm.engines:
                pairs = zip(jax.tree.leaves(engine.runner.params), jax.tree.leaves(tree), strict=True)
                assert all(a.unsafe_buffer_pointer() == b.unsafe_buffer_pointer() for a, b in pairs)
            answers.append([out.outputs[0] for out in llm.generate(prompts, greedy, use_tqdm=False)])
        assert [a.weight_version for each in answers for a in each] == [0] * 4 + [1] * 4 + [7] * 4
        tokens = [[answer.token_ids for answer in each] for each in answers]
        assert tokens[0] == tokens[2] != tokens[1]
        assert llm.stats().compiles_after_ready == 0
        with pytest.raises(RequestError, match="a call inside a function that JAX traces"):
            jax.jit(llm.update_weights)(trees[1])
        with pytest.raises(RequestError, match="weights: the dictionary is empty"):
            llm.update_weights({})
        with pytest.raises(ModelLoadError, match="all arrays must have one dtype"):
            llm.update_weights(trees[1] | {"final_norm": jnp.ones(64, np.float16)})
        jax.tree.map(lambda leaf: leaf.delete(), trees[0])
        with pytest.raises(EngineError, match="the weights were deleted"):
            llm.generate(prompts, greedy, use_tqdm=False)
        llm.update_weights(trees[1])
        again = [out.outputs[0].token_ids for out in llm.generate(prompts, greedy, use_tqdm=False)]
        assert again == tokens[1]
        # The first engine has ended: the second one gets the caller's arrays, and not those of the first
        _, of_second = llm._prepared(random_params(SPEC, 3), None, None)
        wanted = jax.tree.leaves(random_params(SPEC, 3))
        llm.engines[1].flush()
        llm.engines[1].update_weights(of_second())
        for a, b in zip(jax.tree.leaves(llm.engines[1].runner.params), wanted, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_request_during_an_update_waits(engine: AsyncLLM, runner: SlowRunner):
    """Half of the new weights are in the engine: that is no reason to refuse it."""
    begun, goes_on = threading.Event(), threading.Event()

    def leaves() -> Iterator[int]:
        yield 1
        begun.set()
        goes_on.wait(60)
        yield 1

    async def main() -> None:
        updating = engine._engine_thread.update_weights([leaves], UpdateMode.KEEP, None)
        await asyncio.to_thread(begun.wait, 60)
        assert runner.weights_problem() is not None
        assert engine.weights_problem is None  # so that a load balancer keeps the server
        late = asyncio.create_task(last(engine, [50, 51], SHORT))
        await asyncio.sleep(0.01)
        assert not late.done()
        goes_on.set()
        assert (await asyncio.wrap_future(updating)).version == 1
        assert (await late).weight_changes == ((0, 1),)

    run(main)


def test_updates_of_several_engines_run_one_after_another():
    """The second engine copies the first one's weights, which must still be those of its own update."""
    order: list[str] = []
    threads = EngineThreads([Engine(FakeRunner()), Engine(FakeRunner())], "least_loaded")
    second_begins = threading.Event()

    def leaves(number: int, name: str) -> list[int]:
        order.append(name)
        if name == "b0":
            second_begins.set()
        if name == "a1":
            second_begins.wait(0.02)
        return [number, number]

    try:
        updates = [
            threads.update_weights([lambda: leaves(1, "a0"), lambda: leaves(1, "a1")], UpdateMode.KEEP, "a"),
            threads.update_weights([lambda: leaves(2, "b0"), lambda: leaves(2, "b1")], UpdateMode.KEEP, "b"),
        ]
        updates[0].cancel()  # its engines still get the same weights
        assert updates[1].result(60).version == "b"
    finally:
        threads.close()
    assert order == ["a0", "a1", "b0", "b1"]


@pytest.mark.parametrize("ended", [0, 1])
def test_an_update_goes_on_without_an_engine_that_has_ended(monkeypatch: pytest.MonkeyPatch, ended: int):
    """The version, and the reason to refuse requests, are those of the other engine."""
    engines = Engine(FakeRunner()), Engine(FakeRunner())

    class Updater:
        def prepare(self, weights: Any, layout: Any) -> list[Any]:
            return [lambda: [weights, weights]] * 2

    def build(model: Any, params: Any, options: Any, **how: Any) -> BuiltEngine:
        config = engine_config(model, options)
        return BuiltEngine(engines[0], config, None, None, SHORT, others=engines[1:], updater=Updater())

    monkeypatch.setattr("jpaged.async_llm.build_engine", build)
    engine = AsyncLLM("model", data_parallel_size=2, data_parallel_routing="round_robin")

    async def main() -> None:
        with monkeypatch.context() as broken:
            broken.setattr(engines[ended], "step", lambda: 1 / 0)
            results = [last(engine, [50 + i], SHORT) for i in range(2)]
            found = await asyncio.gather(*results, return_exceptions=True)
        assert sum(isinstance(one, EngineError) for one in found) == 1
        update = await engine.update_weights(1, version="new")
        assert update.version == engine.weight_version == "new"
        assert engines[ended].weight_version == 0
        assert engine.weights_problem is None
        assert (await last(engine, [60], SHORT)).weight_version == "new"

    try:
        run(main)
    finally:
        engine.close()


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize("moment", ["leaf of engine 0", "note of engine 0", "leaf of engine 1"])
def test_ctrl_c_during_an_update(monkeypatch: pytest.MonkeyPatch, moment: str):
    """All engines have the new weights and forget the old KV, or requests are refused."""
    engines = Engine(FakeRunner()), Engine(FakeRunner())
    note = Engine.note_new_weights

    def press(where: str) -> None:
        if where == moment:
            signal.raise_signal(signal.SIGINT)

    class PressingUpdater:
        def leaves(self, index: int) -> Iterator[int]:
            yield 1
            press(f"leaf of engine {index}")
            yield 1

        def prepare(self, weights: Any, layout: Any) -> list[Any]:
            return [lambda: self.leaves(0), lambda: self.leaves(1)]

    def pressed(engine: Engine, version: Any) -> None:
        press(f"note of engine {engines.index(engine)}")
        note(engine, version)

    def build(model: Any, params: Any, options: Any, **how: Any) -> BuiltEngine:
        config = engine_config(model, options)
        return BuiltEngine(engines[0], config, None, None, SHORT, others=engines[1:], updater=PressingUpdater())

    monkeypatch.setattr("jpaged.llm.build_engine", build)
    monkeypatch.setattr(Engine, "note_new_weights", pressed)
    with LLM("model") as llm:
        prompts = [[7] * 40, [8] * 40]
        llm.generate(prompts, SHORT, use_tqdm=False)
        with pytest.raises(KeyboardInterrupt):
            llm.update_weights(1)
        if moment == "leaf of engine 0":
            with pytest.raises(NoWeightsError):
                llm.generate(prompts, SHORT, use_tqdm=False)
        else:  # `FakeRunner` raises an error if a request finds KV of old weights
            versions = [out.outputs[0].weight_version for out in llm.generate(prompts, SHORT, use_tqdm=False)]
            assert versions == [engine.weight_version for engine in engines] == [1, 1]


def test_versions_that_utf_8_cannot_encode_are_refused():
    """Metrics, answers and names of KV contain the version."""
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        check_version("step \ud800")
