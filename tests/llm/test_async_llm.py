"""AsyncLLM, on the runner in plain Python that the engine's tests use."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from jpaged import AsyncLLM, CapacityError, EngineError, RequestError, RequestOutput, SamplingParams
from jpaged.engine.engine import Engine
from jpaged.engine.request import Request
from jpaged.engine.step_plan import SamplerVariant
from jpaged.frontend.build import BuiltEngine
from jpaged.frontend.engine_config import engine_config
from jpaged.requester import Requester, current_client
from tests.engine.fake_runner import FakeRunner, alone
from tests.support.slow_runner import SlowRunner, collect, until, until_idle

GREEDY = SamplingParams(temperature=0, max_tokens=6)
ENDLESS = SamplingParams(temperature=0, max_tokens=None)


@pytest.fixture
def runner() -> FakeRunner:
    return SlowRunner(max_model_len=2000, num_blocks=2000)


@pytest.fixture
def fake_build(runner: FakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines run on `runner`."""

    def build(model: Any, params: Any, options: Any, **how: Any) -> BuiltEngine:
        return BuiltEngine(Engine(runner), engine_config(model, options), None, None, GREEDY)

    monkeypatch.setattr("jpaged.async_llm.build_engine", build)


@pytest.fixture
def engine(fake_build: None) -> Iterator[AsyncLLM]:
    engine = AsyncLLM("model")
    yield engine
    engine.close()


def test_outputs_grow_to_the_answer(engine: AsyncLLM):
    outputs = asyncio.run(collect(engine, [1, 2, 3], GREEDY, "mine"))
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(set(lengths))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].outputs[0].token_ids == alone([1, 2, 3], 6, 97)
    assert outputs[-1].request_id == "mine"


def test_many_at_once(engine: AsyncLLM):
    async def main() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(engine, [i, i + 1], GREEDY) for i in range(50)))

    for i, outputs in enumerate(asyncio.run(main())):
        assert outputs[-1].outputs[0].token_ids == alone([i, i + 1], 6, 97)


def test_only_the_bad_request_fails(engine: AsyncLLM):
    async def main() -> list[Any]:
        prompts = [[1], [97], [2], []]
        return await asyncio.gather(*(collect(engine, prompt, GREEDY) for prompt in prompts), return_exceptions=True)

    first, bad, second, empty = asyncio.run(main())
    assert isinstance(bad, RequestError)
    assert isinstance(empty, RequestError)
    assert first[-1].finished
    assert second[-1].finished


def test_a_request_waits_for_its_programs_and_no_other_does(runner: FakeRunner, engine: AsyncLLM):
    """Before the engine is ready, requests run whose programs exist."""
    exists = {SamplerVariant.GREEDY}
    runner.can_run = lambda sampler, *, scores: sampler in exists and not scores

    async def main() -> None:
        random = asyncio.create_task(collect(engine, [4, 5], SamplingParams(temperature=1, max_tokens=3, seed=1)))
        scored = asyncio.create_task(collect(engine, [4, 5], dataclasses.replace(GREEDY, prompt_logprobs=1)))
        await asyncio.wait_for(collect(engine, [4, 5], GREEDY), 5)
        assert not random.done()
        exists.add(SamplerVariant.RANDOM)
        assert (await asyncio.wait_for(random, 5))[-1].finished
        assert not scored.done()
        engine.close()
        with pytest.raises(EngineError):
            await asyncio.wait_for(scored, 5)

    asyncio.run(main())


def test_a_score_waits_for_its_program_and_can_be_aborted(runner: FakeRunner, engine: AsyncLLM):
    """The fake runner scores a token as -token / 10."""
    exists: set[bool] = {False}
    runner.can_run = lambda sampler, *, scores: sampler is SamplerVariant.GREEDY and scores in exists
    text = [4, 9, 5, 8, 96]

    async def main() -> None:
        scored = asyncio.create_task(engine.score(text, num_prompt_tokens=2))
        await asyncio.wait_for(collect(engine, [4, 5], GREEDY), 5)
        assert not scored.done()
        exists.add(True)
        score = await asyncio.wait_for(scored, 5)
        assert (score.prompt_token_ids, score.num_prompt_tokens) == (text, 2)
        assert score.logprobs.tolist() == [-0.5, -0.8, -9.6]
        with pytest.raises(RequestError, match="num_prompt_tokens must be at most 5, the tokens of the text, got 6"):
            await engine.score(text, num_prompt_tokens=6)
        runner.seconds = 0.05
        for end in (EngineError, asyncio.CancelledError):
            task = asyncio.create_task(engine.score([7] * 1500, request_id="long"))
            await until(lambda: engine.stats().num_running == 1)
            if end is EngineError:
                await engine.abort("long")
            else:
                task.cancel()
            with pytest.raises(end, match="'abort'" if end is EngineError else None):
                await task
            await until_idle(engine)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cancel", "close", "abort"])
