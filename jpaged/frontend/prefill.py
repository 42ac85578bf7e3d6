"""Computes prompts on separate engines (prefill_engines), which hand the KV over to the engines that generate.

1. A prefill engine runs the prompt for one token, and drops the token.
2. The KV of the prompt's full blocks is copied to the host, and then into the prefix cache of the generating engine.
3. The request runs there as usual, and finds the blocks. It computes at least the prompt's last token.

So answers do not change. If a prefill engine fails or is full, the generating engine computes the prompt.
"""

import asyncio
import logging
from collections.abc import Sequence

from jpaged.engine.input.input_processor import InputProcessor
from jpaged.engine.request_group import RequestGroup
from jpaged.errors import JPagedError
from jpaged.frontend.engine_thread import EngineThread
from jpaged.frontend.engine_threads import EngineThreads
from jpaged.frontend.output_stream import OutputStream
from jpaged.params.sampling import SamplingParams

logger = logging.getLogger(__name__)

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, detokenize=False)


async def prefill(
    threads: EngineThreads, inputs: InputProcessor, request_group: RequestGroup, prefixes: Sequence[int],
    to: EngineThread, priority: int,
) -> None:  # fmt: skip
    """Compute the prompt of a request on a prefill engine, and hand its KV over to the engine `to`.

    Does nothing for a prompt without a full block before its last token, or for a request that skips the prefix cache.
    """
    token_ids = request_group.prompt_token_ids
    if len(token_ids) <= to.runner.block_size or request_group.first.skips_prefix_cache:
        return
    request_id = f"{request_group.request_id} prompt"
    prompt = {"prompt_token_ids": list(token_ids), "cache_salt": request_group.cache_salt or None}
    twin = await asyncio.to_thread(
        inputs.process, request_id, prompt, ONE_TOKEN, priority=priority, adapter=request_group.adapter
    )
    try:
        with threads.routed_prefill(twin, prefixes) as thread:
            stream = OutputStream(asyncio.get_running_loop(), deltas=False)
            thread.add(twin, stream)
        try:
            while not (await stream.get()).finished:
                pass
        except asyncio.CancelledError:
            thread.abort(request_id)
            raise
        handover = await asyncio.wrap_future(thread.take_kv(twin))
        await asyncio.wrap_future(to.put_kv(handover))
    except JPagedError as error:
        logger.warning("the generating engine computes the prompt of %s: %s", request_group.request_id, error)
