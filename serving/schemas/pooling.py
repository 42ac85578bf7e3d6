"""The request bodies of the routes for pooling models: embeddings, classification, scores. As `requests.py`."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from jpaged.serving.schemas.requests import (
    ChatMessage,
    Int,
    Label,
    Long,
    Many,
    RequestId,
    Short,
    SizeLimits,
    TemplateKwargs,
)

MAX_TEXTS = 2_048  # inputs or documents of one request, as in OpenAI's API
MAX_NUMBERS = 2**23  # in all token vectors of one request; 2,048 embeddings of 4,096 numbers have as many


class PoolingFields(SizeLimits, kw_only=True):
    """Fields of all routes for pooling models."""

    model: Label | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Int | None = None
    cache_salt: Label | None = None
    # Labels for the client's bookkeeping.
    user: Label | None = None
    request_id: RequestId | None = None

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"mm_processor_kwargs": ({},), "padding": ("do_not_pad",)}


class PooledInput(PoolingFields, kw_only=True):
    """Fields of routes whose input is a list of prompts, or one conversation."""

    input: str | Many[str | Int | Many[Int]] | None = None
    messages: Long[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    use_activation: bool | None = None
    prompt_name: Label | None = None  # of Sentence Transformers; see `PoolingParams`

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = PoolingFields.NEUTRAL | {
        "chat_template": (),
        "media_io_kwargs": ({},),
    }


class EncodedInput(PooledInput, kw_only=True):
    """Fields of routes that return vectors."""

    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    endianness: Literal["native", "little", "big"] | None = None
    dimensions: Int | None = None
    normalize: bool | None = None  # vLLM's older name of use_activation, for embeddings


class EmbeddingRequest(EncodedInput, kw_only=True):
    """Body of POST /v1/embeddings."""


class PoolingRequest(EncodedInput, kw_only=True):
    """Body of POST /pooling."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None


class ClassifyRequest(PooledInput, kw_only=True):
    """Body of POST /classify."""


class TextDocument(msgspec.Struct, forbid_unknown_fields=True):
    """A document of a rerank request. Only text is supported."""

    text: str


Texts = str | Annotated[list[str], Meta(max_length=MAX_TEXTS)]


class ScoringFields(PoolingFields, kw_only=True):
    """Fields of both scoring routes."""

    max_tokens_per_query: Int | None = None
    max_tokens_per_doc: Int | None = None
    use_activation: bool | None = None
    instruction: str | None = None  # of Qwen3-Reranker: what a document must meet

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = PoolingFields.NEUTRAL | {
        "chat_template_kwargs": ({},),
    }


class ScoreRequest(ScoringFields, kw_only=True):
    """Body of POST /score: one of the pairs text_1 and text_2, data_1 and data_2, queries and documents or items."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None


class RerankRequest(ScoringFields, kw_only=True):
    """Body of POST /rerank, in the formats of Jina's and Cohere's APIs."""

    query: str
    documents: Annotated[list[str | TextDocument], Meta(min_length=1, max_length=MAX_TEXTS)]
    top_n: Int | None = None
    return_documents: bool | None = None

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = ScoringFields.NEUTRAL | {"rank_fields": ([], ["text"])}


# Bodies of the two routes of the tokenizer.


class TokenizeRequest(SizeLimits, kw_only=True):
    """Body of POST /tokenize: a prompt, or a conversation."""

    model: Label | None = None
    prompt: str | None = None
    messages: Long[ChatMessage] | None = None
    tools: Short[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
    }


class DetokenizeRequest(SizeLimits, kw_only=True):
    """Body of POST /detokenize."""

    model: Label | None = None
    tokens: Many[Annotated[int, Meta(ge=0, le=2**31 - 1)]]
