"""POST /v1/completions."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jpaged.errors import RequestError
from jpaged.frontend.prompt_streams import outputs_of
from jpaged.outputs import CompletionOutput
from jpaged.params.sampling import SamplingParams
from jpaged.serving import generation
from jpaged.serving.body import read_body
from jpaged.serving.disconnect import until_disconnect
from jpaged.serving.engine_client import Prompt
from jpaged.serving.generation import Head, Outputs, Server
from jpaged.serving.logprob_shapes import completion_logprobs
from jpaged.serving.output_format import names_as_sent
from jpaged.serving.request_schema import CompletionRequest
from jpaged.serving.response_schema import Completion, CompletionChoice
from jpaged.serving.sse import open_stream

MAX_PROMPTS = 1024  # per request


async def completions(request: Request) -> Response:
    """Complete one or several prompts: a string, strings, token ids, or lists of token ids."""
    server: Server = request.app.state.server
    body = await read_body(request, CompletionRequest)
    with generation.named_as_sent({"prompt_token_ids": "prompt"} | names_as_sent(body)):
        return await _answer(request, server, body)


async def _answer(request: Request, server: Server, body: CompletionRequest) -> Response:
    head = Head.new("cmpl", server.model_name(body.model), body.request_id)
    with_usage = generation.check_stream_options(body)
    defaults = server.engine.default_sampling_params
    max_tokens = defaults.max_tokens if body.max_tokens is None else body.max_tokens
    params = generation.sampling_params(body, defaults, max_tokens=max_tokens, logprobs=body.logprobs)
    prompts = generation.salted(prompt_list(body.prompt), body)
    # Clients expect an error for a max_tokens that does not fit, as from OpenAI and vLLM.
    asked = body.max_tokens is not None
    outputs = outputs_of(
        server.engine, prompts, params, head.request_id, priority=body.priority or 0, refuse_cut=asked
    )
    if body.stream:
        return await open_stream(request.receive, _events(outputs, params, head, with_usage))
    work = generation.finished(outputs)
    finals = await until_disconnect(request.receive, work)
    choices = []
    for prompt, final in finals.items():
        for output in final.outputs:
            choices.append(_choice(prompt * params.n + output.index, output, output.text, slice(None)))
            await asyncio.sleep(0)  # one with log-probabilities takes milliseconds: other requests run between two
    answer = Completion(**head.fields(), choices=choices, usage=generation.usage(finals))
    return Response(msgspec.json.encode(answer), media_type="application/json")


def prompt_list(prompt: str | list[str | int | list[int]], most: int = MAX_PROMPTS) -> list[Prompt]:
    """Return the prompts of a request. Raises RequestError for a mixed, empty or too long list."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt", prompt, "must not be empty")
    kinds = set(map(type, prompt))  # there may be a million
    if kinds == {int}:
        return [{"prompt_token_ids": cast(list[int], prompt)}]
    if len(prompt) > most:
        raise RequestError("prompt", f"{len(prompt)} prompts", f"at most {most} in one request: send several")
    if kinds == {str}:
        return list(cast(list[str], prompt))
    if kinds == {list}:
        return [{"prompt_token_ids": ids} for ids in cast(list[list[int]], prompt)]
    raise RequestError("prompt", prompt, "mixes text and token ids: send one kind")


async def _events(
    outputs: Outputs, params: SamplingParams, head: Head, with_usage: bool
) -> AsyncGenerator[Completion, None]:
    finals: dict = {}
    blank = {"usage": None} if with_usage else {}
    async with aclosing(generation.updates(outputs, params.n, finals)) as updates:
        async for new in updates:
            choice = _choice(new.choice, new.output, new.text, new.token_range)
            if choice.text or choice.logprobs is not None or choice.finish_reason:
                yield Completion(**head.fields(), choices=[choice], **blank)
    if with_usage:
        yield Completion(**head.fields(), choices=[], usage=generation.usage(finals))


def _choice(index: int, output: CompletionOutput, text: str, tokens: slice) -> CompletionChoice:
    logprobs = None
    token_ids = output.token_ids[tokens]
    if output.logprobs is not None and token_ids:
        offsets = [0] * len(token_ids)  # a model without a tokenizer has no text
        if output.text_offsets is not None:
            offsets = [min(offset, len(output.text)) for offset in output.text_offsets[tokens]]
        logprobs = completion_logprobs(token_ids, output.logprobs[tokens], offsets)
    return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=output.finish_reason)