def test_a_request_without_a_reader_leaves_the_engine(engine: AsyncLLM, how: str):
    async def main() -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        started = asyncio.Event()

        async def read() -> None:
            async with aclosing(engine.generate([1], ENDLESS, "a")) as stream:
                async for output in stream:
                    outputs.append(output)
                    started.set()
                    if how == "close":
                        return

        task = asyncio.create_task(read())
        await started.wait()
        if how == "cancel":
            task.cancel()
        if how == "abort":
            await engine.abort("a")
        await asyncio.gather(task, return_exceptions=True)
        await until_idle(engine)
        assert (await collect(engine, [1], GREEDY, "a"))[-1].outputs[0].token_ids == alone([1], 6, 97)
        return outputs

    outputs = asyncio.run(main())
    assert outputs[-1].outputs[0].finish_reason == ("abort" if how == "abort" else None)


def test_a_grammar_is_for_its_client_until_the_request_leaves(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch):
    process, requesters, asked = engine.engine.inputs.process, [], threading.Event()

    def with_grammar(*args: Any, requester: Requester, **options: Any) -> Any:
        requesters.append(requester)
        asked.set()
        return dataclasses.replace(process(*args, **options), grammar=concurrent.futures.Future())

    monkeypatch.setattr(engine.engine.inputs, "process", with_grammar)

    async def main() -> None:
        current_client.set("somebody")
        task = asyncio.create_task(collect(engine, [1], GREEDY, "a"))
        await asyncio.to_thread(asked.wait, 5)
        assert requesters[0].client == "somebody"
        assert not requesters[0].has_left()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert requesters[0].has_left()

    asyncio.run(main())


def test_abort_while_the_prompt_is_still_being_tokenised(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch):
    process, entered, go_on = engine.engine.inputs.process, threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        entered.set()
        assert go_on.wait(5)
        return process(*args, **options)

    monkeypatch.setattr(engine.engine.inputs, "process", slow)

    async def main() -> list[RequestOutput]:
        task = asyncio.create_task(collect(engine, [1], ENDLESS, "a"))
        await asyncio.to_thread(entered.wait, 5)
        await engine.abort(["a", "nobody"])
        go_on.set()
        return await task

    assert asyncio.run(main())[-1].outputs[0].finish_reason == "abort"


def test_the_event_loop_is_free_while_a_prompt_is_tokenised(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch):
    process = engine.engine.inputs.process

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return process(*args, **options)

    monkeypatch.setattr(engine.engine.inputs, "process", slow)

    async def main() -> int:
        task, turns = asyncio.create_task(collect(engine, [1], GREEDY)), 0
        while not task.done():
            await asyncio.sleep(0.005)
            turns += 1
        return turns

    assert asyncio.run(main()) > 10


def test_ids_in_use_are_refused_and_free_again_afterwards(engine: AsyncLLM):
    async def main() -> None:
        async with aclosing(engine.generate([1], ENDLESS, "a")) as stream:
            await anext(stream)
            with pytest.raises(RequestError, match="request_id"):
                await collect(engine, [1], GREEDY, "a")
        assert (await collect(engine, [1], GREEDY, "a"))[-1].finished

    asyncio.run(main())


def test_on_admitted_is_called_before_the_first_output(engine: AsyncLLM):
    async def run() -> None:
        seen: list[str] = []
        note = lambda: seen.append("admitted")  # noqa: E731
        async for _ in engine.generate([1, 2], GREEDY, on_admitted=note):
            seen.append("output")  # noqa: PERF401
        assert seen[:2] == ["admitted", "output"]
        assert seen.count("admitted") == 1
        long = SamplingParams(temperature=0, max_tokens=5000)
        with pytest.raises(RequestError, match="max_tokens"):
            await anext(engine.generate([1], long, refuse_cut=True, on_admitted=note))
        assert seen.count("admitted") == 1

    asyncio.run(run())


def test_a_slow_reader_gets_the_latest(engine: AsyncLLM):
    async def main() -> list[int]:
        lengths = []
        async for output in engine.generate([1], SamplingParams(temperature=0, max_tokens=60)):
            lengths.append(len(output.outputs[0].token_ids))
            await until(lambda: engine.stats().finished_requests == 1)  # it reads the next one when all have come
        return lengths

    *before, last = asyncio.run(main())
    assert last == 60
    assert len(before) <= 2  # the last one may come a moment after the engine has counted the request


