"""Short prompts do not wait for long ones, and calls of cancelled requests do not run."""

import asyncio
import threading

import pytest

from jpaged.frontend.tokenising import LONG_WORKERS, TokeniserThreads, prompt_length

LONG = 10**6


@pytest.fixture
def threads():
    made = TokeniserThreads()
    yield made
    made.close()


def test_a_short_prompt_does_not_wait_for_long_ones(threads: TokeniserThreads):
    release = threading.Event()

    async def run() -> None:
        long = [asyncio.ensure_future(threads.run(LONG, lambda _: release.wait(20))) for _ in range(LONG_WORKERS + 1)]
        assert await asyncio.wait_for(threads.run(5, lambda _: "short"), 10) == "short"
        assert not any(one.done() for one in long)
        release.set()
        assert await asyncio.gather(*long) == [True] * len(long)

    asyncio.run(run())


def test_the_shortest_prompt_is_first(threads: TokeniserThreads):
    """Prompts of about equal length keep their order."""
    release, order = threading.Event(), []

    async def run() -> None:
        first = asyncio.ensure_future(threads.run(1, lambda _: release.wait(20)))
        await asyncio.sleep(0.05)
        rest = [asyncio.ensure_future(threads.run(n, lambda _, n=n: order.append(n))) for n in (8_000, 3_000, 12, 10)]
        await asyncio.sleep(0.05)
        release.set()
        await asyncio.gather(first, *rest)

    asyncio.run(run())
    assert order == [12, 10, 3_000, 8_000]


def test_a_cancelled_call_is_told_or_never_runs(threads: TokeniserThreads):
    started, told, ran = threading.Event(), threading.Event(), []

    def call(cancelled) -> None:
        started.set()
        while not cancelled():
            started.wait(0.001)
        told.set()

    async def run() -> None:
        running = asyncio.ensure_future(threads.run(5, call))
        await asyncio.to_thread(started.wait, 10)
        queued = asyncio.ensure_future(threads.run(5, lambda _: ran.append(1)))
        await asyncio.sleep(0.05)
        for one in (queued, running):
            one.cancel()
        await asyncio.gather(running, queued, return_exceptions=True)
        assert await asyncio.to_thread(told.wait, 10)
        assert await threads.run(5, lambda _: "still works") == "still works"

    asyncio.run(run())
    assert not ran


def test_an_error_of_any_kind_reaches_the_caller(threads: TokeniserThreads):
    def fail(_) -> None:
        raise BaseExceptionGroup("panic", [SystemExit()])

    async def run() -> None:
        with pytest.raises(BaseExceptionGroup):
            await threads.run(5, fail)
        assert await threads.run(5, lambda _: 1) == 1
        threads.close()
        with pytest.raises(asyncio.CancelledError):
            await threads.run(5, lambda _: None)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "length"),
    [("abc", 3), ({"prompt": "ab"}, 2), ([1, 2], 0), ({"prompt_token_ids": [1]}, 0), (None, 0), ({"prompt": 5}, 0),
     ({"prompt_token_ids": [1], "prediction": "abcd"}, 4), ({"prompt": "ab", "prediction": "abcd"}, 6)],
)
def test_the_length_of_a_prompt(prompt, length):
    assert prompt_length(prompt) == length
