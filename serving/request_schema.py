"""The request bodies that the routes accept: one struct per route. Unknown fields are refused by name.

`NEUTRAL` lists fields of OpenAI's and vLLM's API that are not supported yet, each with its neutral values. A neutral
value asks for nothing and is accepted, because some clients always send the field. Any other value is refused.
"""

from typing import Any, ClassVar, Literal

import msgspec

# Fields passed to SamplingParams under the same name. SamplingParams checks them.
SAMPLING_FIELDS = (
    "n",
    "best_of",
    "use_beam_search",
    "beam_width",
    "length_penalty",
    "early_stopping",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logits_processors",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "truncate_prompt_tokens",
    "truncation_side",
    "stream_interval",
    "thinking_token_budget",
    "repetition_detection",
)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None  # padding against traffic analysis: not supported


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Fields of both generating routes."""

    model: str | None = None
    n: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logits_processors: dict[str, dict[str, float]] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    stream_interval: int | None = None
    repetition_detection: dict[str, int] | None = None
    response_format: dict[str, Any] | None = None     # see output_format.py
    structured_outputs: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    # Labels for the client's bookkeeping, without effect on the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "service_tier": ("auto", "default"),
        "store": (False,),
        "prompt_logprobs": (),
        "echo": (False,),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
    }


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    logprobs: int | None = None

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.NEUTRAL | {
        "suffix": ("",),
        "add_special_tokens": (True,),
        "prompt_embeds": (),
    }


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/embeddings."""

    model: str | None = None
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None  # a label for the client's bookkeeping

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "use_activation": (True,),
        "truncate_prompt_tokens": (),
        "add_special_tokens": (True,),
        "messages": (),
    }


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """One part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: str


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """`function` of a tool call in an assistant's message."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool call in an assistant's message. `index` is accepted because clients copy it from a stream's deltas."""

    id: str | None = None
    type: Literal["function"] | None = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One message of a conversation. An assistant message of the official client is accepted unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    """`function` of a tool choice."""

    name: str


class NamedToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """A tool choice that names the tool."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: int | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    documents: list[dict[str, str]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.NEUTRAL | {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "verbosity": (),
        "web_search_options": (),
        "chat_template": (),
        "add_special_tokens": (False,),
    }
