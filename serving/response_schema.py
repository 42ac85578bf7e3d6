"""What the routes answer: OpenAI's objects as structs. A field that is UNSET does not appear in the JSON."""

import msgspec
from msgspec import UNSET, UnsetType


class CachedTokens(msgspec.Struct):
    """`usage.prompt_tokens_details`: prompt tokens that a prefix hit saved."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities in the shape of /v1/completions; one entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One answer, or the part of it that a stream event brings."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None  # stop, length, repetition


class Completion(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/completions; an event of its stream looks the same."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TokenLogprob(msgspec.Struct):
    """One token; `bytes` are its text's UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenTokenLogprob(msgspec.Struct):
    """A generated token, and the most likely ones in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities in the shape of /v1/chat/completions."""

    content: list[ChosenTokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct):
    """The tool that is called; `arguments` is JSON as a text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call of a tool."""

    id: str
    type: str = "function"
    function: FunctionCall


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The model's message. Reasoning is no field of OpenAI's; some clients read it by one name, some by the other."""

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
    """Answer of POST /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionCallDelta(msgspec.Struct):
    """What is new in a call: its name once, then text of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """What a stream event adds to a call; `id` and `type` come with the first of it."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCallDelta


class Delta(msgspec.Struct):
    """What a stream event adds to the message. Reasoning as of AssistantMessage."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """The part of one answer that a stream event brings."""

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
    """Tokens of a request that generates nothing."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct):
    """One input's embedding: numbers, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(msgspec.Struct):
    """Answer of POST /v1/embeddings."""

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
    """Answer of GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"
