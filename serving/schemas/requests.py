"""The request bodies of the generating routes: one struct per route. Unknown fields of a body are refused by name.

`NEUTRAL` lists fields of OpenAI's and vLLM's API that are not supported yet, each with its neutral values. A neutral
value asks for nothing and is accepted, because some clients always send the field. Any other value is refused.

Every list, map and label has a limit, so that decoding and checking a body takes at most about 50 ms.
"""

from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from jpaged.params.sampling import MAX_STOP_STRINGS, SamplingParams

T = TypeVar("T")

MAX_TOKEN_IDS = 2**20    # of all prompts of a request together; decoding them takes 40 ms
MAX_ALLOWED_IDS = 2**19  # larger than any vocabulary
MAX_VALUES = 2**17       # of any other field

Int = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Label = Annotated[str, Meta(max_length=4_096)]
Short = Annotated[list[T], Meta(max_length=1_024)]
Long = Annotated[list[T], Meta(max_length=16_384)]
Many = Annotated[list[T], Meta(max_length=MAX_TOKEN_IDS)]
Processors = Annotated[dict[str, Annotated[dict[str, float], Meta(max_length=128)]], Meta(max_length=128)]
ExtraArguments = Annotated[dict[str, Any], Meta(max_length=128)]
TemplateKwargs = Annotated[dict[str, str | Int | float | bool | None], Meta(max_length=128)]

# A label that the client chooses.
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None     # pad every event, so that its size does not show its text's length
    continuous_usage_stats: bool | None = None  # the usage so far, in every event


class SizeLimits(msgspec.Struct):
    """Limits of a body that are checked before it is decoded. See `body.decode_body`."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}
    MISPLACED: ClassVar[dict[str, str]] = {}  # fields of another route, with the route
    MAX_BODY_VALUES: ClassVar[int] = MAX_TOKEN_IDS + MAX_VALUES
    MAX_VALUES: ClassVar[int] = MAX_VALUES
    MANY_VALUES: ClassVar[dict[str, int]] = {
        "prompt": MAX_TOKEN_IDS, "input": MAX_TOKEN_IDS, "tokens": MAX_TOKEN_IDS, "allowed_token_ids": MAX_ALLOWED_IDS,
    }  # fmt: skip
    # Fields that accept any JSON, with their maximum bytes. The engine accepts 64 KiB of a schema by default.
    MAX_BYTES: ClassVar[dict[str, int]] = {
        "response_format": 2**20, "structured_outputs": 2**20, "tools": 8 * 2**20, "documents": 8 * 2**20,
        "prediction": 8 * 2**20, "functions": 8 * 2**20, "vllm_xargs": 2**16,
    }  # fmt: skip


class GenerationRequest(SizeLimits, kw_only=True):
    """Fields of all generating routes."""

    model: Label | None = None
    # tools/write_sampling_fields.py writes these from SamplingParams.
    n: Int | None = None
    use_beam_search: bool | None = None
    beam_width: Int | None = None
    length_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    max_tokens: Int | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: Int | None = None
    truncate_prompt_tokens: Int | None = None
    # Until here.
    early_stopping: bool | Literal["never"] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Short[Int] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=1_024)] | None = None
    # A tuple: SamplingParams keeps it without a copy.
    allowed_token_ids: Annotated[tuple[Int, ...], Meta(max_length=MAX_ALLOWED_IDS)] | None = None
    bad_words: Short[str] | None = None
    logits_processors: Processors | None = None
    truncation_side: Literal["left", "right"] | None = None
    repetition_detection: Annotated[dict[str, Int], Meta(max_length=16)] | None = None
    response_format: dict[str, Any] | None = None     # see output_format.py
    structured_outputs: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int | None = None
    cache_salt: Label | None = None
    request_id: RequestId | None = None  # the answer's id ends with it
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    echo: bool | None = None
    logprob_token_ids: Short[Int] | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # Labels for the client's bookkeeping, without effect on the answer.
    user: Label | None = None
    metadata: Annotated[dict[Label, Label], Meta(max_length=128)] | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    session_id: Label | None = None
    vllm_xargs: ExtraArguments | None = None  # arguments of vLLM's plugins: without effect, logged once

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "return_token_offsets": (False,),
        "routed_experts_prompt_start": (0,),
        "watermarking": (False,),
        "kv_transfer_params": ({},),
        "ec_transfer_params": ({},),
    }


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | Many[str | Int | Many[Int]]
    best_of: Int | None = None
    logprobs: Int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.NEUTRAL | {"prompt_embeds": (), "store": (False,)}
    MISPLACED: ClassVar[dict[str, str]] = {
        "messages": "/v1/chat/completions", "input": "/v1/responses", "store": "/v1/responses",
    }  # fmt: skip


class PredictedText(msgspec.Struct, forbid_unknown_fields=True):
    """One part of a prediction."""

    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """`prediction` of a chat: the expected answer. The texts of its parts are joined."""

    type: Literal["content"]
    content: str | Long[PredictedText]

    @property
    def text(self) -> str:
        """The expected answer."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class TextPart(msgspec.Struct):
    """One part of a message's content. Only text is supported, and refusals in messages of the assistant."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct):
    """`function` of a tool call in an assistant's message."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CalledCustom(msgspec.Struct):
    """`custom` of a tool call in an assistant's message."""

    name: str
    input: str


