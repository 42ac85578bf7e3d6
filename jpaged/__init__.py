"""LLM inference in JAX: paged KV cache, continuous batching. Importing this uses no device and imports no jax."""

from jpaged.async_llm import AsyncLLM
from jpaged.config import EngineConfig
from jpaged.errors import CapacityError, EngineError, JPagedError, ModelLoadError, RequestError
from jpaged.llm import LLM, generate
from jpaged.outputs import (
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    EngineStats,
    Logprob,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    ScoreOutput,
)
from jpaged.params.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from jpaged.params.pooling import PoolingParams
from jpaged.params.prompts import TextPrompt, TokensPrompt
from jpaged.params.sampling import RequestOutputKind, SamplingParams
from jpaged.params.structured_outputs import StructuredOutputsParams
from jpaged.snapshot import BlockOwner, BlockSnapshot, EngineSnapshot, PoolSnapshot, RequestSnapshot, StepSnapshot
from jpaged.version import __version__

# vLLM's names of the same classes.
EngineArgs = AsyncEngineArgs = EngineConfig
AsyncLLMEngine = AsyncLLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "generate",
    "SamplingParams",
    "RequestOutputKind",
    "StructuredOutputsParams",
    "BeamSearchParams",
    "PoolingParams",
    "TextPrompt",
    "TokensPrompt",
    "EngineConfig",
    "EngineArgs",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "RequestOutput",
    "CompletionOutput",
    "PoolingRequestOutput",
    "ScoreOutput",
    "BeamSearchOutput",
    "BeamSearchSequence",
    "EmbeddingOutput",
    "ClassificationOutput",
    "Logprob",
    "RequestMetrics",
    "EngineStats",
    "EngineSnapshot",
    "PoolSnapshot",
    "BlockSnapshot",
    "BlockOwner",
    "RequestSnapshot",
    "StepSnapshot",
    "JPagedError",
    "RequestError",
    "CapacityError",
    "ModelLoadError",
    "EngineError",
    "__version__",
]
