"""Shared by the routes of pooling models: a request's prompts, and the engine's results."""

from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from starlette.concurrency import run_in_threadpool

from jpaged.errors import RequestError
from jpaged.frontend.prompt_streams import merge_streams
from jpaged.outputs import PoolingRequestOutput, TokenPoolingOutput
from jpaged.params.pooling import PooledModel, PoolingParams
from jpaged.params.sampling import SamplingParams
from jpaged.serving.engine_client import Prompt
from jpaged.serving.openai_api import generation
from jpaged.serving.openai_api.chat_turns import rendered
from jpaged.serving.openai_api.prompts import prompt_list, salted, without_special_tokens
from jpaged.serving.schemas.answers import EmbeddingUsage
from jpaged.serving.schemas.pooling import MAX_NUMBERS, MAX_TEXTS, PooledInput, PoolingFields
from jpaged.serving.server_state import Server
from jpaged.serving.web.error_responses import APIError
from jpaged.text.encoder import TokenLimit

Finals = dict[int, PoolingRequestOutput[Any]]

NAMES = {"prompt_token_ids": "input", "prompt": "input", "normalize": "use_activation", "activation": "use_activation"}


async def input_prompts(server: Server, body: PooledInput) -> list[Prompt]:
    """Return the prompts of a request: its inputs, or its conversation. Raises RequestError that names the field."""
    if (body.input is None) == (body.messages is None):
        accepted = "is required; or messages" if body.input is None else "and messages exclude each other: send one"
        raise RequestError("input", body.input, accepted)
    if body.input is None:
        with generation.named_as_sent({"prompt_token_ids": "messages"}):
            ids = await run_in_threadpool(
                lambda: rendered(server, body, add_generation_prompt=False, limit=prompt_limit(server, body))
            )
            return salted([{"prompt_token_ids": ids}], body.cache_salt)
    for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if getattr(body, name):
            raise RequestError(name, getattr(body, name), "is for messages: leave it out")
    prompts = prompt_list(body.input, MAX_TEXTS)
    if body.add_special_tokens is False:
        limit = prompt_limit(server, body)
        prompts = await without_special_tokens(server, prompts, limit)
    return salted(prompts, body.cache_salt)


def prompt_limit(server: Server, body: PoolingFields) -> TokenLimit:
    """Return the number of a prompt's tokens that the engine needs."""
    params = SamplingParams(
        max_tokens=1, truncate_prompt_tokens=body.truncate_prompt_tokens, truncation_side=body.truncation_side
    )
    return TokenLimit.of_prompt(server.engine.max_model_len, params, pooling=True)


def pooling_params(body: PoolingFields, **fields: Any) -> PoolingParams:
    """Return the parameters of a request. fields: further parameters, from its route."""
    if isinstance(body, PooledInput):
        fields["prompt_name"] = body.prompt_name
    return PoolingParams(
        truncate_prompt_tokens=body.truncate_prompt_tokens, truncation_side=body.truncation_side, **fields
    )


def pooled_model(server: Server) -> PooledModel:
    """Return the engine's pooling model. Raises RequestError for an engine that generates."""
    model = server.engine.pooling
    if model is None:
        accepted = "the engine generates: to embed, classify or score, start with --runner pooling"
        raise RequestError("runner", "generate", accepted)
    return model


async def pooled(
    server: Server, prompts: list[Prompt], params: PoolingParams, request_id: str, priority: int
) -> Finals:
    """Return the output of each prompt, in the prompts' order. Raises APIError if one was aborted, or has failed."""
    streams = [
        server.engine.encode(prompt, params, f"{request_id}-{i}", priority=priority) for i, prompt in enumerate(prompts)
    ]
    async with aclosing(merge_streams(streams)) as outputs:
        finals, numbers = {}, 0
        async for prompt, output in outputs:
            finals[prompt] = output
            if isinstance(output.outputs, TokenPoolingOutput):
                numbers += output.outputs.data.size
            if numbers > MAX_NUMBERS:
                accepted = f"vectors of its tokens are more than {MAX_NUMBERS:,} numbers: send fewer or shorter ones"
                raise RequestError("input", f"{len(prompts)} inputs", accepted)
    for final in finals.values():
        if final.error is not None:
            raise APIError(HTTPStatus.INTERNAL_SERVER_ERROR, final.error, code="engine_error")
    if any(final.outputs is None for final in finals.values()):
        raise APIError(HTTPStatus.SERVICE_UNAVAILABLE, generation.ABORTED, code="aborted")
    return dict(sorted(finals.items()))


def usage(*finals: Finals) -> EmbeddingUsage:
    """Count the tokens of all prompts."""
    tokens = sum(len(final.prompt_token_ids) for some in finals for final in some.values())
    return EmbeddingUsage(tokens, tokens)
