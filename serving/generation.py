"""What both generating routes share: the server's state, sampling parameters, and outputs as what is new."""

import bisect
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing, contextmanager
from http import HTTPStatus
from typing import Any

from jpaged.chat.turn import DEFAULT_TEMPLATE_KWARGS, ChatFormats
from jpaged.errors import RequestError
from jpaged.outputs import CompletionOutput, RequestOutput
from jpaged.params.sampling import RequestOutputKind, SamplingParams
from jpaged.serving.engine_client import EngineClient, Prompt
from jpaged.serving.error_responses import APIError
from jpaged.serving.output_format import structured_outputs
from jpaged.serving.request_schema import SAMPLING_FIELDS, EmbeddingRequest, GenerationRequest
from jpaged.serving.response_schema import CachedTokens, Usage

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]  # of several prompts, each with its prompt's index

FAILED = "the answer could not be processed; the server's log has more"
ABORTED = "the request was aborted: the server is stopping"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """What the routes work with."""

    engine: EngineClient
    model_names: tuple[str, ...]      # names the model answers to; the first is the one that answers show
    template_kwargs: tuple[str, ...] = DEFAULT_TEMPLATE_KWARGS  # variables of the chat template that requests may set
    # How conversations are rendered, and answers read.
    chat: ChatFormats = dataclasses.field(default_factory=ChatFormats)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def model_name(self, asked: str | None) -> str:
        """The name to answer with. Raises APIError 404 for a model that is not here."""
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            names = ", ".join(self.model_names)
            message = f"model={asked!r} is not served here; there is {names}"
            raise APIError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")
        return asked


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer begins with."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> "Head":
        """With a fresh id."""
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)

    def fields(self) -> dict[str, Any]:
        """As keyword arguments of a response struct."""
        return {"id": self.id, "created": self.created, "model": self.model}


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """What is new in one answer since the last update of it."""

    choice: int             # index of the answer in the response
    text: str               # new text; empty while a character is incomplete, or a stop string may begin
    token_range: slice      # the new ones among the answer's tokens
    output: CompletionOutput

    @property
    def finish_reason(self) -> str | None:
        """'stop', 'length' or 'repetition' at the end, None before."""
        return self.output.finish_reason


def sampling_params(
    request: GenerationRequest, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The request's fields over the defaults. Raises RequestError that names the field."""
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(request, name, None)) is not None}
    if "logit_bias" in given:
        given["logit_bias"] = {_token_id(key): bias for key, bias in given["logit_bias"].items()}
    if (structured := structured_outputs(request)) is not None:
        given["structured_outputs"] = structured
    if request.use_beam_search:
        # Of the model's defaults, a beam search cannot use this one. The client did not send it: no reason to refuse.
        given.setdefault("repetition_penalty", 1.0)
    kind = RequestOutputKind.CUMULATIVE if request.stream else RequestOutputKind.FINAL_ONLY
    params = dataclasses.replace(defaults, **given, max_tokens=max_tokens, logprobs=logprobs, output_kind=kind)
    if request.stream and params.chooses:
        what = "of a beam search" if params.use_beam_search else "of best_of > n"
        raise RequestError("stream", True, f"{what} the answers are known at the end only: leave stream out")
    return params


def salted(prompts: list[Prompt], request: GenerationRequest | EmbeddingRequest) -> list[Prompt]:
    """The prompts with the request's cache_salt. Raises RequestError for an empty one: it would keep nobody apart."""
    salt = request.cache_salt
    if salt is None:
        return prompts
    if not salt:
        raise RequestError("cache_salt", salt, "must not be empty: leave it out to share the cache with everybody")
    return [{**({"prompt": one} if isinstance(one, str) else one), "cache_salt": salt} for one in prompts]


def check_stream_options(request: GenerationRequest) -> bool:
    """Whether the stream ends with the usage. Raises RequestError for options without a stream."""
    if request.stream_options is None:
        return False
    if not request.stream:
        raise RequestError("stream_options", {}, "only goes with stream=true")
    return bool(request.stream_options.include_usage)


@contextmanager
def named_as_sent(names: Mapping[str, str]) -> Generator[None]:
    """Errors inside name a field as the request wrote it, where the engine's name for it is another (the key).

    What lies inside a field is called by the field's name and the rest.
    """
    try:
        yield
    except RequestError as error:
        known = error.parameter
        while known and known not in names:
            known = known.rpartition(".")[0]
        parameter = names[known] + error.parameter[len(known) :] if known else error.parameter
        raise RequestError(parameter, error.value, error.accepted) from None


async def updates(
    outputs: Outputs, n: int, finals: dict[int, RequestOutput]
) -> AsyncGenerator[Update, None]:
    """Cumulative outputs as what is new in each. `finals` receives the last output of each prompt, for the usage."""
    seen: dict[int, tuple[int, int]] = {}  # choice -> (tokens, characters) told
    ended: set[int] = set()  # choices of which all is told, while others of the prompt go on
    async with aclosing(outputs):
        async for prompt, request_output in outputs:
            finals[prompt] = request_output
            for output in request_output.outputs:
                check_finished_well(output)
                choice = prompt * n + output.index
                if choice in ended:
                    continue
                if output.finished():
                    ended.add(choice)
                tokens, characters = seen.get(choice, (0, 0))
                told = _tokens_to_tell(output)
                seen[choice] = (told, len(output.text))
                yield Update(choice, output.text[characters:], slice(tokens, told), output)


async def finished(outputs: Outputs) -> dict[int, RequestOutput]:
    """The last output of each prompt, in the prompts' order."""
    async with aclosing(outputs):
        finals = {prompt: output async for prompt, output in outputs}
    for request_output in finals.values():
        for output in request_output.outputs:
            check_finished_well(output)
    return dict(sorted(finals.items()))


def _tokens_to_tell(output: CompletionOutput) -> int:
    """How many of an answer's tokens go with its text so far.

    The log-probabilities of those that begin in text that is held back wait for it: where a stop string is cut off,
    they are told at the text's end, as they are without a stream.
    """
    if output.text_offsets is None or output.finished():
        return len(output.token_ids)
    return bisect.bisect_right(output.text_offsets, len(output.text))


def check_finished_well(output: CompletionOutput) -> None:
    """Raises APIError for an answer that the engine broke off: OpenAI's API has no such reasons."""
    if output.finish_reason == "abort":  # it is closing
        raise APIError(HTTPStatus.SERVICE_UNAVAILABLE, ABORTED, code="aborted")
    if output.finish_reason == "error" and output.stop_reason is not None:
        message = f"the grammar that the answer is to match {output.stop_reason}"
        raise APIError(HTTPStatus.BAD_REQUEST, message, param="response_format", code="grammar_error")
    if output.finish_reason == "error":
        raise APIError(HTTPStatus.INTERNAL_SERVER_ERROR, FAILED, code="engine_error")


def usage(finals: dict[int, RequestOutput]) -> Usage:
    """Tokens of all prompts and answers together."""
    prompt = sum(len(final.prompt_token_ids) for final in finals.values())
    completion = sum(len(output.token_ids) for final in finals.values() for output in final.outputs)
    cached = sum(final.num_cached_tokens for final in finals.values())
    return Usage(prompt, completion, prompt + completion, CachedTokens(cached))


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise RequestError("logit_bias", key, "keys are token ids, as decimal numbers") from None
