"""Endpoints that the load client supports: the bodies of their requests, and the readers of their answers."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from jpaged.load_client.answer import Answer
from jpaged.load_client.connection import LoadError


@dataclasses.dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a workload."""

    prompt: str | list[int]  # text, or token ids
    output_len: int | None   # maximum number of tokens to generate; None: the server decides


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(_Event)

Fields = Mapping[str, Any]


def completion_body(model: str, request: LoadRequest, fields: Fields) -> dict[str, Any]:
    """Return the body of a streamed completion. fields: fields of every request, such as the temperature."""
    return {"model": model, "prompt": request.prompt} | _streamed("max_tokens", request) | dict(fields)


def chat_body(model: str, request: LoadRequest, fields: Fields) -> dict[str, Any]:
    """Return the body of a streamed chat with one user message."""
    messages = [{"role": "user", "content": request.prompt}]
    return {"model": model, "messages": messages} | _streamed("max_completion_tokens", request) | dict(fields)


def embedding_body(model: str, request: LoadRequest, fields: Fields) -> dict[str, Any]:
    """Return the body of a request for one embedding."""
    return {"model": model, "input": request.prompt} | dict(fields)


def _streamed(limit: str, request: LoadRequest) -> dict[str, Any]:
    body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    return body if request.output_len is None else body | {limit: request.output_len}


class EventReader:
    """Reads the events of a stream as its bytes arrive, and records events with output."""

    def __init__(self, answer: Answer):
        self._answer = answer
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Read the next bytes. Raises LoadError for an error event, and for an event that is not OpenAI's."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def end(self) -> None:
        """Check the stream at its end. Raises LoadError if it had no output."""
        if self._answer.first is None:
            raise LoadError("the stream ended without output")

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        try:
            event = _EVENTS.decode(data)
        except msgspec.DecodeError as error:
            raise LoadError(f"an event of the stream is not OpenAI's: {error}") from None
        if event.error is not None:
            raise LoadError(f"error in the stream: {event.error}")
        if event.usage is not None:
            self._answer.prompt_tokens = event.usage.prompt_tokens
            self._answer.output_tokens = event.usage.completion_tokens
        for choice in event.choices:
            # A completion's chunk counts without text too, because a token may have no text. A chat's chunk does not:
            # the first one has only the role.
            text, delta = choice.text, choice.delta
            if delta is not None:
                text = delta.content or delta.reasoning or delta.reasoning_content
                if not text and not delta.tool_calls:
                    continue
            self._answer.received(text or "")


class WholeReader:
    """Reads an answer that is one JSON object with its usage, not a stream."""

    def __init__(self, answer: Answer):
        self._answer = answer
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> None:
        self._data.append(data)

    def end(self) -> None:
        """Read the object. Raises LoadError if it is not JSON."""
        try:
            usage = _EVENTS.decode(b"".join(self._data)).usage
        except msgspec.DecodeError as error:
            raise LoadError(f"the answer is not OpenAI's: {error}") from None
        if usage is not None:
            self._answer.prompt_tokens = usage.prompt_tokens


@dataclasses.dataclass(frozen=True)
class Backend:
    """One kind of endpoint."""

    path: str  # default of --endpoint
    body: Callable[[str, LoadRequest, Fields], dict[str, Any]]
    reader: Callable[[Answer], EventReader | WholeReader]
    takes_token_ids: bool = True

    @property
    def generates(self) -> bool:
        """True if answers are streams of tokens."""
        return self.reader is EventReader


_COMPLETIONS = Backend("/v1/completions", completion_body, EventReader)
_EMBEDDINGS = Backend("/v1/embeddings", embedding_body, WholeReader)
BACKENDS = {
    "openai": _COMPLETIONS,
    "vllm": _COMPLETIONS,
    "openai-chat": Backend("/v1/chat/completions", chat_body, EventReader, takes_token_ids=False),
    "openai-embeddings": _EMBEDDINGS,
}
