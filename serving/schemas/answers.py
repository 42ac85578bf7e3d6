"""The responses of the routes: OpenAI's objects as structs. A field that is UNSET does not appear in the JSON."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class CachedTokens(msgspec.Struct):
    """`usage.prompt_tokens_details`: prompt tokens that a prefix hit saved computing."""

    cached_tokens: int


class PredictionTokens(msgspec.Struct):
    """`usage.completion_tokens_details` of a chat with a `prediction`: its drafts that became tokens, and the others.

    Rejected drafts are not part of `completion_tokens`.
    """

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct):
    """Number of tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: PredictionTokens | UnsetType = UNSET  # only if the server speculates


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities in the format of /v1/completions: one entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]           # None for the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]  # as above
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    """vLLM's entry of `prompt_logprobs`: a token at one position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; None for the first token


class WeightVersionSpan(msgspec.Struct):
    """Tokens [start, end) of an answer, and the version of the weights that computed them. vLLM's and SGLang's form."""

    version: str
    start: int
    end: int


WeightVersions = list[WeightVersionSpan] | UnsetType  # at the end of an answer, if the request asks for them


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One answer, or the part of it in a stream event. The fields from `stop_reason` on are vLLM's."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None  # stop, length, repetition
    stop_reason: int | str | UnsetType | None = UNSET  # at the end of an answer: the stop string or token, or None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET  # of a whole answer; None: not asked for
    weight_versions: WeightVersions = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Response of POST /v1/completions, and event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str
    service_tier: str | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET


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


class TokensChoice(msgspec.Struct, kw_only=True):
    """One answer of /inference/v1/generate, or the part of it in a stream event: token ids, no text."""

    index: int
    logprobs: ChatLogprobs | None = None  # its tokens are shown as token_id:5
    finish_reason: str | None
    token_ids: list[int]
    weight_versions: WeightVersions = UNSET  # at the end of an answer


class TokensAnswer(msgspec.Struct, kw_only=True):
    """Response of POST /inference/v1/generate, and event of its stream."""

    request_id: str
    choices: list[TokensChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET  # of a whole answer; None: not asked for


class FunctionCall(msgspec.Struct):
    """The called function. `arguments` is a string of JSON."""

    name: str
    arguments: str


class CustomCall(msgspec.Struct):
    """The called custom tool, with its input: any text."""

    name: str
    input: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call: `function` or `custom` is set, as `type` says."""

    id: str
    type: str = "function"
    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The model's message. OpenAI's API has no reasoning; clients read it as `reasoning` or as `reasoning_content`."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET  # for a request with `functions`


class AnyChatChoice(msgspec.Struct, kw_only=True):
    """Fields of a whole answer and of its parts. The fields from `stop_reason` on are vLLM's."""

    index: int
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None  # stop, length, tool_calls, function_call, repetition; None before the end
    stop_reason: int | str | UnsetType | None = UNSET  # at the end of an answer: the stop string or token, or None
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: WeightVersions = UNSET


class ChatChoice(AnyChatChoice, kw_only=True):
    """One answer."""

    message: AssistantMessage


class AnyChatCompletion(msgspec.Struct, kw_only=True):
    """Fields of a whole response and of an event of its stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | UnsetType = UNSET
    # vLLM's fields, if the request asks for them. A stream has them in its first event.
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


class ChatCompletion(AnyChatCompletion, kw_only=True):
    """Response of POST /v1/chat/completions."""

    object: str = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None  # vLLM's; None: not asked for


class FunctionCallDelta(msgspec.Struct):
    """New part of a tool call: its name once, then pieces of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CustomCallDelta(msgspec.Struct):
    """New part of a call of a custom tool: its name once, then pieces of its input."""

    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """New part of a tool call in a stream event. `id` and `type` are in the first one of the call."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCallDelta | UnsetType = UNSET
    custom: CustomCallDelta | UnsetType = UNSET


class Delta(msgspec.Struct):
    """New part of the message in a stream event. For the reasoning, see AssistantMessage."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionCallDelta | UnsetType = UNSET


class ChatChunkChoice(AnyChatChoice, kw_only=True):
    """The part of one answer in a stream event."""

    delta: Delta


class ChatCompletionChunk(AnyChatCompletion, kw_only=True):
    """One event of a chat stream."""

    object: str = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    obfuscation: str | UnsetType = UNSET