def test_a_failed_step_fails_its_requests_and_the_next_is_served(engine: AsyncLLM, runner: FakeRunner):
    runner.fail_at = frozenset({("collect", 3)})

    async def main() -> None:
        await engine.check_health()
        with pytest.raises(EngineError, match="a step failed"):
            await collect(engine, [1], ENDLESS)
        with pytest.raises(EngineError):
            await engine.check_health()
        assert (await collect(engine, [1], GREEDY))[-1].outputs[0].token_ids == alone([1], 6, 97)
        await engine.check_health()

    asyncio.run(main())


def test_a_bug_in_the_engine_ends_it_with_an_error_for_all(
    engine: AsyncLLM, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
):
    async def main() -> None:
        async with aclosing(engine.generate([1], ENDLESS)) as stream:
            await anext(stream)
            monkeypatch.setattr(engine.engine.scheduler, "results", lambda *args: 1 / 0)
            with pytest.raises(EngineError, match="division by zero"):
                async for _ in stream:
                    pass
        with pytest.raises(EngineError, match="division by zero"):
            await collect(engine, [1], GREEDY)
        with pytest.raises(EngineError, match="has ended"):
            await engine.check_health()

    asyncio.run(main())
    engine.close()
    assert runner.closed
    assert not engine.engine.has_work


@pytest.mark.usefixtures("fake_build")
def test_a_stalled_engine_is_unhealthy(runner: SlowRunner):
    async def main() -> None:
        async with AsyncLLM("model", watchdog_seconds=0.05) as engine:
            await stall(engine)

    async def stall(engine: AsyncLLM) -> None:
        async with aclosing(engine.generate([1], ENDLESS)) as stream:
            await anext(stream)
            await engine.check_health()
            runner.seconds = 0.3
            await asyncio.sleep(0.2)
            with pytest.raises(EngineError, match="no step has ended"):
                await engine.check_health()
            runner.seconds = 0.001
        await until_idle(engine)
        await asyncio.sleep(0.1)
        await engine.check_health()

    asyncio.run(main())


def test_closing_aborts_running_requests(engine: AsyncLLM, runner: FakeRunner):
    async def main() -> RequestOutput:
        async with aclosing(engine.generate([1], ENDLESS)) as stream:
            await anext(stream)
            await asyncio.to_thread(engine.close)
            *_, last = [output async for output in stream]
        with pytest.raises(EngineError, match="closed"):
            await collect(engine, [1], GREEDY)
        return last

    assert asyncio.run(main()).outputs[0].finish_reason == "abort"
    assert runner.closed


def test_requests_of_a_closed_event_loop_are_aborted(engine: AsyncLLM):
    loop = asyncio.new_event_loop()
    stream = engine.generate([1], ENDLESS, "a")
    loop.run_until_complete(anext(stream))
    loop.close()
    asyncio.run(until_idle(engine))
    assert asyncio.run(collect(engine, [1], GREEDY))[-1].finished


@pytest.mark.parametrize("error", [CapacityError("2 requests wait", 3.0), RequestError("n", 3, "can never fit")])
def test_a_request_that_the_engine_refuses_fails_alone(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    """The engine's thread refuses the request, and continues with the other requests."""
    add = engine.engine.add

    def limited(request: Request) -> None:
        if request.prompt_token_ids == [13]:
            raise error
        add(request)

    monkeypatch.setattr(engine.engine, "add", limited)

    async def main() -> list[Any]:
        prompts = [[1], [13], [2], [13], [3]]
        answers = await asyncio.gather(*(collect(engine, prompt, GREEDY) for prompt in prompts), return_exceptions=True)
        assert not engine._streams
        assert not engine._engine_thread._requests.live
        with pytest.raises(type(error)):
            await collect(engine, [13], GREEDY, "same id")
        assert (await collect(engine, [5], GREEDY, "same id"))[-1].outputs[0].token_ids == alone([5], 6, 97)
        await engine.check_health()
        return answers

    first, refused, second, refused_too, third = asyncio.run(main())
    assert refused is refused_too is error
    for start, answer in zip((1, 2, 3), (first, second, third), strict=True):
        assert answer[-1].outputs[0].token_ids == alone([start], 6, 97)


def test_a_bug_while_adding_fails_all_waiting_requests(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine.engine, "add", lambda request: 1 / 0)

    async def main() -> list[Any]:
        work = [collect(engine, [i], GREEDY) for i in range(5)]
        return await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 5)

    assert all("division by zero" in str(error) for error in asyncio.run(main()))


