"""Pause, sleep and the watchdog of AsyncLLM, on the runner in plain Python. It loses all KV when the engine sleeps."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from jpaged import AsyncLLM, CapacityError, EngineError, NoWeightsError, RequestError, SamplingParams
from jpaged.engine.engine import Engine
from jpaged.engine.engine_options import EngineOptions
from jpaged.engine.scheduling.scheduling_options import SchedulingOptions
from jpaged.frontend.build import BuiltEngine
from jpaged.frontend.engine_config import engine_config
from jpaged.frontend.pausing import UpdateMode
from tests.engine.fake_runner import FakeRunner, alone
from tests.support.slow_runner import SlowRunner, last, started, until, until_idle

LONG = SamplingParams(temperature=0, max_tokens=60)
SHORT = SamplingParams(temperature=0, max_tokens=4)


def built(runner: FakeRunner, options: EngineOptions = EngineOptions()) -> Any:
    def build(model: Any, params: Any, engine_options: Any, **how: Any) -> BuiltEngine:
        return BuiltEngine(Engine(runner, None, options), engine_config(model, engine_options), None, None, SHORT)

    return build


@pytest.fixture
def runner() -> SlowRunner:
    return SlowRunner(max_model_len=2000, num_blocks=2000)


@pytest.fixture
def engine(runner: SlowRunner, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncLLM]:
    monkeypatch.setattr("jpaged.async_llm.build_engine", built(runner))
    engine = AsyncLLM("model", watchdog_seconds=0.2)
    yield engine
    engine.close()


async def answer_as_if_alone(tasks: list[asyncio.Task]) -> None:
    """The requests of `started` end with the tokens that they have alone."""
    for i, answer in enumerate(await asyncio.gather(*tasks)):
        assert answer.token_ids == alone([i, i + 1, 7], 60, 97)


async def stands_still(engine: AsyncLLM) -> None:
    """No step runs, and the engine is healthy."""
    steps = engine.stats().steps
    await asyncio.sleep(0.03)
    assert engine.stats().steps == steps
    await engine.check_health()


def sleep_states(engine: AsyncLLM) -> dict[str, float]:
    """Return vLLM's metric of the engine's sleep by state."""
    found = [metric for metric in engine.get_metrics() if metric.name == "vllm:engine_sleep_state"]
    return {metric.labels["sleep_state"]: metric.value for metric in found}


@pytest.mark.parametrize("freed", [False, True])
def test_kept_requests_continue_with_the_same_tokens(engine, runner, freed):
    async def main() -> None:
        tasks = await started(engine, 6, LONG)  # two of them wait for a row
        stop = engine.sleep(mode="keep") if freed else engine.pause_generation(mode="keep", clear_cache=False)
        await stop
        assert runner.released == freed
        assert await engine.is_paused()
        assert await engine.is_sleeping() == freed
        late = asyncio.create_task(last(engine, [50, 51], SHORT))
        await stands_still(engine)
        assert not late.done()
        if freed:
            with pytest.raises(RequestError, match="wake it up"):
                await engine.resume_generation()
            assert sleep_states(engine) == {"awake": 0, "weights_offloaded": 1, "discard_all": 0}
            await engine.wake_up(["weights"])
            assert await engine.is_sleeping()
            assert sleep_states(engine) == {"awake": 0, "weights_offloaded": 0, "discard_all": 0}
            await engine.wake_up(["kv_cache"])
        else:
            await engine.resume_generation()
        assert not await engine.is_paused()
        assert sleep_states(engine) == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        await answer_as_if_alone(tasks)
        assert (await late).token_ids == alone([50, 51], 4, 97)
        await until_idle(engine)

    asyncio.run(asyncio.wait_for(main(), 20))
    engine.engine.check_integrity()


@pytest.mark.parametrize("awake_first", [pytest.param(False, marks=pytest.mark.slow), True])
def test_without_weights_kept_requests_wait_and_new_ones_are_refused(engine, runner, awake_first):
    async def main() -> None:
        tasks = await started(engine, 6, LONG)
        await engine.sleep(level=2, mode="keep")
        assert runner.weights_problem()
        late = asyncio.create_task(last(engine, [50, 51], SHORT))  # waits, as at level 1
        await stands_still(engine)
        assert sleep_states(engine) == {"awake": 0, "weights_offloaded": 0, "discard_all": 1}
        if awake_first:
            await engine.wake_up()
            assert not await engine.is_sleeping()
            assert await engine.is_paused()
            assert sleep_states(engine) == {"awake": 0, "weights_offloaded": 0, "discard_all": 1}
            with pytest.raises(NoWeightsError, match="no weights: call update_weights"):
                await last(engine, [60, 61], SHORT)
            with pytest.raises(NoWeightsError):
                await engine.resume_generation()
            await stands_still(engine)
        await asyncio.wrap_future(engine._engine_thread.update_weights([lambda: (1, 1)], UpdateMode.KEEP, "new"))
        if not awake_first:
            await stands_still(engine)
            await engine.wake_up()
        assert sleep_states(engine) == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        await answer_as_if_alone(tasks)
        assert (await late).token_ids == alone([50, 51], 4, 97)
        await until_idle(engine)

    asyncio.run(asyncio.wait_for(main(), 20))
    engine.engine.check_integrity()


@pytest.mark.parametrize("freed", [False, True])
def test_abort_ends_running_requests_and_holds_new_ones(engine, runner, freed):
    async def main() -> None:
        tasks = await started(engine, 6, LONG)
        await (engine.sleep() if freed else engine.pause_generation())
        assert [answer.finish_reason for answer in await asyncio.gather(*tasks)] == ["abort"] * 6
        assert engine.stats().used_blocks == 0
        late = asyncio.create_task(last(engine, [50, 51], SHORT))
        leaving = asyncio.create_task(last(engine, [52, 53], SHORT))
        await stands_still(engine)
        leaving.cancel()  # a request that is held can be aborted
        await asyncio.sleep(0.01)
        await (engine.wake_up() if freed else engine.resume_generation())
        assert (await late).token_ids == alone([50, 51], 4, 97)
        await until_idle(engine)
        assert engine.stats().finished_requests == 8

    asyncio.run(asyncio.wait_for(main(), 20))


def test_wait_lets_running_requests_finish(engine):
    async def main() -> None:
        tasks = await started(engine, 3, LONG)
        pausing = asyncio.create_task(engine.pause_generation(mode="wait"))
        await asyncio.sleep(0.01)
        late = asyncio.create_task(last(engine, [50, 51], SHORT))
        assert not pausing.done()
        assert [len(answer.token_ids) for answer in await asyncio.gather(*tasks)] == [60] * 3
        await pausing
        assert not late.done()
        await engine.resume_generation()
        assert (await late).token_ids == alone([50, 51], 4, 97)
        tasks = await started(engine, 1, LONG)
        pausing = asyncio.create_task(engine.pause_generation(mode="wait"))
        await asyncio.sleep(0.01)
        await engine.resume_generation()
        with pytest.raises(RequestError, match="before its requests had finished"):
            await pausing
        await asyncio.gather(*tasks)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_held_requests_of_a_closed_loop_are_dropped(engine, monkeypatch):
    """The engine refuses the first request, and its loop is closed. The second would run without a reader."""
    loop, add, calls = asyncio.new_event_loop(), engine.engine.add, []

    def refuse_first(request_group):
        calls.append(request_group)
        if len(calls) == 1:
            raise CapacityError("full")
        add(request_group)

    loop.run_until_complete(engine.pause_generation())
    tasks = [loop.create_task(last(engine, [i, 7], SHORT)) for i in (1, 2)]
    loop.run_until_complete(until(lambda: len(engine._engine_thread._requests.held) == 2))
    loop.close()
    monkeypatch.setattr(engine.engine, "add", refuse_first)
    asyncio.run(engine.resume_generation())
    assert asyncio.run(last(engine, [3, 7], SHORT)).token_ids == alone([3, 7], 4, 97)
    assert len(calls) == len(tasks)  # the first, and the new request


def test_a_paused_engine_can_be_closed(engine, runner):
    async def main() -> None:
        tasks = await started(engine, 2, LONG)
        await engine.sleep(mode="keep")
        tasks.append(asyncio.create_task(last(engine, [50, 51], SHORT)))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.close)
        assert [answer.finish_reason for answer in await asyncio.gather(*tasks)] == ["abort"] * 3

    asyncio.run(asyncio.wait_for(main(), 20))
    assert runner.closed


def test_a_failed_sleep_answers_every_pause_that_waits(engine, runner):
    async def main() -> None:
        tasks = await started(engine, 2, LONG)
        runner.release = lambda **_: 1 / 0
        pauses = [asyncio.create_task(engine.sleep(mode="wait")), asyncio.create_task(engine.sleep(mode="wait"))]
        ends = await asyncio.gather(*pauses, *tasks, return_exceptions=True)
        assert [type(end) for end in ends[:2]] == [EngineError] * 2

    asyncio.run(asyncio.wait_for(main(), 20))


def test_the_prefix_cache_can_be_reset_while_requests_run(engine):
    async def main() -> None:
        tasks = await started(engine, 3, LONG)
        assert not await engine.reset_prefix_cache()
        assert await engine.reset_prefix_cache(reset_running_requests=True)
        await answer_as_if_alone(tasks)

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda engine: engine.sleep(3), "must be 0"),
        (lambda engine: engine.sleep(True), "must be 0"),
        (lambda engine: engine.sleep(1, "later"), "abort, wait, keep"),
        (lambda engine: engine.pause_generation(mode=""), "abort, wait, keep"),
        (lambda engine: engine.wake_up(["kv"]), "weights and kv_cache"),
    ],
)
def test_bad_arguments(engine, call, match):
    with pytest.raises(RequestError, match=match):
        asyncio.run(call(engine))
    assert not asyncio.run(engine.is_paused())


def test_a_full_queue_refuses_while_a_step_runs(runner, monkeypatch):
    """The refusal does not wait for the end of the step, and a free queue accepts again."""
    options = EngineOptions(scheduling=SchedulingOptions(max_queued_requests=2))
    monkeypatch.setattr("jpaged.async_llm.build_engine", built(runner, options))
    engine = AsyncLLM("model")

    async def main() -> float:
        tasks = await started(engine, 4, LONG)
        tasks += [asyncio.create_task(last(engine, [i], SHORT)) for i in (50, 51)]
        await until(lambda: engine.stats().num_waiting == 2)
        runner.seconds = 1.0
        await asyncio.sleep(0.1)  # a step runs
        slowest = 0.0
        for _ in range(20):
            began = time.monotonic()
            with pytest.raises(CapacityError, match="max_queued_requests is 2"):
                await last(engine, [60, 61], SHORT)
            slowest = max(slowest, time.monotonic() - began)
        runner.seconds = 0.001
        await asyncio.gather(*tasks)
        assert (await last(engine, [60, 61], SHORT)).token_ids == alone([60, 61], 4, 97)
        return slowest

    try:
        assert asyncio.run(asyncio.wait_for(main(), 20)) < 0.2  # measured: 1 ms
    finally:
        engine.close()


def test_a_step_that_fills_the_queue_refuses_no_request_that_came_before(runner, monkeypatch):
    """Long prompts are computed one after the other. The second one waits, and fills the queue, when the step ends."""
    options = EngineOptions(scheduling=SchedulingOptions(max_queued_requests=1))
    monkeypatch.setattr("jpaged.async_llm.build_engine", built(runner, options))
    steps, collect = threading.Semaphore(0), runner.collect
    monkeypatch.setattr(runner, "collect", lambda handle: steps.acquire() and collect(handle))
    engine, prompts = AsyncLLM("model"), [[i] * 80 for i in range(4)]

    async def main() -> None:
        tasks = []
        for i in range(3):  # the third comes while the step runs that leaves the second waiting
            tasks.append(asyncio.create_task(last(engine, prompts[i], SHORT)))
            await asyncio.sleep(0.05)  # it is submitted, and the thread waits in a step
            if i:
                steps.release()
            await until(lambda i=i: (engine.stats().num_running, engine.stats().num_waiting) == (1, i))
        with pytest.raises(CapacityError, match="max_queued_requests is 1"):
            await last(engine, prompts[3], SHORT)
        steps.release(1000)
        for task, prompt in zip(tasks, prompts, strict=False):
            assert (await task).token_ids == alone(prompt, 4, 97)

    try:
        asyncio.run(asyncio.wait_for(main(), 20))
    finally:
        steps.release(1000)
        engine.close()


@pytest.mark.parametrize("leaves", [False, True])
def test_a_request_counts_as_queued_before_it_is_added(runner, monkeypatch, leaves):
    """Its prompt may be computed on another engine first, or its programs compiled."""
    options = EngineOptions(scheduling=SchedulingOptions(max_queued_requests=1))
    monkeypatch.setattr("jpaged.async_llm.build_engine", built(runner, options))
    engine, early = AsyncLLM("model"), [70, 71]

    async def main() -> None:
        ready, wait = asyncio.Event(), engine._wait_for_programs

        async def compiled(group: Any, thread: Any) -> None:
            if group.prompt_token_ids == early:
                await ready.wait()
            await wait(group, thread)

        monkeypatch.setattr(engine, "_wait_for_programs", compiled)
        first = asyncio.create_task(last(engine, early, SHORT))
        await asyncio.sleep(0.05)
        tasks = await started(engine, 4, LONG)  # all rows
        with pytest.raises(CapacityError, match="max_queued_requests is 1"):
            await last(engine, [60, 61], SHORT)
        if leaves:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            tasks.append(asyncio.create_task(last(engine, [60, 61], SHORT)))
        else:
            ready.set()
            assert (await first).token_ids == alone(early, 4, 97)
        await asyncio.gather(*tasks)
        assert engine.stats().num_waiting == 0

    try:
        asyncio.run(asyncio.wait_for(main(), 20))
    finally:
        engine.close()


def test_held_requests_count_as_queued(runner, monkeypatch):
    options = EngineOptions(scheduling=SchedulingOptions(max_queued_requests=2))
    monkeypatch.setattr("jpaged.async_llm.build_engine", built(runner, options))
    engine = AsyncLLM("model")

    async def main() -> None:
        await engine.pause_generation()
        work = [asyncio.create_task(last(engine, [i, 1], SHORT)) for i in range(10)]
        await asyncio.sleep(0.05)
        refused = [task for task in work if task.done()]
        assert len(refused) == 4  # four rows and two places in the queue
        for task in refused:
            assert isinstance(task.exception(), CapacityError)
        await engine.resume_generation()
        for task in work:
            if task not in refused:
                assert len((await task).token_ids) == 4

    try:
        asyncio.run(asyncio.wait_for(main(), 20))
    finally:
        engine.close()


def test_an_engine_that_still_compiles_does_not_sleep(engine, runner):
    runner.is_ready = False
    with pytest.raises(CapacityError, match="programs are being compiled"):
        asyncio.run(engine.sleep())
    assert not asyncio.run(engine.is_paused())


@pytest.mark.slow
def test_the_watchdog_says_what_a_stuck_step_does(engine, runner, caplog):
    async def main() -> None:
        async with aclosing(engine.generate([1, 2, 3], LONG)) as stream:
            await anext(stream)
            runner.seconds = 1.0
            await until(lambda: "a step has run for" in caplog.text)
            with pytest.raises(EngineError, match="no step has ended"):
                await engine.check_health()
            runner.seconds = 0.001
            await until(lambda: "has ended after" in caplog.text)
        await until_idle(engine)
        await engine.check_health()

    asyncio.run(asyncio.wait_for(main(), 20))
    (said,) = [record.getMessage() for record in caplog.records if "a step has run" in record.getMessage()]
    assert "collect for" in said
    assert "of fake step" in said
    assert "with 1 rows (1 decodes) and 1 tokens" in said
    assert "in collect" in said  # the stack of the engine's thread


def test_a_fatal_error_calls_back_once(engine, monkeypatch):
    errors: list[EngineError] = []
    engine.when_fatal(errors.append)

    async def main() -> None:
        monkeypatch.setattr(engine.engine.scheduler, "results", lambda *args: 1 / 0)
        with pytest.raises(EngineError, match="division by zero"):
            await last(engine, [1], SHORT)

    asyncio.run(main())
    asyncio.run(until(lambda: bool(errors)))
    assert len(errors) == 1
    engine.when_fatal(errors.append)  # it has ended already
    assert errors[1] is errors[0]


def test_closing_is_not_fatal(engine):
    errors: list[EngineError] = []
    engine.when_fatal(errors.append)
    engine.close()
    assert not errors
