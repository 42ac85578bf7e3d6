"""Shared by the generating routes: sampling parameters, stream updates and usage."""

import bisect
import dataclasses
import functools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing, contextmanager
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from jpaged.errors import MAX_INTEGER, LogitsError, RequestError
from jpaged.outputs import CompletionOutput, Logprob, RequestOutput
from jpaged.params.sampling import RequestOutputKind, SamplingParams
from jpaged.serving.openai_api.output_format import structured_outputs
from jpaged.serving.schemas.answers import (
    CachedTokens,
    ChatCompletionChunk,
    Completion,
    PredictionTokens,
    Usage,
    WeightVersionSpan,
)
from jpaged.serving.schemas.requests import SAMPLING_FIELDS, GenerationRequest
from jpaged.serving.web import json_pieces
from jpaged.serving.web.error_responses import APIError
from jpaged.serving.web.request_context import current, engine_request_id
from jpaged.version import __version__

logger = logging.getLogger("jpaged.serving")

Padded = TypeVar("Padded", Completion, ChatCompletionChunk)
PADDING = 64  # bytes
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]  # (index of the prompt, output)

FAILED = "the answer could not be processed; see the server's log"
ABORTED = "the request was aborted: the server is stopping, was paused, or got other weights"
FINGERPRINT = f"jpaged-{__version__}"
TIER = "default"  # the only tier: requests for any tier get it, and their answers name it


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """Fields of a response, or of every event of its stream."""

    id: str
    created: int
    model: str
    request_id: str  # unique, for the engine: clients may send one id twice
    service_tier: str | UnsetType = UNSET

    @classmethod
    def new(cls, prefix: str, model: str, asked: str | None = None, *, tier: str | None = None) -> "Head":
        """Make a head. asked: the body's id; None: the header X-Request-Id, or a new id. tier: body's service_tier."""
        request_id, context = engine_request_id(prefix), current.get()
        if asked is None and context is not None:
            asked = context.request_id
        answer_id = request_id if asked is None else f"{prefix}-{asked}"
        return cls(answer_id, int(time.time()), model, request_id, UNSET if tier is None else TIER)

    def fields(self) -> dict[str, Any]:
        """Return the fields as keyword arguments of a completion or a chat completion."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "service_tier": self.service_tier,
        }


@dataclasses.dataclass(slots=True)
class Update:
    """New text and tokens of one answer since its last update."""

    choice: int             # index of the answer in the response
    text: str               # new text; empty while a character is incomplete or a stop string may follow
    num_characters: int     # of the answer so far, with this text
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None   # one entry per token
    text_offsets: list[int] | None              # as in CompletionOutput, one per token
    finish_reason: str | None   # 'stop', 'length' or 'repetition' at the end; None before
    stop_reason: int | str | None
    weight_versions: list[WeightVersionSpan] | UnsetType = UNSET  # at the end
    special_offsets: list[int] | None = None    # as in CompletionOutput


class Progress:
    """A streamed request so far, from `updates`. last: each prompt's last output. num_tokens: of all answers."""

    def __init__(self, *, predicted: bool = False) -> None:
        """predicted: the usage counts drafts, as in `usage`."""
        self._predicted = predicted
        self.last: dict[int, RequestOutput] = {}
        self.num_tokens = 0

    def usage(self) -> Usage:
        """Count the tokens of the prompts that have an output, and of all answers so far."""
        return _usage(self.last, self.num_tokens, predicted=self._predicted)


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
        # A beam search takes no repetition penalty. Without this line, a model's default would cause an error.
        given.setdefault("repetition_penalty", 1.0)
    if request.logprob_token_ids:
        if logprobs is None:
            raise RequestError("logprob_token_ids", request.logprob_token_ids, "needs logprobs: ask for them as well")
        logprobs = None  # SamplingParams sets it to the number of ids
    if request.vllm_xargs:
        _log_unused("vllm_xargs")
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    params = dataclasses.replace(defaults, **given, max_tokens=max_tokens, logprobs=logprobs, output_kind=kind)
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError("stream", True, "prompt_logprobs come with whole answers only: leave stream out")
    if request.stream and params.chooses:
        what = "a beam search" if params.use_beam_search else "best_of > n"
        raise RequestError("stream", True, f"{what} has its answers only at the end: leave stream out")
    return params


@dataclasses.dataclass(frozen=True, slots=True)
class StreamFields:
    """The fields that `stream_options` adds to the events of a stream.

    total:      the last event has the usage of the request.
    continuous: every event has the usage so far.
    padded:     every event has a field `obfuscation`, whose length hides the length of the event's text.
    """

    total: bool = False
    continuous: bool = False
    padded: bool = False

    @classmethod
    def of(cls, request: GenerationRequest) -> "StreamFields":
        """Read a request's stream options. Raises RequestError for stream options without a stream."""
        options = request.stream_options
        if options is None:
            return cls()
        if not request.stream:
            raise RequestError("stream_options", msgspec.to_builtins(options), "needs stream=true")
        return cls(
            total=bool(options.include_usage),
            continuous=bool(options.include_usage and options.continuous_usage_stats),  # as in vLLM
            padded=bool(options.include_obfuscation),
        )

    def usage(self, progress: Progress) -> dict[str, Any]:
        """Return the usage field of an event as keyword arguments."""
        if self.continuous:
            return {"usage": progress.usage()}
        return {"usage": None} if self.total else {}

    def pad(self, event: Padded) -> Padded:
        """Return an event with its padding: the texts of all events then have lengths that are multiples of PADDING."""
        if self.padded:
            size = sum(map(len, json_pieces.encode(event.choices)))
            event.obfuscation = secrets.token_hex(PADDING)[: PADDING - size % PADDING]
        return event


