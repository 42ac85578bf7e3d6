"""POST /v1/chat/completions, and /v1/chat/completions/batch for several conversations."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

from msgspec import UNSET
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from jpaged.chat.turn import ChatTurn
from jpaged.errors import RequestError
from jpaged.frontend.prompt_streams import merge_streams, outputs_of
from jpaged.outputs import CompletionOutput, RequestOutput
from jpaged.params.sampling import SamplingParams
from jpaged.serving.openai_api import generation
from jpaged.serving.openai_api.chat_answers import ChatAnswers
from jpaged.serving.openai_api.chat_tools import ChatTools, tools_of
from jpaged.serving.openai_api.chat_turns import echoed_text, turn_of, turn_params
from jpaged.serving.openai_api.echo import prompt_logprob_pieces
from jpaged.serving.openai_api.generation import Head, Outputs, StreamFields, Update
from jpaged.serving.openai_api.logprob_shapes import chat_logprob_pieces, chat_logprobs
from jpaged.serving.openai_api.output_format import names_as_sent
from jpaged.serving.openai_api.prompts import predicted, salted
from jpaged.serving.schemas.answers import (
    AnyChatCompletion,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    Delta,
)
from jpaged.serving.schemas.requests import BatchChatRequest, ChatFields, ChatRequest
from jpaged.serving.schemas.typed_items import renamed
from jpaged.serving.server_state import Server
from jpaged.serving.web.body import read_body
from jpaged.serving.web.disconnect import until_disconnect
from jpaged.serving.web.json_pieces import JSONPieces, plain_pieces
from jpaged.serving.web.sse import open_stream

SEND_APART = "a batch has no such field: send the conversations to /v1/chat/completions"
# Fields of a chat that a batch does not have.
NOT_IN_BATCH = ("stream", "n", "use_beam_search", "tools", "functions", "prompt_logprobs", "return_prompt_text")


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, rendered by the model's chat template."""
    return await answer_chat(request, await read_body(request, ChatRequest))


async def batch_chat_completions(request: Request) -> Response:
    """Answer several conversations with the same parameters: one choice for each, in their order."""
    server: Server = request.app.state.server
    body = await read_body(request, BatchChatRequest)
    for name in NOT_IN_BATCH:
        if getattr(body, name) not in (None, False, [], 1 if name == "n" else None):
            raise RequestError(name, getattr(body, name), SEND_APART)
    with generation.named_as_sent(_names(body)):
        head = Head.new("chatcmpl", server.model_name(body.model), body.request_id, tier=body.service_tier)
        params = _params(server, body)
        runs = await run_in_threadpool(_prepared_batch, server, body, params)
        streams = [
            server.engine.generate(
                predicted(salted([run.turn.prompt], body.cache_salt), body.prediction)[0], run.params,
                f"{head.request_id}-{i}", priority=body.priority or 0, refuse_cut=_has_max_tokens(body),
                lora_request=server.lora_request(body.model),
            )
            for i, run in enumerate(runs)
        ]  # fmt: skip

        async def work() -> Response:
            finals = await generation.finished(merge_streams(streams))
            choices = [
                await _choice(body, run.answers, finals[i].outputs[0], index=i) for i, run in enumerate(runs)
            ]
            counted = generation.usage(finals, predicted=_counts_drafts(server, body))
            return JSONPieces(ChatCompletion(**head.fields(), choices=choices, usage=counted))

        return await until_disconnect(request.receive, work())


async def answer_chat(request: Request, body: ChatRequest) -> Response:
    """Answer a parsed chat request."""
    server: Server = request.app.state.server
    with generation.named_as_sent(_names(body)):
        return await _answer(request, server, body)


def _names(body: ChatFields) -> dict[str, str]:
    """Map the engine's parameter names to the names that this request used."""
    names = {"prompt": "messages", "prompt_token_ids": "messages", "logprobs": "top_logprobs"}
    if body.tools:
        names["structured_outputs.grammar"] = "tools"  # the grammar of a forced call is built from the tools
        names["structured_outputs.regex"] = "tools"
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names | names_as_sent(body)


async def _answer(request: Request, server: Server, body: ChatRequest) -> Response:
    head = Head.new("chatcmpl", server.model_name(body.model), body.request_id, tier=body.service_tier)
    fields = StreamFields.of(body)
    params = _params(server, body)
    tools, turn = await run_in_threadpool(_prepared, server, body, params)
    params = turn_params(body, turn, params)
    answers = ChatAnswers(
        turn.reader, tools, reasoning=body.include_reasoning is not False, before=echoed_text(body)
    )
    prompts = predicted(salted([turn.prompt], body.cache_salt), body.prediction)
    outputs = outputs_of(
        server.engine, prompts, params, head.request_id, priority=body.priority or 0,
        refuse_cut=_has_max_tokens(body), lora_request=server.lora_request(body.model),
    )  # fmt: skip
    if body.stream:
        events = _events(server, body, outputs, params.n, answers, head, fields)
        return await open_stream(request.receive, events)
    return await until_disconnect(request.receive, _whole(server, body, outputs, answers, head))


def _params(server: Server, body: ChatFields) -> SamplingParams:
    defaults = server.engine.default_sampling_params
    return generation.sampling_params(
        body, defaults, max_tokens=_max_tokens(body, defaults), logprobs=_top_logprobs(body)
    )


def _has_max_tokens(body: ChatFields) -> bool:
    """Return True if the request sets a limit. As in OpenAI's API, one that does not fit is an error."""
    return body.max_tokens is not None or body.max_completion_tokens is not None


