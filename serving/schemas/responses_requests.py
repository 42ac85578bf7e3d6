"""The body of POST /v1/responses, and the items of its `input`."""

from typing import Any, ClassVar, Literal

import msgspec

from jpaged.errors import RequestError
from jpaged.serving.schemas.requests import GenerationRequest, Int, Label, Long, Short, SizeLimits, TemplateKwargs

# Values of a field. Items are decoded as dicts, which Python's garbage collector then visits: with 20,000 parts of a
# message it stalls the event loop of the tests for 0.16 s.
MAX_ITEM_VALUES = 2**15
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`reasoning`. There are no summaries, also with `auto`: an answer has the whole text of its reasoning."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`text`: the format of the answer, like a chat's `response_format`, without the nested object `json_schema`."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/responses. It shares the sampling fields of the other routes, except those in `ELSEWHERE`."""

    input: str | Long[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: Label | None = None
    max_output_tokens: Int | None = None
    max_tool_calls: Int | None = None  # limits calls of hosted tools. There are none
    tools: Short[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Int | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Short[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: Int | None = None
    background: bool | None = None
    store: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    MAX_VALUES: ClassVar[int] = MAX_ITEM_VALUES
    MANY_VALUES: ClassVar[dict[str, int]] = {"allowed_token_ids": SizeLimits.MANY_VALUES["allowed_token_ids"]}
    # Three events of a stream repeat these fields. With 15 MB of them, encoding stalls the event loop for 0.1 s.
    MAX_BYTES: ClassVar[dict[str, int]] = SizeLimits.MAX_BYTES | {
        "instructions": 2**20, "tools": 2 * 2**20, "text": 2**20, "tool_choice": 2**16,
    }  # fmt: skip
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.NEUTRAL | {
        "prompt": (),
        "conversation": (),
        "context_management": ([],),
        "moderation": (),
        "prompt_cache_options": (),
        "background_options": (),
        "access_programs": (),
        "image": (),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "enable_response_messages": (False,),
        "previous_input_messages": ([],),
    }


class InputTokensRequest(ResponsesRequest, kw_only=True):
    """Body of POST /v1/responses/input_tokens. Fields that do not change the prompt have no effect."""


# Fields of the other generating routes, with what to send here.
ELSEWHERE = {
    "n": "a response has one answer: leave it out",
    "use_beam_search": "is a field of /v1/chat/completions only",
    "beam_width": "is a field of /v1/chat/completions only",
    "length_penalty": "is a field of /v1/chat/completions only",
    "early_stopping": "is a field of /v1/chat/completions only",
    "max_tokens": "send max_output_tokens",
    "response_format": "send text.format",
    "truncate_prompt_tokens": 'send truncation: "auto"',
    "truncation_side": 'send truncation: "auto"',
    "request_id": "the server chooses ids that cannot be guessed: leave it out",
    "echo": "is a field of /v1/chat/completions only",
    "prompt_logprobs": "is a field of /v1/chat/completions only",
    "return_token_ids": "is a field of /v1/chat/completions only",
    "return_weight_versions": "is a field of /v1/chat/completions only",
    "return_tokens_as_token_ids": "is a field of /v1/chat/completions only",
}
_NEUTRAL = {"n": 1}


def check_fields(body: ResponsesRequest) -> None:
    """Raise RequestError for a field that this route does not have, and for fields that contradict each other."""
    for name, accepted in ELSEWHERE.items():
        value = getattr(body, name)
        if value not in (None, False, _NEUTRAL.get(name)):
            raise RequestError(name, value, accepted)
    options = body.stream_options
    if options is not None and not body.stream:
        raise RequestError("stream_options", {}, "only goes with stream=true")
    for name in options.__struct_fields__ if options is not None else ():
        if getattr(options, name):
            raise RequestError(f"stream_options.{name}", True, "is not supported here: leave it out")
    if body.background and body.store is False:
        raise RequestError("store", False, "a response that runs in the background is stored: leave it out")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 20:
        raise RequestError("top_logprobs", body.top_logprobs, "must be 0 to 20")


class TextPart(msgspec.Struct, kw_only=True):
    """A part of a message. `annotations` and `logprobs` are accepted because clients copy them from an answer."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class RefusalPart(msgspec.Struct):
    """A refusal in a message of the assistant."""

    type: Literal["refusal"]
    refusal: str


class MessageItem(msgspec.Struct, kw_only=True):
    """A message. It may lack its type."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]]
    type: str = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(msgspec.Struct, kw_only=True):
    """A call that the model made. `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class CallOutputItem(msgspec.Struct, kw_only=True):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[dict[str, Any]]
    id: str | None = None
    status: str | None = None


class ReasoningItem(msgspec.Struct, kw_only=True):
    """Reasoning of an earlier answer. Summaries are not rendered."""

    type: Literal["reasoning"]
    content: list[dict[str, Any]] = []
    summary: list[Any] = []
    id: str | None = None
    status: str | None = None


ITEMS: dict[str, type[msgspec.Struct]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}