@contextmanager
def named_as_sent(names: Mapping[str, str]) -> Generator[None]:
    """Context manager that renames a RequestError's parameter, or its known prefix. names: engine's name -> body's."""
    try:
        yield
    except RequestError as error:
        known = error.parameter
        while known and known not in names:
            known = known.rpartition(".")[0]
        parameter = names[known] + error.parameter[len(known) :] if known else error.parameter
        raise RequestError(parameter, error.value, error.accepted) from None


async def updates(outputs: Outputs, n: int, progress: Progress) -> AsyncGenerator[Update, None]:
    """Convert the outputs of a stream, which are deltas, to updates. Updates `progress`."""
    lengths: dict[int, int] = {}  # choice -> characters so far
    counts: dict[int, int] = {}  # choice -> tokens so far
    held: dict[int, _Tokens] = {}  # choice -> tokens that are not sent yet
    async with aclosing(outputs):
        async for prompt, request_output in outputs:
            progress.last[prompt] = request_output
            for output in request_output.outputs:
                if output.finish_reason is not None:
                    check_finished_well(output)
                choice = prompt * n + output.index
                length = lengths[choice] = lengths.get(choice, 0) + len(output.text)
                progress.num_tokens += len(output.token_ids)
                count = counts[choice] = counts.get(choice, 0) + len(output.token_ids)
                ids, logprobs, offsets = output.token_ids, output.logprobs, output.text_offsets
                if logprobs is not None and offsets is not None:
                    new = _Tokens(ids, logprobs, offsets)
                    sent, held[choice] = held.get(choice, _NONE).sendable(new, length, end=output.finished())
                    ids, logprobs, offsets = sent
                spans = UNSET if output.finish_reason is None else weight_spans(output, count)
                yield Update(
                    choice, output.text, length, ids, logprobs, offsets, output.finish_reason, output.stop_reason,
                    spans, output.special_offsets,
                )  # fmt: skip


def weight_spans(output: CompletionOutput, num_tokens: int) -> list[WeightVersionSpan]:
    """Return the versions of the weights that computed an answer of `num_tokens` tokens. output: its last one."""
    changes = output.weight_changes
    ends = [*(start for start, _ in changes[1:]), num_tokens]
    return [
        WeightVersionSpan(str(version), start, end)
        for (start, version), end in zip(changes, ends, strict=True) if end > start
    ]  # fmt: skip


class _Tokens(NamedTuple):
    """Tokens of one answer."""

    ids: list[int]
    logprobs: list[dict[int, Logprob]]
    offsets: list[int]

    def sendable(self, new: "_Tokens", length: int, *, end: bool) -> "tuple[_Tokens, _Tokens]":
        """Append `new`. Returns the tokens that begin at or before `length`, and the rest. end: return all.

        Text that may begin a stop string is held back, with its tokens' log-probabilities. At the end these are sent
        even if the stop string is cut off, because an answer without a stream has them too.
        """
        ids, logprobs, offsets = self.ids + new.ids, self.logprobs + new.logprobs, self.offsets + new.offsets
        count = len(ids) if end else bisect.bisect_right(offsets, length)
        rest = _Tokens(ids[count:], logprobs[count:], offsets[count:])
        return _Tokens(ids[:count], logprobs[:count], offsets[:count]), rest


_NONE = _Tokens([], [], [])


async def finished(outputs: Outputs) -> dict[int, RequestOutput]:
    """Return the last output of each prompt, in the prompts' order."""
    async with aclosing(outputs):
        finals = {prompt: output async for prompt, output in outputs}
    for request_output in finals.values():
        for output in request_output.outputs:
            check_finished_well(output)
    return dict(sorted(finals.items()))


def new_id(prefix: str) -> str:
    """Return a new id that cannot be guessed: 192 random bits."""
    return f"{prefix}_{secrets.token_hex(24)}"


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


def usage(finals: dict[int, RequestOutput], *, predicted: bool = False) -> Usage:
    """Count the tokens of all prompts and answers of a request without a stream.

    predicted: the server speculates, and the request has a prediction: count its drafts too.
    """
    completion = sum(len(output.token_ids) for final in finals.values() for output in final.outputs)
    return _usage(finals, completion, predicted=predicted)


def _usage(finals: dict[int, RequestOutput], completion: int, *, predicted: bool) -> Usage:
    prompt = sum(len(final.prompt_token_ids) for final in finals.values())
    cached = sum(final.num_cached_tokens for final in finals.values())
    counted = Usage(prompt, completion, prompt + completion, CachedTokens(cached))
    if predicted:
        drafts = sum(final.metrics.num_draft_tokens for final in finals.values())
        accepted = sum(final.metrics.num_accepted_tokens for final in finals.values())
        counted.completion_tokens_details = PredictionTokens(accepted, drafts - accepted)
    return counted


@functools.cache
def _log_unused(name: str) -> None:
    """Log once that a field has no effect."""
    logger.warning("%s has no effect on this server (logged once)", name)


def _token_id(key: str) -> int:
    try:
        token_id = int(key)
    except ValueError:
        token_id = -1
    if not 0 <= token_id <= MAX_INTEGER:
        raise RequestError("logit_bias", key, "keys are token ids, as decimal numbers")
    return token_id