class PanicException(BaseException):
    """Stands for the exception of a Rust extension that panics. It is not an `Exception`."""


@pytest.mark.parametrize("error", [SystemExit(3), PanicException("index out of bounds")], ids=["exit", "panic"])
@pytest.mark.parametrize("where", ["step", "add", "inspect", "reset"])
def test_no_error_ends_the_engine_thread_silently(
    engine: AsyncLLM, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
):
    """Python ends a thread silently on SystemExit. All clients get an error, and the engine is unhealthy."""

    def fail(*args: Any, **options: Any) -> None:
        raise error

    owner, name = {
        "step": (engine.engine.scheduler, "results"),
        "add": (engine.engine, "add"),
        "inspect": (sys.modules["jpaged.engine.engine"], "capture"),
        "reset": (engine.engine, "reset_prefix_cache"),
    }[where]

    async def main() -> list[Any]:
        streams = [engine.generate([i], ENDLESS) for i in range(3)]
        for stream in streams:
            await anext(stream)
        monkeypatch.setattr(owner, name, fail)
        asked = [collect(engine, [9], ENDLESS)] if where == "add" else []
        asked += [engine.inspect()] if where == "inspect" else []
        asked += [engine.reset_prefix_cache()] if where == "reset" else []
        rest = [_rest(stream) for stream in streams]
        ends = await asyncio.wait_for(asyncio.gather(*asked, *rest, return_exceptions=True), 5)
        with pytest.raises(EngineError, match="has ended"):
            await engine.check_health()
        for late in (collect(engine, [1], GREEDY), engine.inspect(), engine.reset_prefix_cache()):
            with pytest.raises(EngineError, match="has ended"):
                await asyncio.wait_for(late, 5)
        return ends

    for end in asyncio.run(main()):
        assert isinstance(end, EngineError)
        assert f"has ended: {type(error).__name__}" in str(end)
    engine.close()
    assert runner.closed


async def _rest(stream: Any) -> None:
    async for _ in stream:
        pass


def test_a_panic_while_reading_a_prompt_fails_this_request_only(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch):
    process = engine.engine.inputs.process

    def panicking(request_id: str, prompt: Any, *args: Any, **options: Any) -> Any:
        if prompt == [13]:
            raise PanicException("byte index 1 is not a char boundary")
        return process(request_id, prompt, *args, **options)

    monkeypatch.setattr(engine.engine.inputs, "process", panicking)

    async def main() -> list[Any]:
        work = (collect(engine, [start], GREEDY) for start in (1, 13, 2))
        return await asyncio.gather(*work, return_exceptions=True)

    first, failed, second = asyncio.run(main())
    assert isinstance(failed, EngineError)
    assert "char boundary" in str(failed)
    assert first[-1].finished
    assert second[-1].finished


def test_inspect_while_requests_run(engine: AsyncLLM):
    async def main() -> None:
        prefix = list(range(12))
        async with aclosing(engine.generate([*prefix, 1], ENDLESS, "a")) as first:
            await anext(first)
            async with aclosing(engine.generate([*prefix, 2], ENDLESS, "b")) as second:
                await anext(second)
                for _ in range(20):
                    snapshot = await engine.inspect()
                    assert [request.request_id for request in snapshot.running] == ["a", "b"]
                    for block in snapshot.blocks:  # no step ran while the snapshot was taken
                        assert block.ref_count == len(block.owners)
                    assert snapshot.pool.shared_blocks == 3
        await until_idle(engine)
        snapshot = await engine.inspect()
        assert (snapshot.running, snapshot.waiting, snapshot.pool.used_blocks) == ((), (), 0)
        assert snapshot.pool.cached_blocks >= 3

    asyncio.run(main())


def test_inspect_of_an_engine_that_has_ended(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        async with aclosing(engine.generate([1], ENDLESS)) as stream:
            await anext(stream)
            monkeypatch.setattr(engine.engine, "step", lambda: 1 / 0)
            asked = [asyncio.create_task(engine.inspect()) for _ in range(3)]
            done = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 5)
            assert all(isinstance(one, EngineError) or one.running for one in done)  # before it ended, or after
        with pytest.raises(EngineError, match="has ended"):
            await engine.inspect()

    asyncio.run(main())


