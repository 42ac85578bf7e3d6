"""The answers of /v1/messages: Anthropic's objects and stream events as structs."""

import datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextContent(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text of an answer."""

    text: str


class ThinkingContent(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """Thinking of an answer. There are no signatures."""

    thinking: str
    signature: str = ""


class ToolUseContent(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call. input: its arguments; empty if the answer ended before they were complete."""

    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(msgspec.Struct, kw_only=True):
    """Number of tokens. input_tokens: computed tokens of the prompt, without its prefix hit."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessageObject(msgspec.Struct, kw_only=True):
    """Response of POST /v1/messages."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    """Response of POST /v1/messages/count_tokens."""

    input_tokens: int


class MessageError(msgspec.Struct):
    """`error` of an error body. The message contains the name of the field."""

    type: str
    message: str


class MessageErrorBody(msgspec.Struct):
    """The body of an answer with an error status, and the event of an error in a stream."""

    error: MessageError
    type: str = "error"
    request_id: str | None = None


class MessageStart(msgspec.Struct, kw_only=True):
    """The first event: the message without content."""

    type: str = "message_start"
    message: MessageObject


class Ping(msgspec.Struct):
    """An event that clients ignore. It comes after the first one, as in Anthropic's API."""

    type: str = "ping"


class BlockStart(msgspec.Struct, kw_only=True):
    """The beginning of a block."""

    type: str = "content_block_start"
    index: int
    content_block: Content


class ContentDelta(msgspec.Struct, kw_only=True):
    """New part of a block: one of the fields."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET


class BlockDelta(msgspec.Struct, kw_only=True):
    """New part of a block."""

    type: str = "content_block_delta"
    index: int
    delta: ContentDelta


class BlockStop(msgspec.Struct, kw_only=True):
    """The end of a block."""

    type: str = "content_block_stop"
    index: int


class StopDelta(msgspec.Struct):
    """Why an answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, kw_only=True):
    """The event before the last one: the end of the message, and its usage."""

    type: str = "message_delta"
    delta: StopDelta
    usage: MessageUsage


class MessageStop(msgspec.Struct):
    """The last event."""

    type: str = "message_stop"


MessageEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class ModelInfo(msgspec.Struct, kw_only=True):
    """A model that is served. max_input_tokens: of a prompt. One token of an answer still fits."""

    type: str = "model"
    id: str
    display_name: str
    created_at: datetime.datetime
    lifecycle: str = "active"
    max_input_tokens: int


class ModelInfoList(msgspec.Struct, kw_only=True):
    """A page of models."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None
