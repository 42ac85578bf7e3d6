"""The responses of the routes: OpenAI's objects as structs. A field that is UNSET does not appear in the JSON."""

import msgspec
from msgspec import UNSET, UnsetType


class CachedTokens(msgspec.Struct):
    """`usage.prompt_tokens_details`: prompt tokens that a prefix hit saved computing."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Number of tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities in the format of /v1/completions: one entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One answer, or the part of it in a stream event."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None  # stop, length, repetition


class Completion(msgspec.Struct, kw_only=True):
    """Response of POST /v1/completions, and event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TokenLogprob(msgspec.Struct):
    """One token. `bytes` are the UTF-8 bytes of its text."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenTokenLogprob(msgspec.Struct):
    """A generated token, and the most likely tokens at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities in the format of /v1/chat/completions."""

    content: list[ChosenTokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct):
    """The called function. `arguments` is a string of JSON."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call."""

    id: str
    type: str = "function"
    function: FunctionCall


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The model's message. OpenAI's API has no reasoning; clients read it as `reasoning` or as `reasoning_content`."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None  # stop, length, tool_calls, repetition


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Response of POST /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionCallDelta(msgspec.Struct):
    """New part of a tool call: its name once, then pieces of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """New part of a tool call in a stream event. `id` and `type` are in the first one of the call."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCallDelta


class Delta(msgspec.Struct):
    """New part of the message in a stream event. For the reasoning, see AssistantMessage."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """The part of one answer in a stream event."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None  # stop, length, tool_calls, repetition


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a chat stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class EmbeddingUsage(msgspec.Struct):
    """Number of tokens of a request without output tokens."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct):
    """One input's embedding: numbers, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(msgspec.Struct):
    """Response of POST /v1/embeddings."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class ModelCard(msgspec.Struct, kw_only=True):
    """A model that is served. `max_model_len` is vLLM's addition."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "jpaged"
    max_model_len: int


class ModelList(msgspec.Struct):
    """Response of GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"
