"""The answers of /v1/responses: OpenAI's objects and stream events as structs.

`Raw` fields hold JSON, encoded once in a thread or token by token. Encoding an answer or event only copies it.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from jpaged.serving.schemas.answers import TokenLogprob

EMPTY = Raw(b"[]")
Status = Literal["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message. logprobs: a list of `ChosenTokenLogprob`."""

    text: str
    annotations: list[None] = []
    logprobs: Raw


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of a reasoning item."""

    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    role: str = "assistant"
    status: Status
    content: list[OutputText]


class OutputReasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of the model."""

    id: str
    summary: list[None] = []
    content: list[ReasoningText]
    status: Status


class OutputCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A function that the model calls. `arguments` is JSON text."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(msgspec.Struct):
    """`usage.input_tokens_details`. cached_tokens: tokens that a prefix hit saved computing."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """`usage.output_tokens_details`. reasoning_tokens: tokens of the reasoning's text, tokenised again."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Number of tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class FailureReason(msgspec.Struct):
    """`error` of a response that failed."""

    code: str
    message: str


class IncompleteReason(msgspec.Struct):
    """`incomplete_details`. reason: None if the answer ended because it repeated itself."""

    reason: str | None


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response. Raw fields repeat fields of the request."""

    id: str
    object: str = "response"
    created_at: float
    completed_at: float | None = None
    status: Status
    background: bool
    error: FailureReason | None = None
    incomplete_details: IncompleteReason | None = None
    instructions: Raw
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: Raw
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Raw
    safety_identifier: str | None
    service_tier: str
    temperature: float
    text: Raw
    tool_choice: Raw
    tools: Raw
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None


class InputTokenCount(msgspec.Struct):
    """Response of POST /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


class DeletedResponse(msgspec.Struct):
    """Response of DELETE /v1/responses/{id}."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputItemList(msgspec.Struct, kw_only=True):
    """A page of a response's input items."""

    object: str = "list"
    data: list[Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Event(msgspec.Struct, kw_only=True):
    """An event of a stream. The numbers begin at 0 and have no gaps."""

    type: str
    sequence_number: int


class ResponseEvent(Event, kw_only=True):
    """response.created, queued, in_progress, completed, incomplete and failed. response: a `ResponseObject` as JSON."""

    response: Raw


class ErrorEvent(Event, kw_only=True):
    """error: the stream ends. Its response may still run."""

    type: str = "error"
    code: str | None
    message: str
    param: str | None = None


class ItemEvent(Event, kw_only=True):
    """response.output_item.added and done."""

    output_index: int
    item: OutputItem


class PartEvent(Event, kw_only=True):
    """response.content_part.added and done."""

    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class DeltaEvent(Event, kw_only=True):
    """response.output_text.delta, reasoning_text.delta and function_call_arguments.delta."""

    item_id: str
    output_index: int
    content_index: int | UnsetType = UNSET
    delta: str
    logprobs: Raw | UnsetType = UNSET  # a list of EventLogprob


class DoneEvent(Event, kw_only=True):
    """response.output_text.done, reasoning_text.done and function_call_arguments.done."""

    item_id: str
    output_index: int
    content_index: int | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: Raw | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float


class EventLogprob(msgspec.Struct):
    """A generated token in an event: a `ChosenTokenLogprob` without bytes."""

    token: str
    logprob: float
    top_logprobs: list[TopLogprob]

    @classmethod
    def of(cls, token: str, logprob: float, top: list[TokenLogprob]) -> "EventLogprob":
        """Make an entry without the bytes of `top`."""
        return cls(token, logprob, [TopLogprob(one.token, one.logprob) for one in top])