def test_inspections_that_wait_when_the_engine_closes_fail(engine: AsyncLLM, runner: SlowRunner):
    async def main() -> None:
        async with aclosing(engine.generate([1], ENDLESS)) as stream:
            await anext(stream)
            runner.seconds = 0.3  # the engine thread is in a step
            await asyncio.sleep(0.05)
            asked = asyncio.create_task(engine.inspect())
            await asyncio.sleep(0.01)
            closing = asyncio.create_task(asyncio.to_thread(engine.close))
            with pytest.raises(EngineError, match="closed"):
                await asyncio.wait_for(asked, 5)
            await closing

    asyncio.run(main())


async def until_unhealthy(engine: AsyncLLM) -> None:
    async with asyncio.timeout(60):
        with contextlib.suppress(EngineError):
            while True:
                await engine.check_health()
                await asyncio.sleep(0.002)


@pytest.fixture
def soon_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jpaged.frontend.engine_turns.CHECK_AFTER_SECONDS", 0.03)


@pytest.mark.usefixtures("soon_checked")
def test_inconsistent_state_is_found_when_nothing_runs(engine: AsyncLLM, caplog: pytest.LogCaptureFixture):
    """A wrong reference count of a block that no request uses: only the integrity check can find it."""

    async def main() -> None:
        engine.engine.scheduler.manager.pool._ref_counts[1999] += 1
        await engine.check_health()
        await collect(engine, [1, 2, 3], GREEDY)
        await until_unhealthy(engine)
        for _ in range(2):
            with pytest.raises(EngineError, match=r"state was inconsistent: .*1999"):
                await engine.check_health()
            # New requests run, on a new pool. The engine stays unhealthy.
            assert (await collect(engine, [1, 2, 3], GREEDY))[-1].outputs[0].token_ids == alone([1, 2, 3], 6, 97)
        engine.engine.check_integrity()

    asyncio.run(main())
    assert "state of the idle engine is inconsistent" in caplog.text


@pytest.mark.usefixtures("soon_checked")
def test_integrity_is_checked_once_after_work_and_not_while_requests_run(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
):
    checks: list[bool] = []
    check = engine.engine.check_integrity
    monkeypatch.setattr(engine.engine, "check_integrity", lambda: (checks.append(engine.engine.has_work), check()))

    async def main() -> None:
        await asyncio.sleep(0.1)
        assert checks == []  # no step has run yet
        async with aclosing(engine.generate([1], ENDLESS)) as stream:
            await anext(stream)
            await asyncio.sleep(0.1)
            assert checks == []
        await until(lambda: bool(checks))
        assert checks == [False]
        await collect(engine, [1], GREEDY)
        await asyncio.sleep(0.1)
        assert checks == [False]  # not again within CHECK_EVERY_SECONDS
        monkeypatch.setattr("jpaged.frontend.engine_turns.CHECK_EVERY_SECONDS", 0.01)
        await collect(engine, [1], GREEDY)
        await until(lambda: len(checks) == 2)
        await asyncio.sleep(0.1)
        assert checks == [False, False]

    asyncio.run(main())


def test_the_prefix_cache_is_reset_while_no_request_runs(engine: AsyncLLM):
    async def main() -> list[Any]:
        prompt = list(range(20))
        await collect(engine, prompt, GREEDY)
        (*_, warm) = await collect(engine, prompt, GREEDY)
        await until_idle(engine)
        done = await engine.reset_prefix_cache()
        (*_, cold) = await collect(engine, prompt, GREEDY)
        return [warm.num_cached_tokens, done, cold.num_cached_tokens]

    assert asyncio.run(main()) == [16, True, 0]


def test_a_request_that_arrives_while_the_host_waits_is_in_the_next_step(
    engine: AsyncLLM, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
):
    held, waits = threading.Event(), threading.Event()

    def spare_seconds(engine: Engine) -> float:
        """The next step is due as soon as there are two requests."""
        if not held.is_set() or len(engine.scheduler.running) + engine.scheduler.num_waiting > 1:
            return 0.0
        waits.set()
        return 60.0

    async def work() -> None:
        first = asyncio.create_task(collect(engine, [1, 2, 3], ENDLESS, "first"))
        await until(lambda: len(runner.plans) > 3)
        held.set()
        await until(waits.is_set)
        steps = len(runner.plans)
        await asyncio.sleep(0.05)
        assert len(runner.plans) == steps, "the host waits"
        second = asyncio.create_task(collect(engine, [4, 5, 6], GREEDY, "second"))
        await until(lambda: len(runner.plans) > steps)
        assert runner.plans[steps].prompt_tokens.tolist() == [4, 5, 6]
        held.clear()
        await second
        first.cancel()

    monkeypatch.setattr(Engine, "spare_seconds", property(spare_seconds))
    asyncio.run(work())
