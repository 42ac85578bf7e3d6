"""POST /v1/completions, and POST /inference/v1/generate: token ids in, and token ids out."""

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from jpaged.errors import RequestError
from jpaged.frontend.prompt_streams import outputs_of
from jpaged.params.sampling import SamplingParams
from jpaged.serving.openai_api import generation
from jpaged.serving.openai_api.completion_answers import CompletionAnswers
from jpaged.serving.openai_api.echo import prompt_logprob_pieces, prompt_only
from jpaged.serving.openai_api.generation import Head, Outputs, StreamFields
from jpaged.serving.openai_api.logprob_shapes import chat_logprob_pieces, chat_logprobs
from jpaged.serving.openai_api.output_format import names_as_sent
from jpaged.serving.openai_api.prompts import completion_prompts, prompt_list, salted
from jpaged.serving.schemas.answers import Completion, TokensAnswer, TokensChoice
from jpaged.serving.schemas.requests import MAX_ALLOWED_IDS, SAMPLING_FIELDS, CompletionRequest, TokensRequest
from jpaged.serving.schemas.typed_items import convert, renamed
from jpaged.serving.server_state import Server
from jpaged.serving.web.body import read_body
from jpaged.serving.web.disconnect import until_disconnect
from jpaged.serving.web.json_pieces import JSONPieces, plain_pieces
from jpaged.serving.web.sse import open_stream

TOKENS_FIELDS = frozenset(SAMPLING_FIELDS) | {"max_tokens", "logprobs", "structured_outputs"}
# Parameter names of a completion -> names of /inference/v1/generate. The first match applies.
TOKENS_NAMES = (
    (r"^prompt(_token_ids)?$", "token_ids"), (r"^(?!(?:priority|cache_salt|stream)$)", "sampling_params."),
)  # fmt: skip


async def completions(request: Request) -> Response:
    """Complete one or several prompts: a string, strings, token ids, or lists of token ids."""
    return await answer_completion(request, await read_body(request, CompletionRequest))


async def answer_completion(request: Request, body: CompletionRequest) -> Response:
    """Answer a parsed completion request."""
    server: Server = request.app.state.server
    names = {"prompt_token_ids": "prompt"} | names_as_sent(body)
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        names["prompt_logprobs"] = "logprobs"
    with generation.named_as_sent(names):
        return await _answer(request, server, body)


async def _answer(request: Request, server: Server, body: CompletionRequest) -> Response:
    head = Head.new("cmpl", server.model_name(body.model), body.request_id, tier=body.service_tier)
    fields = StreamFields.of(body)
    params, only_prompt = _sampling_params(body, server.engine.default_sampling_params)
    sent = prompt_list(body.prompt)
    prepared = completion_prompts(server, body, params, sent)
    if body.add_special_tokens is False:  # texts are tokenised here
        prepared = until_disconnect(request.receive, prepared)
    prompts = await prepared
    # Clients expect an error for a max_tokens that does not fit, as from OpenAI and vLLM.
    asked = body.max_tokens is not None
    outputs = outputs_of(
        server.engine, prompts, params, head.request_id, priority=body.priority or 0, refuse_cut=asked,
        lora_request=server.lora_request(body.model),
    )  # fmt: skip
    if only_prompt:
        outputs = prompt_only(outputs)
    answers = CompletionAnswers(
        body, sent, server.engine.get_tokenizer(), skip_special_tokens=params.skip_special_tokens
    )
    if body.stream:
        return await open_stream(request.receive, _events(outputs, params.n, answers, head, fields))
    return await until_disconnect(request.receive, _whole(outputs, params.n, answers, head))


def _sampling_params(body: CompletionRequest, defaults: SamplingParams) -> tuple[SamplingParams, bool]:
    """Return the sampling parameters, and whether the answer is the prompt only: `echo` with `max_tokens` 0."""
    max_tokens = defaults.max_tokens if body.max_tokens is None else body.max_tokens
    only_prompt = bool(body.echo) and max_tokens == 0
    params = generation.sampling_params(
        body, defaults, max_tokens=1 if only_prompt else max_tokens, logprobs=body.logprobs
    )
    if body.echo and body.logprobs is not None:
        if body.prompt_logprobs not in (None, body.logprobs):
            accepted = f"must equal logprobs ({body.logprobs}) of a request with echo: leave it out"
            raise RequestError("prompt_logprobs", body.prompt_logprobs, accepted)
        params = dataclasses.replace(params, prompt_logprobs=body.logprobs)
    if only_prompt:
        params = dataclasses.replace(params, logprobs=None)
    return params, only_prompt


async def _whole(outputs: Outputs, n: int, answers: CompletionAnswers, head: Head) -> Response:
    finals = await generation.finished(outputs)
    choices = [
        await answers.whole(prompt * n + output.index, prompt, final, output)
        for prompt, final in finals.items()
        for output in final.outputs
    ]
    return JSONPieces(Completion(**head.fields(), choices=choices, usage=generation.usage(finals)))