class EmbeddingUsage(msgspec.Struct):
    """Number of tokens of a request without output tokens. `completion_tokens` is vLLM's."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class Embedding(msgspec.Struct):
    """One input's embedding: numbers, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(msgspec.Struct, kw_only=True):
    """Response of POST /v1/embeddings. `id` and `created` are vLLM's."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class Classification(msgspec.Struct, kw_only=True):
    """One input's classes. `label` is the most probable one."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(msgspec.Struct, kw_only=True):
    """Response of POST /classify."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classification]
    usage: EmbeddingUsage


class PooledVector(msgspec.Struct, kw_only=True):
    """One input's embedding or class probabilities, as numbers or base64. Per-token tasks: vectors of all tokens."""

    index: int
    object: str = "pooling"
    data: list[float | list[float]] | str


class PooledList(msgspec.Struct, kw_only=True):
    """Response of POST /pooling."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[PooledVector]
    usage: EmbeddingUsage


class Score(msgspec.Struct, kw_only=True):
    """The score of one pair of texts."""

    index: int
    object: str = "score"
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    """Response of POST /score."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RankedText(msgspec.Struct):
    """A document's text."""

    text: str


class RankedDocument(msgspec.Struct, kw_only=True):
    """A document of a rerank request, with its score. `index` is its position in the request."""

    index: int
    document: RankedText | UnsetType = UNSET
    relevance_score: float


class Ranking(msgspec.Struct, kw_only=True):
    """Response of POST /rerank: the best document first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RankedDocument]


class TokenList(msgspec.Struct, kw_only=True):
    """Response of POST /tokenize. `token_strs` are the tokens as they are in the vocabulary."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """Response of GET /tokenizer_info. A token that the tokenizer lacks is null."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    model_max_length: int


class DetokenizedText(msgspec.Struct):
    """Response of POST /detokenize."""

    prompt: str


class ServerLoad(msgspec.Struct):
    """Response of GET /load: requests that run or wait."""

    server_load: int


class Version(msgspec.Struct):
    """Response of GET /version."""

    version: str


class ServerStatus(msgspec.Struct, kw_only=True):
    """Response of /admin/status and /admin/drain. drained: the server drains, and has no more requests."""

    draining: bool
    drained: bool
    paused: bool
    sleeping: bool
    open_requests: int
    running: int
    waiting: int


class ServerInfo(msgspec.Struct, kw_only=True):
    """Response of GET /server_info, with vLLM's names.

    vllm_config: options of the engine: text, or an object with config_format=json.
    vllm_env:    always empty. jpaged reads keys, and no options, from environment variables.
    system_env:  versions, and the platform.
    weight_version: as GET /weight_version.
    """

    vllm_config: str | dict[str, Any]
    weight_version: str
    vllm_env: dict[str, str] = {}
    system_env: dict[str, str]


MODEL_INFO_PATHS = ("/model_info", "/get_model_info")  # SGLang's now, and before


class ServedModelInfo(msgspec.Struct, kw_only=True):
    """Response of GET /model_info, with SGLang's names.

    model_path:     folder or hub id of the model, as `root` of /v1/models.
    is_generation:  False if the model pools.
    weight_version: as GET /weight_version.
    """

    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: None = None
    weight_version: str


class Done(msgspec.Struct):
    """Response of an admin route: the new state, such as paused."""

    status: str


class IsPaused(msgspec.Struct):
    """Response of GET /is_paused."""

    is_paused: bool


class IsSleeping(msgspec.Struct):
    """Response of GET /is_sleeping."""

    is_sleeping: bool


class CacheReset(msgspec.Struct):
    """Response of POST /reset_prefix_cache. success: all cached KV was evicted."""

    success: bool


class ErrorFields(msgspec.Struct):
    """OpenAI's fields of an error. `param` is the request's field, if one is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """Body of every answer with an error status."""

    error: ErrorFields


class ModelPermission(msgspec.Struct, kw_only=True):
    """vLLM's entry of `permission`. All its values are constants, because the server's keys decide access."""

    id: str
    object: str = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, kw_only=True):
    """A model that is served. The fields from `root` on are vLLM's. root: the folder or hub id that was loaded."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "jpaged"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(msgspec.Struct):
    """Response of GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"
