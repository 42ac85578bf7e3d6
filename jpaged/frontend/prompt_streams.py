"""Runs several prompts on one `AsyncLLM` and merges their outputs, for the server and the command line."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, Protocol, TypeVar

from jpaged.lora.request import LoRARequest
from jpaged.outputs import RequestOutput
from jpaged.params.sampling import SamplingParams

OutputT = TypeVar("OutputT")


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
    """Yield (index of the generator, value) for several generators, in order of arrival. Closing it closes them all."""
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
