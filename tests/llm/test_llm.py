"""LLM and jpaged.generate, on the runner in plain Python that the engine's tests use."""

import gc
import itertools
import random
import re
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpaged
from jpaged import LLM, EngineConfig, EngineError, ModelLoadError, RequestError, SamplingParams, phases
from jpaged.engine.engine import Engine
from jpaged.engine.kv_cache.kv_cache_manager import KVCacheManager
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.strategies import SampleStrategy
from jpaged.frontend.build import BuiltEngine, build_engine
from jpaged.frontend.engine_config import engine_config
from jpaged.frontend.generation_defaults import generation_defaults
from tests.engine.fake_runner import FakeRunner, alone
from tests.support.ctrl_c import press_ctrl_c_during_generate

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
    """The runner that the next engine is built on."""
    runner = FakeRunner()

    def build(model: Any, params: Any, options: Any, **how: Any) -> BuiltEngine:
        config = engine_config(model, options)
        return BuiltEngine(Engine(runner), config, None, None, SamplingParams(temperature=0, max_tokens=3))

    monkeypatch.setattr("jpaged.llm.build_engine", build)
    return runner


@pytest.fixture
def llm(runner: FakeRunner) -> LLM:
    return LLM("model")


def test_results_are_in_the_order_of_the_prompts(llm: LLM):
    prompts = [[5], [1, 2, 3], {"prompt_token_ids": [9] * 30}, [1, 2, 3], np.array([4, 5])]
    params = [SamplingParams(temperature=0, max_tokens=20 - 4 * i) for i in range(5)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        token_ids = list(prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt)
        assert output.prompt_token_ids == token_ids
        assert output.outputs[0].token_ids == alone(token_ids, 20 - 4 * i, 97)
        assert output.finished


@pytest.mark.parametrize(
    "prompts", [[1, 2], {"prompt_token_ids": [1, 2]}, np.array([1, 2]), jnp.array([1, 2]), [[1, 2]], np.array([[1, 2]])]
)
def test_one_prompt_needs_no_list(llm: LLM, prompts: Any):
    (output,) = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == alone([1, 2], 6, 97)


def test_no_prompts_give_no_outputs(llm: LLM):
    assert llm.generate([]) == []


def test_defaults_are_the_models(llm: LLM):
    assert llm.get_default_sampling_params().max_tokens == 3
    assert len(llm.generate([1], use_tqdm=False)[0].outputs[0].token_ids) == 3


def test_a_bad_prompt_stops_the_batch_before_any_runs(llm: LLM, runner: FakeRunner):
    with pytest.raises(RequestError, match=r"prompt 1 of 3") as caught:
        llm.generate([[1], [97], []], GREEDY)
    assert (caught.value.parameter, caught.value.value) == ("prompt_token_ids", 97)
    assert runner.plans == []
    assert llm.stats().num_waiting == 0
    assert llm.generate([1], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == alone([1], 6, 97)


def test_a_refused_batch_does_not_change_later_draws(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    other = LLM("model")
    other._engine = Engine(FakeRunner())
    with pytest.raises(RequestError):
        llm.generate([[1], [97]], SamplingParams())
    assert (
        llm.generate([1], SamplingParams())[0].outputs[0].token_ids
        == other.generate([1], SamplingParams())[0].outputs[0].token_ids
    )


def test_sampling_params_and_prompts_must_match(llm: LLM):
    with pytest.raises(RequestError, match="2 values for 1 prompts"):
        llm.generate([[1]], [GREEDY, GREEDY])
    with pytest.raises(RequestError, match=r"must be a jpaged\.SamplingParams"):
        llm.generate([1], {"temperature": 0})


def test_progress_shows_tokens_and_kv(llm: LLM, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    llm.generate([[1], [2]], GREEDY)
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm.generate([[1], [2]], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tokens/s, KV 0%" in shown
    llm.generate([[1], [2]], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_a_progress_bar_of_the_caller(llm: LLM):
    from tqdm import tqdm

    made = []
    llm.generate([[1], [2]], GREEDY, use_tqdm=lambda total: made.append(tqdm(total=total, disable=True)) or made[0])
    assert made[0].total == 2


def test_an_interrupted_call_leaves_nothing_behind(llm: LLM, runner: FakeRunner):
    def interrupt(total: int) -> Any:
        class Bar:
            def update(self, count: int) -> None:
                raise KeyboardInterrupt

            def close(self) -> None:
                pass

        return Bar()

    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1] * 40, [2] * 40], GREEDY, use_tqdm=interrupt)
    stats = llm.stats()
    assert (stats.used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert llm.generate([1], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == alone([1], 6, 97)


def test_a_failed_step_is_an_error_and_the_next_call_is_served(llm: LLM, runner: FakeRunner):
    runner.fail_at = frozenset({("dispatch", 2)})
    with pytest.raises(EngineError, match="a step failed"):
        llm.generate([[i] for i in range(8)], GREEDY, use_tqdm=False)
    assert llm.stats().used_blocks == llm.stats().num_waiting == 0
    assert llm.generate([1], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == alone([1], 6, 97)


def test_threads_take_turns(llm: LLM):
    results: dict[int, list[int]] = {}

    def work(i: int) -> None:
        results[i] = llm.generate([i], GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: alone([i], 6, 97) for i in range(8)}


def test_stats_and_resets(llm: LLM):
    llm.generate([[1] * 20, [1] * 20], GREEDY, use_tqdm=False)
    llm.generate([[1] * 20], GREEDY, use_tqdm=False)
    assert llm.stats().prefix_hit_tokens >= 16
    assert llm.reset_prefix_cache()
    llm.reset_stats()
    llm.generate([[1] * 20], GREEDY, use_tqdm=False)
    stats = llm.stats()
    assert (stats.prefix_hit_tokens, stats.prompt_tokens, stats.compiles_after_ready) == (0, 20, 0)
    assert stats.peak_used_blocks == 7


def test_closing(runner: FakeRunner):
    with LLM("model") as llm:
        llm.generate([1], GREEDY, use_tqdm=False)
    assert runner.closed
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate([1])


def test_under_a_jax_transformation(llm: LLM):
    with pytest.raises(RequestError, match="traces"):
        jax.jit(lambda x: (llm.generate([1], GREEDY), x)[1])(1.0)
    with pytest.raises(RequestError, match="traced"):
        jax.vmap(lambda x: (llm.generate(x, GREEDY), x)[1])(jnp.ones((2, 3), int))


def test_a_slow_start_tells_its_phases_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    with phases.told_start(), phases.phase("quick"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(phases, "PATIENCE_SECONDS", 0.01)
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with phases.told_start():
            with phases.phase("weights and tokenizer"):
                time.sleep(0.05)
            with phases.phase("KV pool"):
                pass
        said = capsys.readouterr().err
        told = ["weights and tokenizer", "KV pool", "ready"] if terminal else []
        assert re.findall(r"^jpaged: start, 0 s: (.*)$", said, re.MULTILINE) == told


def test_generate_in_one_call(llm: LLM, runner: FakeRunner):
    assert jpaged.generate(llm, [1], GREEDY)[0].outputs[0].token_ids == alone([1], 6, 97)
    assert not runner.closed
    assert jpaged.generate("model", [1], GREEDY, max_num_seqs=4)[0].outputs[0].token_ids == alone([1], 6, 97)
    assert runner.closed
    with pytest.raises(RequestError, match=r"^max_num_seqs cannot be changed for an existing LLM.*, got 4"):
        jpaged.generate(llm, [1], GREEDY, max_num_seqs=4)
    with pytest.raises(RequestError, match="config, params"):
        jpaged.generate(("a", "b", "c"), [1])


def test_unknown_engine_options_are_refused_by_name():
    says = r"^max_seqs: unknown engine option; did you mean .*max_num_seqs.*, got 4"
    with pytest.raises(RequestError, match=says) as caught:
        LLM("nowhere", max_seqs=4)
    assert caught.value.parameter == "max_seqs"
    with pytest.raises(RequestError, match="there are model, tokenizer"):
        LLM("nowhere", xxxxxxxx=1)
    with pytest.raises(RequestError, match="together with params"):
        LLM({"model_type": "llama"})
    with pytest.raises(RequestError, match="name a folder"):
        LLM("")


def test_engine_config_is_made_of_the_options():
    assert engine_config("m", {"seed": 3}) == EngineConfig(model="m", seed=3)


class TestGenerationDefaults:
    """generation_config.json, as vLLM uses it."""

    def test_without_any(self):
        assert generation_defaults({"eos_token_id": 2}) == SamplingParams()

    def test_all_that_are_used(self):
        given = {
            "repetition_penalty": 1.1, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05,
            "max_new_tokens": 99, "do_sample": True,
        }  # fmt: skip
        assert generation_defaults(given) == SamplingParams(
            repetition_penalty=1.1, temperature=0.6, top_k=20, top_p=0.9, min_p=0.05, max_tokens=99
        )

    def test_null_means_the_default(self):
        assert generation_defaults({"repetition_penalty": None, "top_k": None}) == SamplingParams()

    def test_a_bad_value_is_a_bad_model(self):
        with pytest.raises(ModelLoadError, match=r"config.json: top_p must be a number in \(0, 1\], got 1.5"):
            generation_defaults({"top_p": 1.5})


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize("moment", range(12))
def test_after_ctrl_c_the_next_call_runs_normally(
    llm: LLM, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch, moment: int
):
    """Ctrl-C inside a step, at each step of a batch, is raised after the step: no table or index is half written."""
    prompts, greedy = [[i] * 9 for i in range(1, 7)], SamplingParams(temperature=0, max_tokens=8)
    other = LLM("model")  # on the same runner, which is closed when it is collected
    expected = [o.outputs[0].token_ids for o in other.generate(prompts, greedy, use_tqdm=False)]
    calls = itertools.count()
    dispatch = runner.dispatch

    def interrupted(plan: Any) -> Any:
        if next(calls) == moment:
            signal.raise_signal(signal.SIGINT)
        return dispatch(plan)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "dispatch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, greedy, use_tqdm=False)
    llm.engine.check_integrity()
    assert llm.stats().used_blocks == 0
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, use_tqdm=False)] == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_at_any_moment(llm: LLM):
    prompts, greedy = [[i] * 20 for i in range(1, 9)], SamplingParams(temperature=0, max_tokens=8)
    expected = [alone(prompt, 8, 97) for prompt in prompts]
    llm.generate(prompts, greedy, use_tqdm=False)
    moments = random.Random(0)
    for _ in range(60):
        press_ctrl_c_during_generate(llm, prompts, greedy, moments.random() * 0.01)
        llm.engine.check_integrity()
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, use_tqdm=False)] == expected


@pytest.mark.parametrize("call", ["add", "step"])
def test_an_interrupt_inside_a_call_of_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch, call: str):
    """The interrupt leaves inconsistent state: a request is in one table and not in the other."""
    inside = {"add": (Scheduler, "add"), "step": (KVCacheManager, "release")}[call]
    original = getattr(*inside)

    def cut(*args: Any, **options: Any) -> None:
        original(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*inside, cut)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1], [2], [3]], GREEDY, use_tqdm=False)
    llm.engine.check_integrity()
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.used_blocks) == (0, 0, 0)
    assert llm.generate([1], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == alone([1], 6, 97)


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_during_a_call_that_fails_is_raised(llm: LLM, runner: FakeRunner):
    def fail(plan: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        raise OSError("the device is gone")

    runner.dispatch = fail
    with pytest.raises(KeyboardInterrupt) as caught:
        llm.generate([1], GREEDY, use_tqdm=False)
    assert isinstance(caught.value.__context__, EngineError)


def test_after_an_interrupt_inside_the_device_the_next_call_runs_normally(llm: LLM, runner: FakeRunner):
    """A second Ctrl-C is raised at once. All KV is forgotten, so that no stale KV is found later."""
    prompts, greedy = [[7] * 20, [8] * 20], SamplingParams(temperature=0, max_tokens=4)
    other = LLM("model")  # on the same runner, which is closed when it is collected
    expected = [o.outputs[0].token_ids for o in other.generate(prompts, greedy, use_tqdm=False)]
    dispatch, calls = runner.dispatch, itertools.count()

    def fail(plan: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return dispatch(plan)

    runner.dispatch = fail
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, greedy, use_tqdm=False)
    runner.dispatch = dispatch
    llm.engine.check_integrity()
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert all(output.num_cached_tokens == 0 for output in outputs)


def test_an_output_that_cannot_be_processed_ends_its_own_request_only(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    take = SampleStrategy.take

    def fail(self: SampleStrategy, request: Any, *args: Any) -> Any:
        if request.prompt_token_ids[0] == 2 and request.num_output_tokens == 1:
            raise ValueError("a token that nobody expected")
        return take(self, request, *args)

    monkeypatch.setattr(SampleStrategy, "take", fail)
    outputs = llm.generate([[1], [2], [3]], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert llm.stats().used_blocks == 0


def test_an_unclosed_llm_is_garbage_collected_with_its_engine(runner: FakeRunner):
    llm = LLM("model")
    engine = weakref.ref(llm.engine)
    del llm
    gc.collect()
    assert engine() is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("row_buckets", 8), ("row_buckets", ("a",)), ("token_buckets", (0,)), ("enable_prefix_caching", "no"),
        ("seed", None), ("seed", "a"), ("gpu_memory_utilization", "x"), ("max_num_seqs", True), ("max_num_seqs", 8.0),
        ("tokenizer", 3), ("trust_remote_code", 1),
    ],
)  # fmt: skip
def test_options_of_the_wrong_type_are_refused_by_name(option: str, value: Any):
    with pytest.raises(RequestError, match=rf"^{option} must be .*, got "):
        engine_config("model", {option: value})


def test_options_may_be_numpy_scalars_and_the_model_a_path(tmp_path: Path):
    assert type(engine_config("model", {"max_num_seqs": np.int64(4)}).max_num_seqs) is int
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        build_engine(tmp_path, None, {}, progress=False)


@pytest.mark.parametrize(
    "nested",
    [
        lambda llm: llm.generate([1], GREEDY),
        lambda llm: llm.score([[1, 2]]),
        lambda llm: llm.embed([1]),
        lambda llm: llm.reset_prefix_cache(),
        lambda llm: llm.inspect(),
        lambda llm: llm.close(),
    ],
    ids=["generate", "score", "embed", "reset", "inspect", "close"],
)
def test_a_call_inside_a_callback_is_refused(llm: LLM, nested: Any):
    """It would wait for the lock that its own thread holds."""

    class Bar:
        def update(self, count: int) -> None:
            nested(llm)

        def set_postfix_str(self, text: str) -> None:
            pass

        def close(self) -> None:
            pass

    with pytest.raises(EngineError, match="inside a call of this LLM"):
        run_in_daemon(lambda: llm.generate([[1], [2]], GREEDY, use_tqdm=lambda total: Bar()))
    assert llm.generate([1], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == alone([1], 6, 97)


def run_in_daemon(call: Any) -> None:
    """Run a call in a daemon thread, so that a deadlock fails the test and does not stop it. Raises its error."""
    errors: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            errors.append(None)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(5)
    assert errors, "the call does not end"
    if errors[0] is not None:
        raise errors[0]


def test_inspect_between_calls_and_from_another_thread(llm: LLM, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch):
    """Another thread sees the requests of a call before the call ends."""
    assert llm.inspect().running == ()
    collect, seen, reached = runner.collect, [], threading.Event()

    def slow(handle: Any) -> Any:
        if handle.number == 3:
            reached.set()
            asking.join(0.2)  # it cannot be answered in the middle of a step
            assert asking.is_alive()
        return collect(handle)

    monkeypatch.setattr(runner, "collect", slow)

    def ask() -> None:
        assert reached.wait(5)
        seen.append(llm.inspect())

    asking = threading.Thread(target=ask)
    asking.start()
    outputs = llm.generate([[1, 2, 3], [4]], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    asking.join(5)
    assert [output.outputs[0].token_ids for output in outputs] == [alone([1, 2, 3], 30, 97), alone([4], 30, 97)]
    (snapshot,) = seen
    assert [request.prompt_tokens for request in snapshot.running] == [3, 1]
    assert all(4 <= request.output_tokens <= 6 for request in snapshot.running)
    after = llm.inspect()
    assert (after.running, after.pool.used_blocks) == ((), 0)
    assert after.pool.cached_blocks > 0
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.inspect()
