"""Code of both generating routes: the server's state, sampling parameters, and updates of streams."""

import bisect
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing, contextmanager
from http import HTTPStatus
from typing import Any

from jpaged.chat.turn import DEFAULT_TEMPLATE_KWARGS, ChatFormats
from jpaged.errors import MAX_INTEGER, LogitsError, RequestError, shown
from jpaged.outputs import CompletionOutput, RequestOutput
from jpaged.params.sampling import RequestOutputKind, SamplingParams
from jpaged.serving.engine_client import EngineClient, Prompt
from jpaged.serving.error_responses import APIError
from jpaged.serving.output_format import structured_outputs
from jpaged.serving.request_schema import SAMPLING_FIELDS, EmbeddingRequest, GenerationRequest
from jpaged.serving.response_schema import CachedTokens, Usage

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]  # (index of the prompt, output)

FAILED = "the answer could not be processed; see the server's log"
ABORTED = "the request was aborted: the server is stopping"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """State that all routes share."""

    engine: EngineClient
    model_names: tuple[str, ...]      # names that requests may use; answers show the first
    template_kwargs: tuple[str, ...] = DEFAULT_TEMPLATE_KWARGS  # variables of the chat template that requests may set
    # Chat template, and formats of tool calls and reasoning.
    chat: ChatFormats = dataclasses.field(default_factory=ChatFormats)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def model_name(self, asked: str | None) -> str:
        """Return the model name for the answer. Raises APIError 404 for a name that is not served."""
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            names = ", ".join(self.model_names)
            message = f"is not served here; available: {names} (model={shown(asked)})"
            raise APIError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")
        return asked


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """Fields that every object of one answer has."""

    id: str
    created: int
    model: str
    request_id: str  # in the engine: clients may send the same id twice

    @classmethod
    def new(cls, prefix: str, model: str, asked: str | None = None) -> "Head":
        """Make a head. asked: the id that the request gives; None: a new one."""
        request_id = f"{prefix}-{uuid.uuid4().hex}"
        return cls(request_id if asked is None else f"{prefix}-{asked}", int(time.time()), model, request_id)

    def fields(self) -> dict[str, Any]:
        """Return the fields as keyword arguments of a response struct."""
        return {"id": self.id, "created": self.created, "model": self.model}


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """New text and tokens of one answer since its last update."""

    choice: int             # index of the answer in the response
    text: str               # new text; empty while a character is incomplete or a stop string may follow
    token_range: slice      # the new tokens, in output.token_ids
    output: CompletionOutput

    @property
    def finish_reason(self) -> str | None:
        """'stop', 'length' or 'repetition' at the end; None before."""
        return self.output.finish_reason


def sampling_params(
    request: GenerationRequest, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Make sampling parameters: the request's fields over the defaults. Raises RequestError that names the field."""
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(request, name, None)) is not None}
    if "logit_bias" in given:
        given["logit_bias"] = {_token_id(key): bias for key, bias in given["logit_bias"].items()}
    if (structured := structured_outputs(request)) is not None:
        given["structured_outputs"] = structured
    if request.use_beam_search:
        # A beam search has no repetition penalty. The model's default must not refuse it: the client did not send it.
        given.setdefault("repetition_penalty", 1.0)
    kind = RequestOutputKind.CUMULATIVE if request.stream else RequestOutputKind.FINAL_ONLY
    params = dataclasses.replace(defaults, **given, max_tokens=max_tokens, logprobs=logprobs, output_kind=kind)
    if request.stream and params.chooses:
        what = "a beam search" if params.use_beam_search else "best_of > n"
        raise RequestError("stream", True, f"{what} has its answers only at the end: leave stream out")
    return params


def salted(prompts: list[Prompt], request: GenerationRequest | EmbeddingRequest) -> list[Prompt]:
    """Add the request's cache_salt to its prompts. Raises RequestError for an empty salt, which isolates nothing."""
    salt = request.cache_salt
    if salt is None:
        return prompts
    if not salt:
        raise RequestError("cache_salt", salt, "must not be empty: leave it out to share the cache with all requests")
    return [{**({"prompt": one} if isinstance(one, str) else one), "cache_salt": salt} for one in prompts]


def check_stream_options(request: GenerationRequest) -> bool:
    """Return True if the stream ends with the usage. Raises RequestError for stream options without a stream."""
    if request.stream_options is None:
        return False
    if not request.stream:
        raise RequestError("stream_options", {}, "only goes with stream=true")
    return bool(request.stream_options.include_usage)


@contextmanager
def named_as_sent(names: Mapping[str, str]) -> Generator[None]:
    """Context manager that renames the parameter of a RequestError to the name that the request used.

    names: from the engine's names to the request's names. A part of a renamed parameter is renamed as well.
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
    """Convert cumulative outputs to updates. `finals` receives the last output of each prompt, for the usage."""
    sent: dict[int, tuple[int, int]] = {}  # choice -> (tokens, characters) sent so far
    ended: set[int] = set()  # choices that are complete, while other choices of the prompt still run
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
                tokens, characters = sent.get(choice, (0, 0))
                num_tokens = _num_sendable_tokens(output)
                sent[choice] = (num_tokens, len(output.text))
                yield Update(choice, output.text[characters:], slice(tokens, num_tokens), output)


async def finished(outputs: Outputs) -> dict[int, RequestOutput]:
    """Return the last output of each prompt, in the prompts' order."""
    async with aclosing(outputs):
        finals = {prompt: output async for prompt, output in outputs}
    for request_output in finals.values():
        for output in request_output.outputs:
            check_finished_well(output)
    return dict(sorted(finals.items()))


def _num_sendable_tokens(output: CompletionOutput) -> int:
    """Return how many of an answer's tokens begin in its text so far.

    Text that may be the beginning of a stop string is held back, and the log-probabilities of its tokens as well. They
    are sent at the answer's end, even if the stop string is cut off: an answer without a stream has them too.
    """
    if output.text_offsets is None or output.finished():
        return len(output.token_ids)
    return bisect.bisect_right(output.text_offsets, len(output.text))


def check_finished_well(output: CompletionOutput) -> None:
    """Raise APIError for an answer that was aborted or failed: OpenAI's API has no such finish reasons."""
    if output.finish_reason == "abort":  # the engine is closing
        raise APIError(HTTPStatus.SERVICE_UNAVAILABLE, ABORTED, code="aborted")
    if output.finish_reason == "error" and output.stop_reason == LogitsError.message:
        raise APIError(HTTPStatus.INTERNAL_SERVER_ERROR, LogitsError.message, code="engine_error")
    if output.finish_reason == "error" and output.stop_reason is not None:
        message = f"the grammar of the answer {output.stop_reason}"
        raise APIError(HTTPStatus.BAD_REQUEST, message, param="response_format", code="grammar_error")
    if output.finish_reason == "error":
        raise APIError(HTTPStatus.INTERNAL_SERVER_ERROR, FAILED, code="engine_error")


def usage(finals: dict[int, RequestOutput]) -> Usage:
    """Count the tokens of all prompts and answers."""
    prompt = sum(len(final.prompt_token_ids) for final in finals.values())
    completion = sum(len(output.token_ids) for final in finals.values() for output in final.outputs)
    cached = sum(final.num_cached_tokens for final in finals.values())
    return Usage(prompt, completion, prompt + completion, CachedTokens(cached))


def _token_id(key: str) -> int:
    try:
        token_id = int(key)
    except ValueError:
        token_id = -1
    if not 0 <= token_id <= MAX_INTEGER:
        raise RequestError("logit_bias", key, "keys are token ids, as decimal numbers")
    return token_id
