"""Runs prompts on an `AsyncLLM` from code without asyncio, and yields their outputs while they are generated."""

import asyncio
from collections.abc import Generator, Sequence
from typing import Any

from jpaged.frontend.prompt_streams import Generates, outputs_of
from jpaged.lora.request import LoRARequest
from jpaged.outputs import RequestOutput
from jpaged.params.sampling import SamplingParams


def outputs_as_they_come(
    engine: Generates, prompts: Sequence[Any], params: SamplingParams, lora_request: LoRARequest | None = None
) -> Generator[tuple[int, RequestOutput], None, None]:
    """Yield (prompt's index, output so far) after each step. The last output of a prompt is `finished`.

    lora_request: LoRA adapter of all prompts; None: the model alone.

    Raises the error of the first prompt that fails. Closing the generator, or Ctrl-C, aborts the running prompts.
    """
    outputs = outputs_of(engine, prompts, params, "prompt", lora_request=lora_request)
    with asyncio.Runner() as runner:
        try:
            while (item := runner.run(_next(outputs))) is not None:
                yield item
        finally:
            runner.run(outputs.aclose())


async def _next(outputs: Any) -> tuple[int, RequestOutput] | None:
    return await anext(outputs, None)