async def _events(
    outputs: Outputs, n: int, answers: CompletionAnswers, head: Head, fields: StreamFields
) -> AsyncGenerator[Completion, None]:
    progress, shared = generation.Progress(), head.fields()
    opened: set[int] = set()
    async with aclosing(generation.updates(outputs, n, progress)) as updates:
        async for new in updates:
            prompt = new.choice // n
            if new.choice in opened:
                choice = answers.part(new, prompt)
            else:
                opened.add(new.choice)
                choice = await answers.first(new, prompt, progress.last[prompt])
            if choice.text or choice.logprobs is not None or choice.finish_reason or choice.token_ids:
                yield fields.pad(Completion(**shared, choices=[choice], **fields.usage(progress)))
    if fields.total:
        yield Completion(**shared, choices=[], usage=progress.usage())


async def generate(request: Request) -> Response:
    """Complete token ids: the answer has token ids, and no text."""
    server: Server = request.app.state.server
    body = await read_body(request, TokensRequest)
    head = Head.new("generate-tokens", server.model_name(body.model), body.request_id)
    for name in body.sampling_params.keys() - TOKENS_FIELDS:
        raise RequestError(f"sampling_params.{name}", body.sampling_params[name], "unknown sampling parameter")
    fields = convert("sampling_params", {**body.sampling_params, "prompt": []}, CompletionRequest)
    fields.stream, fields.stream_options = body.stream, body.stream_options
    usage = StreamFields.of(fields)
    with renamed(TOKENS_NAMES), generation.named_as_sent(names_as_sent(fields)):
        params = _tokens_params(fields, server.engine.default_sampling_params)
        prompts = salted([{"prompt_token_ids": body.token_ids}], body.cache_salt)
        outputs = outputs_of(
            server.engine, prompts, params, head.request_id, priority=body.priority or 0,
            refuse_cut=fields.max_tokens is not None, lora_request=server.lora_request(body.model),
        )  # fmt: skip
        if body.stream:
            events = _token_events(outputs, params, head.id, usage)
            return await open_stream(request.receive, events)
        return await until_disconnect(request.receive, _whole_tokens(outputs, params, head.id))


def _tokens_params(fields: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """Return the sampling parameters. As in a chat, max_tokens defaults to what fits."""
    most = fields.max_tokens
    if most is None and defaults.max_tokens != SamplingParams().max_tokens:
        most = defaults.max_tokens
    logprobs = 0 if fields.logprob_token_ids else fields.logprobs
    return generation.sampling_params(fields, defaults, max_tokens=most, logprobs=logprobs)


async def _whole_tokens(outputs: Outputs, params: SamplingParams, request_id: str) -> Response:
    finals = await generation.finished(outputs)
    choices = []
    for output in finals[0].outputs:
        ids = await plain_pieces(output.token_ids)
        choice = TokensChoice(index=output.index, finish_reason=output.finish_reason, token_ids=cast(Any, ids))
        choice.weight_versions = generation.weight_spans(output, len(output.token_ids))
        if output.logprobs is not None:
            choice.logprobs = await chat_logprob_pieces(
                output.token_ids, output.logprobs, _num_shown(params), as_ids=True
            )
        choices.append(choice)
    answer = TokensAnswer(
        request_id=request_id, choices=choices, usage=generation.usage(finals), prompt_logprobs=None
    )
    if finals[0].prompt_logprobs is not None:
        answer.prompt_logprobs = cast(Any, await prompt_logprob_pieces(finals[0].prompt_logprobs))
    return JSONPieces(answer)


async def _token_events(
    outputs: Outputs, params: SamplingParams, request_id: str, fields: StreamFields
) -> AsyncGenerator[TokensAnswer, None]:
    progress = generation.Progress()
    async with aclosing(generation.updates(outputs, params.n, progress)) as updates:
        async for new in updates:
            if not new.token_ids and new.finish_reason is None:
                continue
            choice = TokensChoice(index=new.choice, finish_reason=new.finish_reason, token_ids=new.token_ids)
            choice.weight_versions = new.weight_versions
            if new.logprobs is not None:
                choice.logprobs = chat_logprobs(new.token_ids, new.logprobs, _num_shown(params), as_ids=True)
            yield TokensAnswer(request_id=request_id, choices=[choice], **fields.usage(progress))
    if fields.total:
        yield TokensAnswer(request_id=request_id, choices=[], usage=progress.usage())


def _num_shown(params: SamplingParams) -> int:
    """Return the number of log-probabilities per token. With logprob_token_ids: those ids, and the token's own."""
    if params.logprob_token_ids:
        return len(params.logprob_token_ids) + 1
    return MAX_ALLOWED_IDS if params.logprobs == -1 else params.logprobs or 0
