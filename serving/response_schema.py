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
    finish_reason: str | None  # stop, length


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


class AssistantMessage(msgspec.Struct):
    """The model's message."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(msgspec.Struct):
    """What a stream event adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """The part of one answer that a stream event brings."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None  # stop, length


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
