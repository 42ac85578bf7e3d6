"""A fake runner whose steps take time, and functions that wait for requests of an AsyncLLM."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from jpaged import AsyncLLM, RequestOutput, SamplingParams
from tests.engine.fake_runner import FakeHandle, FakeRunner


class SlowRunner(FakeRunner):
    """Takes 2 ms for each step, so that a test can act during a request."""

    seconds = 0.002

    def collect(self, handle: FakeHandle) -> Any:
        time.sleep(self.seconds)
        return super().collect(handle)


async def collect(engine: AsyncLLM, *args: Any) -> list[RequestOutput]:
    """Return all outputs of a request."""
    return [output async for output in engine.generate(*args)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):  # 5 s was too short once, while another test ran 8 devices on 2 cores
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def until_idle(engine: AsyncLLM) -> None:
    """Wait until the engine has no requests and no used blocks."""
    await until(lambda: not (engine.stats().num_running or engine.stats().num_waiting or engine.stats().used_blocks))


async def last(engine: AsyncLLM, prompt: list[int], params: SamplingParams) -> Any:
    """The finished answer of a request."""
    output = None
    async for output in engine.generate(prompt, params):  # noqa: B007
        pass
    return output.outputs[0]


async def started(engine: AsyncLLM, count: int, params: SamplingParams) -> list[asyncio.Task]:
    """Requests that have generated their first tokens."""
    before = engine.stats().generated_tokens
    tasks = [asyncio.create_task(last(engine, [i, i + 1, 7], params)) for i in range(count)]
    await until(lambda: engine.stats().generated_tokens > before + 3 * count)
    return tasks
