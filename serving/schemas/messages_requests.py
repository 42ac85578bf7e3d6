"""The bodies of Anthropic's routes: POST /v1/messages and /v1/messages/count_tokens."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from jpaged.params.sampling import MAX_STOP_STRINGS
from jpaged.serving.schemas.requests import ExtraArguments, Int, Label, Long, Short, SizeLimits, TemplateKwargs
from jpaged.serving.schemas.responses_requests import MAX_ITEM_VALUES


class MessageTurn(msgspec.Struct):
    """One message: text, or blocks (`TEXT_ONLY`, `USER_BLOCKS`, `ASSISTANT_BLOCKS`). Unknown fields are ignored."""

    role: Literal["user", "assistant", "system"]
    content: str | Long[dict[str, Any]]


class ThinkingConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`thinking`. budget_tokens: maximum number of thinking tokens. An answer always shows its thinking."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Int | None = None
    display: Literal["summarized"] | None = None


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`output_config`. format: `{"type": "json_schema", "schema": ...}`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class MessageMetadata(msgspec.Struct, forbid_unknown_fields=True):
    """`metadata`: a label for the client's bookkeeping."""

    user_id: Label | None = None


class MessageToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice`. name: of the tool, for type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountTokensRequest(SizeLimits, kw_only=True):
    """Body of POST /v1/messages/count_tokens. `cache_control` has no effect: caching needs no request here."""

    model: Label | None = None
    messages: Long[MessageTurn]
    system: str | Long[dict[str, Any]] | None = None
    tools: Short[dict[str, Any]] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    MAX_VALUES: ClassVar[int] = MAX_ITEM_VALUES
    MAX_BYTES: ClassVar[dict[str, int]] = SizeLimits.MAX_BYTES | {"output_config": 2**20, "cache_control": 1_024}
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "speed": ("standard",),
        "user_profile_id": (),
        "workspace_id": (),
        "context_management": ({}, []),
        "mcp_servers": ([],),
    }


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages. `cache_salt`, `priority` and `vllm_xargs` are vLLM's, as in the other routes."""

    max_tokens: Int
    metadata: MessageMetadata | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # there is one tier, which both values accept
    cache_salt: Label | None = None
    priority: Int | None = None
    vllm_xargs: ExtraArguments | None = None

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = CountTokensRequest.NEUTRAL | {
        "container": (),
        "diagnostics": (),
        "inference_geo": (),
        "watermarking": (False,),
        "kv_transfer_params": ({},),
        "ec_transfer_params": ({},),
    }


class TextBlock(msgspec.Struct, kw_only=True):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: list[Any] = []


class ThinkingBlock(msgspec.Struct, kw_only=True):
    """Thinking of an earlier answer. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, kw_only=True):
    """Encrypted thinking of another server's answer. The model cannot read it, so it is dropped."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(msgspec.Struct, kw_only=True):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None
    caller: dict[str, Any] | None = None


class ToolResultBlock(msgspec.Struct, kw_only=True):
    """The result of a call. is_error: the text then begins with `Error: `, because templates have no field for it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[dict[str, Any]] = ""
    is_error: bool = False
    cache_control: dict[str, Any] | None = None


TEXT_ONLY: dict[str, type[TextBlock]] = {"text": TextBlock}
USER_BLOCKS: dict[str, type[msgspec.Struct]] = {"text": TextBlock, "tool_result": ToolResultBlock}
ASSISTANT_BLOCKS: dict[str, type[msgspec.Struct]] = {
    "text": TextBlock, "thinking": ThinkingBlock, "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
}  # fmt: skip


class ToolDefinition(msgspec.Struct, kw_only=True):
    """A tool of the client."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"
    description: str | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None  # input is always streamed as it is generated