class MessageToolCall(msgspec.Struct, kw_only=True):
    """A function or custom tool call in an assistant's message. Clients copy `index` from the deltas of a stream."""

    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    index: Int | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation. Unknown fields, also of its parts and calls, are ignored: see `ignored_fields`."""

    # system, developer, user, assistant, tool, function, or a role that the chat template knows
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | Long[TextPart] | None = None
    name: str | None = None
    tool_calls: Short[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Short[Any] | None = None
    audio: None = None
    function_call: CalledFunction | None = None


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    """`function` of a tool choice."""

    name: str


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    """`allowed_tools` of a tool choice: the tools that may be called, by name."""

    mode: Literal["auto", "required"]
    tools: Short[dict[str, Any]]


class ToolChoiceObject(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool choice that names one tool, or the tools that may be called. The field named by `type` is set."""

    type: Literal["function", "custom", "allowed_tools"]
    function: NamedFunction | None = None
    custom: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class ChatFields(GenerationRequest, kw_only=True):
    """Fields of both chat routes."""

    logprobs: bool | None = None
    top_logprobs: Int | None = None
    max_completion_tokens: Int | None = None
    tools: Short[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    functions: Short[dict[str, Any]] | None = None  # OpenAI's fields before tools and tool_choice
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    thinking_token_budget: Int | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    include_reasoning: bool | None = None
    return_prompt_text: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    documents: Short[Annotated[dict[str, str], Meta(max_length=1_024)]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    prediction: Prediction | None = None  # its tokens are drafts, with speculative decoding; no effect on the answer

    @property
    def shown_logprobs(self) -> int:
        """Number of `top_logprobs` per token. With `logprob_token_ids`: those ids, and the token's own."""
        if self.logprob_token_ids:
            return len(self.logprob_token_ids) + 1
        return MAX_ALLOWED_IDS if self.top_logprobs == -1 else self.top_logprobs or 0

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.NEUTRAL | {
        "modalities": (["text"],),
        "audio": (),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "web_search_options": (),
        "chat_template": (),
        "store": (False,),
    }
    MISPLACED: ClassVar[dict[str, str]] = {
        "prompt": "/v1/completions", "input": "/v1/responses", "store": "/v1/responses",
    }  # fmt: skip


class ChatRequest(ChatFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Long[ChatMessage]


class BatchChatRequest(ChatFields, kw_only=True):
    """Body of POST /v1/chat/completions/batch: several conversations with the same parameters."""

    messages: Annotated[list[Long[ChatMessage]], Meta(min_length=1, max_length=1_024)]

    def chats(self) -> list[ChatRequest]:
        """Return the request of each conversation."""
        shared = {name: getattr(self, name) for name in ChatFields.__struct_fields__}
        return [ChatRequest(messages=messages, **shared) for messages in self.messages]


class TokensRequest(SizeLimits, kw_only=True):
    """Body of POST /inference/v1/generate. sampling_params: the sampling fields of a completion."""

    token_ids: Many[Int]
    sampling_params: dict[str, Any]
    model: Label | None = None
    request_id: RequestId | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Label | None = None
    priority: Int | None = None
    return_token_ids: bool | None = None  # the answer always has them

    MANY_VALUES: ClassVar[dict[str, int]] = {"token_ids": MAX_TOKEN_IDS}
    MAX_BYTES: ClassVar[dict[str, int]] = SizeLimits.MAX_BYTES | {"sampling_params": 2**20}
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "token_offsets": (),
        "features": (),
        "content_parts": ([],),
        "output_mode": ("tokens",),
        "parse_context": (),
        "reasoning_ended": (False,),
        "reasoning_parser_kwargs": ({},),
        "kv_transfer_params": ({},),
        "ec_transfer_params": ({},),
    }


# Fields passed to SamplingParams under the same name. SamplingParams checks them.
SAMPLING_FIELDS = tuple(
    name for name in SamplingParams.__dataclass_fields__
    if name in {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}
    and name not in ("max_tokens", "logprobs", "structured_outputs")
)  # fmt: skip