def _counts_drafts(server: Server, body: ChatFields) -> bool:
    """Return True if the usage counts drafts."""
    return server.speculates and body.prediction is not None


@dataclasses.dataclass(frozen=True, slots=True)
class _BatchedRun:
    """A conversation of a batch, ready to run."""

    turn: ChatTurn
    params: SamplingParams
    answers: ChatAnswers


def _prepared_batch(server: Server, body: BatchChatRequest, params: SamplingParams) -> list[_BatchedRun]:
    runs = []
    for i, chat in enumerate(body.chats()):
        with renamed(((r"^messages\b", f"messages[{i}]"),)):
            tools, turn = _prepared(server, chat, params)
        answers = ChatAnswers(
            turn.reader, tools, reasoning=body.include_reasoning is not False, before=echoed_text(chat)
        )
        runs.append(_BatchedRun(turn, turn_params(chat, turn, params), answers))
    return runs


def _prepared(server: Server, body: ChatRequest, params: SamplingParams) -> tuple[ChatTools, ChatTurn]:
    tools = tools_of(body)
    return tools, turn_of(server, body, tools, params)


async def _whole(server: Server, body: ChatRequest, outputs: Outputs, answers: ChatAnswers, head: Head) -> Response:
    finals = await generation.finished(outputs)
    choices = [await _choice(body, answers, output, index=output.index) for output in finals[0].outputs]
    counted = generation.usage(finals, predicted=_counts_drafts(server, body))
    answer = ChatCompletion(**head.fields(), choices=choices, usage=counted)
    await _add_prompt(answer, server, body, finals[0])
    if body.prompt_logprobs is not None and finals[0].prompt_logprobs is not None:
        answer.prompt_logprobs = cast(Any, await prompt_logprob_pieces(finals[0].prompt_logprobs))
    return JSONPieces(answer)


async def _choice(body: ChatFields, answers: ChatAnswers, output: CompletionOutput, *, index: int) -> ChatChoice:
    """Return a complete answer. index: of the choice."""
    choice = ChatChoice(
        index=index,
        message=answers.message(output.index, output.text, output.special_offsets),
        finish_reason=answers.finish_reason(output.index, output.finish_reason),
        stop_reason=output.stop_reason,
    )
    if output.logprobs is not None and body.logprobs and output.token_ids:
        choice.logprobs = await chat_logprob_pieces(
            output.token_ids, output.logprobs, body.shown_logprobs, as_ids=bool(body.return_tokens_as_token_ids)
        )
    if body.return_token_ids:
        choice.token_ids = output.token_ids
    if body.return_weight_versions:
        choice.weight_versions = generation.weight_spans(output, len(output.token_ids))
    await asyncio.sleep(0)
    return choice


async def _add_prompt(
    answer: AnyChatCompletion, server: Server, body: ChatRequest, final: RequestOutput
) -> None:
    """Add the prompt's token ids and text, if the request asks for them."""
    if body.return_token_ids:
        answer.prompt_token_ids = cast(Any, await plain_pieces(final.prompt_token_ids))
    if body.return_prompt_text:
        decode = server.engine.get_tokenizer().decode
        answer.prompt_text = await run_in_threadpool(decode, final.prompt_token_ids)


async def _events(
    server: Server, body: ChatRequest, outputs: Outputs, n: int, answers: ChatAnswers, head: Head, fields: StreamFields
) -> AsyncGenerator[ChatCompletionChunk, None]:
    progress, shared = generation.Progress(predicted=_counts_drafts(server, body)), head.fields()
    first = True
    async with aclosing(generation.updates(outputs, n, progress)) as updates:
        async for new in updates:
            choice = _part(body, new, answers)
            if choice is None:
                continue
            chunk = ChatCompletionChunk(**shared, choices=[choice], **fields.usage(progress))
            if first:
                await _add_prompt(chunk, server, body, progress.last[0])
                first = False
            yield fields.pad(chunk)
    if fields.total:
        yield ChatCompletionChunk(**shared, choices=[], usage=progress.usage())


def _part(body: ChatRequest, new: Update, answers: ChatAnswers) -> ChatChunkChoice | None:
    """Return the choice of a stream event; None if the update has nothing for the client."""
    logprobs = None
    if new.logprobs is not None and body.logprobs and new.token_ids:
        logprobs = chat_logprobs(
            new.token_ids, new.logprobs, body.shown_logprobs, as_ids=bool(body.return_tokens_as_token_ids)
        )
    delta = answers.delta(new)
    shown = body.return_token_ids and new.token_ids
    if delta is None and logprobs is None and not new.finish_reason and not shown:
        return None
    choice = ChatChunkChoice(
        index=new.choice,
        delta=delta or Delta(content="" if logprobs is not None else UNSET),
        logprobs=logprobs,
        finish_reason=answers.finish_reason(new.choice, new.finish_reason),
    )
    if new.finish_reason is not None:
        choice.stop_reason = new.stop_reason
    if shown:
        choice.token_ids = new.token_ids
    if body.return_weight_versions:
        choice.weight_versions = new.weight_versions
    return choice


def _top_logprobs(body: ChatFields) -> int | None:
    """Return the number of log-probabilities per token; None: none. 0: only the chosen token's."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("top_logprobs", body.top_logprobs, "only goes with logprobs=true")
    return None


def _max_tokens(body: ChatFields, defaults: SamplingParams) -> int | None:
    """Return the answer's token limit, by default generation_config.json's. None: until max_model_len is reached."""
    if body.max_completion_tokens is not None:
        return body.max_completion_tokens
    if body.max_tokens is not None:
        return body.max_tokens
    return None if defaults.max_tokens == SamplingParams().max_tokens else defaults.max_tokens
