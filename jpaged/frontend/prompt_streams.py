"""Runs several prompts on one `AsyncLLM` and yields their outputs as they come, for the server and the command line."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, Protocol, TypeVar

from jpaged.outputs import RequestOutput
from jpaged.params.sampling import SamplingParams

OutputT = TypeVar("OutputT")


class Generates(Protocol):
    """The only method of `AsyncLLM` that this module needs."""

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output so far, after each step. Closing the generator aborts the request."""
        ...


def outputs_of(
    engine: Generates, prompts: Sequence[Any], params: SamplingParams, request_id: str, *, priority: int = 0
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the outputs of several prompts as they come, each with its prompt's index.

    Closing the generator aborts all prompts. If a prompt fails, all are aborted and its error is raised here.
    """
    streams = [
        engine.generate(prompt, params, f"{request_id}-{i}", priority=priority) for i, prompt in enumerate(prompts)
    ]
    return merged(streams)


async def merged(streams: Sequence[AsyncGenerator[OutputT, None]]) -> AsyncGenerator[tuple[int, OutputT], None]:
    """Yield the items of several generators as they come, each with its generator's index.

    Closing this generator closes all of them.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
    async with AsyncExitStack() as stack:
        pending: dict[asyncio.Task[OutputT | None], int] = {}
        for index, stream in enumerate(streams):
            await stack.enter_async_context(aclosing(stream))
            pending[asyncio.create_task(_next(stream))] = index
        stack.push_async_callback(_cancel, pending)
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = pending.pop(task)
                output = task.result()
                if output is not None:
                    pending[asyncio.create_task(_next(streams[index]))] = index
                    yield index, output


async def _next(stream: AsyncGenerator[OutputT, None]) -> OutputT | None:
    return await anext(stream, None)


async def _cancel(tasks: dict[asyncio.Task[Any], int]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
