"""LLM inference in JAX: paged KV cache, continuous batching. Importing this touches no device and imports no jax."""

from jpaged.async_llm import AsyncLLM
from jpaged.config import EngineConfig
from jpaged.errors import CapacityError, EngineError, JPagedError, ModelLoadError, RequestError
from jpaged.llm import LLM, generate
from jpaged.outputs import CompletionOutput, EngineStats, Logprob, RequestMetrics, RequestOutput
from jpaged.sampling_params import RequestOutputKind, SamplingParams
from jpaged.version import __version__

__all__ = [
    "LLM",
    "AsyncLLM",
    "generate",
    "SamplingParams",
    "RequestOutputKind",
    "EngineConfig",
    "RequestOutput",
    "CompletionOutput",
    "Logprob",
    "RequestMetrics",
    "EngineStats",
    "JPagedError",
    "RequestError",
    "CapacityError",
    "ModelLoadError",
    "EngineError",
    "__version__",
]
