"""POST /v1/chat/completions."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from jpaged.errors import RequestError
from jpaged.frontend.prompt_streams import outputs_of
from jpaged.outputs import CompletionOutput
from jpaged.params.sampling import SamplingParams
from jpaged.serving import generation
from jpaged.serving.body import read_body
from jpaged.serving.chat_answers import ChatAnswers
from jpaged.serving.chat_turns import turn_of
from jpaged.serving.disconnect import until_disconnect
from jpaged.serving.generation import Head, Outputs, Server
from jpaged.serving.logprob_shapes import chat_logprobs
from jpaged.serving.output_format import names_as_sent
from jpaged.serving.request_schema import ChatRequest, NamedToolChoice
from jpaged.serving.response_schema import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Delta,
)
from jpaged.serving.sse import open_stream


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, rendered by the model's chat template."""
    server: Server = request.app.state.server
    body = await read_body(request, ChatRequest)
    names = {"prompt": "messages", "prompt_token_ids": "messages", "logprobs": "top_logprobs"}
    if body.tools:
        names["structured_outputs.grammar"] = "tools"  # the grammar of a forced call is made of the tools
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    with generation.named_as_sent(names | names_as_sent(body)):
        return await _answer(request, server, body)


async def _answer(request: Request, server: Server, body: ChatRequest) -> Response:
    head = Head.new("chatcmpl", server.model_name(body.model), body.request_id)
    with_usage = generation.check_stream_options(body)
    top = _top_logprobs(body)
    defaults = server.engine.default_sampling_params
    params = generation.sampling_params(body, defaults, max_tokens=_max_tokens(body, defaults), logprobs=top)
    turn = await run_in_threadpool(turn_of, server, body, params)
    params = turn.sampling_params(params)
    answers = ChatAnswers(turn.reader, named=isinstance(body.tool_choice, NamedToolChoice))
    prompts = generation.salted([turn.prompt], body)
    # Clients expect an error for a max_tokens that does not fit, as from OpenAI and vLLM.
    asked = body.max_tokens is not None or body.max_completion_tokens is not None
    outputs = outputs_of(
        server.engine, prompts, params, head.request_id, priority=body.priority or 0, refuse_cut=asked
    )
    if body.stream:
        return await open_stream(request.receive, _events(outputs, params, answers, head, with_usage))
    work = generation.finished(outputs)
    finals = await until_disconnect(request.receive, work)
    choices = []
    for output in finals[0].outputs:
        choices.append(
            ChatChoice(
                index=output.index,
                message=answers.message(output.index, output.text),
                logprobs=_logprobs(output, slice(None), top),
                finish_reason=answers.finish_reason(output.index, output.finish_reason),
            )
        )
        await asyncio.sleep(0)  # one with log-probabilities takes milliseconds: other requests run between two
    answer = ChatCompletion(**head.fields(), choices=choices, usage=generation.usage(finals))
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _events(
    outputs: Outputs, params: SamplingParams, answers: ChatAnswers, head: Head, with_usage: bool
) -> AsyncGenerator[ChatCompletionChunk, None]:
    finals: dict = {}
    blank = {"usage": None} if with_usage else {}
    async with aclosing(generation.updates(outputs, params.n, finals)) as updates:
        async for new in updates:
            logprobs = _logprobs(new.output, new.token_range, params.logprobs)
            delta = answers.delta(new)
            if delta is None and logprobs is None and not new.finish_reason:
                continue
            choice = ChatChunkChoice(
                index=new.choice,
                delta=delta or Delta(content="" if logprobs is not None else UNSET),
                logprobs=logprobs,
                finish_reason=answers.finish_reason(new.choice, new.finish_reason),
            )
            yield ChatCompletionChunk(**head.fields(), choices=[choice], **blank)
    if with_usage:
        yield ChatCompletionChunk(**head.fields(), choices=[], usage=generation.usage(finals))


def _logprobs(output: CompletionOutput, tokens: slice, top: int | None) -> ChatLogprobs | None:
    if top is None or output.logprobs is None or not output.token_ids[tokens]:
        return None
    return chat_logprobs(output.token_ids[tokens], output.logprobs[tokens], top)


def _top_logprobs(body: ChatRequest) -> int | None:
    """Return the number of log-probabilities per token; None: none. 0: only the chosen token's."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("top_logprobs", body.top_logprobs, "only goes with logprobs=true")
    return None


def _max_tokens(body: ChatRequest, defaults: SamplingParams) -> int | None:
    """Return the maximum number of tokens of the answer; None: until max_model_len is reached.

    The default is generation_config.json's value, if it has one.
    """
    if body.max_completion_tokens is not None:
        return body.max_completion_tokens
    if body.max_tokens is not None:
        return body.max_tokens
    return None if defaults.max_tokens == SamplingParams().max_tokens else defaults.max_tokens
