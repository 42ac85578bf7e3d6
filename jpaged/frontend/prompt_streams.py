"""Runs several prompts on one `AsyncLLM` and merges their outputs, for the server and the command line."""

import asyncio
import collections
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from jpaged.lora.request import LoRARequest
from jpaged.outputs import RequestOutput
from jpaged.params.sampling import SamplingParams

OutputT = TypeVar("OutputT")

AT_ONCE = 16  # streams that begin or end between two turns of the event loop: 2 ms


class Generates(Protocol):
    """An engine that generates: `AsyncLLM`, or the tests' fake engine."""

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        refuse_cut: bool = False,
        on_admitted: Callable[[], None] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output so far, after each step. Closing the generator aborts the request.

        refuse_cut: raise RequestError if prompt and max_tokens exceed max_model_len.
        on_admitted: called when the queue has accepted the request.
        lora_request: LoRA adapter; None: the base model alone.
        """
        ...


def outputs_of(
    engine: Generates,
    prompts: Sequence[Any],
    params: SamplingParams,
    request_id: str,
    *,
    priority: int = 0,
    refuse_cut: bool = False,
    on_admitted: Callable[[], None] | None = None,
    lora_request: LoRARequest | None = None,
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (index of the prompt, output) for several prompts, in order of arrival. Closing it aborts all requests.

    refuse_cut, on_admitted, lora_request: as for `AsyncLLM.generate`. on_admitted is called once per prompt.
    If one prompt fails, its error is raised and the other requests are aborted.
    """
    streams = [
        engine.generate(
            prompt, params, f"{request_id}-{i}", priority=priority, refuse_cut=refuse_cut, on_admitted=on_admitted,
            lora_request=lora_request,
        )
        for i, prompt in enumerate(prompts)
    ]
    return merge_streams(streams)


async def merge_streams(streams: Sequence[AsyncGenerator[OutputT, None]]) -> AsyncGenerator[tuple[int, OutputT], None]:
    """Yield (index of the generator, value) for several generators, in order of arrival. Closing it closes them all.

    They begin and end AT_ONCE at a time: 2,048 prompts that began together would stall the event loop.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
    later = collections.deque(enumerate(streams))  # not begun yet
    pending: dict[asyncio.Task[OutputT | None], int] = {}
    done: asyncio.Queue[asyncio.Task[OutputT | None]] = asyncio.Queue()

    def advance(index: int, stream: AsyncGenerator[OutputT, None]) -> None:
        task = asyncio.create_task(_next(stream))
        pending[task] = index
        task.add_done_callback(done.put_nowait)

    try:
        while later or pending:
            for _ in range(min(AT_ONCE, len(later))):
                advance(*later.popleft())
            if later:
                await asyncio.sleep(0)
                if done.empty():
                    continue
            task = await done.get()
            index, output = pending.pop(task), task.result()
            if output is not None:
                advance(index, streams[index])
                yield index, output
    finally:
        try:
            await _cancel(list(pending))
        finally:
            for stream in streams:
                await stream.aclose()


async def _next(stream: AsyncGenerator[OutputT, None]) -> OutputT | None:
    return await anext(stream, None)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, AT_ONCE at a time, and wait until they have ended."""
    try:
        for first in range(0, len(tasks), AT_ONCE):
            some = tasks[first : first + AT_ONCE]
            for task in some:
                task.cancel()
            await asyncio.gather(*some, return_exceptions=True)
    finally:  # cancelled once more: the rest ends by itself
        for task in tasks:
            task.cancel()
