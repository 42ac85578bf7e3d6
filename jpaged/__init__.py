"""LLM inference in JAX: paged KV cache, continuous batching. Importing this uses no device and imports no jax.

Most names are imported on first use, so that `--help` and the command line's error messages appear quickly.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jpaged.config import EngineConfig
from jpaged.errors import CapacityError, EngineError, JPagedError, ModelLoadError, NoWeightsError, RequestError
from jpaged.speculation_config import SpeculationConfig
from jpaged.version import __version__

if TYPE_CHECKING:
    from jpaged.async_llm import AsyncLLM
    from jpaged.llm import LLM, generate
    from jpaged.loading.trees import TrainerTree, from_trainer
    from jpaged.lora.request import LoRARequest
    from jpaged.outputs import (
        ClassificationOutput,
        CompletionOutput,
        EmbeddingOutput,
        EngineStats,
        Logprob,
        PoolingRequestOutput,
        RequestMetrics,
        RequestOutput,
        SamplingMask,
        ScoreOutput,
        ScoringOutput,
        SpeculationStats,
        TokenPoolingOutput,
        WeightUpdate,
    )
    from jpaged.params.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from jpaged.params.pooling import PoolingParams
    from jpaged.params.prompts import TextPrompt, TokensPrompt
    from jpaged.params.sampling import RequestOutputKind, SamplingParams
    from jpaged.params.structured_outputs import StructuredOutputsParams
    from jpaged.rl import PaddedRollouts, Rollout, Rollouts
    from jpaged.snapshot import BlockOwner, BlockSnapshot, EngineSnapshot, PoolSnapshot, RequestSnapshot, StepSnapshot

    AsyncLLMEngine = AsyncLLM  # vLLM's name

EngineArgs = AsyncEngineArgs = EngineConfig  # vLLM's names

_MODULES = {
    "jpaged.async_llm": ("AsyncLLM",),
    "jpaged.llm": ("LLM", "generate"),
    "jpaged.loading.trees": ("TrainerTree", "from_trainer"),
    "jpaged.lora.request": ("LoRARequest",),
    "jpaged.outputs": (
        "ClassificationOutput", "CompletionOutput", "EmbeddingOutput", "EngineStats", "Logprob", "PoolingRequestOutput",
        "RequestMetrics", "RequestOutput", "SamplingMask", "ScoreOutput", "ScoringOutput", "SpeculationStats",
        "TokenPoolingOutput", "WeightUpdate",
    ),
    "jpaged.params.beam_search": ("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"),
    "jpaged.params.pooling": ("PoolingParams",),
    "jpaged.params.prompts": ("TextPrompt", "TokensPrompt"),
    "jpaged.params.sampling": ("RequestOutputKind", "SamplingParams"),
    "jpaged.params.structured_outputs": ("StructuredOutputsParams",),
    "jpaged.rl": ("PaddedRollouts", "Rollout", "Rollouts"),
    "jpaged.snapshot": (
        "BlockOwner", "BlockSnapshot", "EngineSnapshot", "PoolSnapshot", "RequestSnapshot", "StepSnapshot",
    ),
}  # fmt: skip
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    home = _HOMES.get("AsyncLLM" if name == "AsyncLLMEngine" else name)
    if home is None:
        raise AttributeError(f"module 'jpaged' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), "AsyncLLM" if name == "AsyncLLMEngine" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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
    "Rollout",
    "Rollouts",
    "PaddedRollouts",
    "TrainerTree",
    "from_trainer",
    "SpeculationConfig",
    "LoRARequest",
    "EngineArgs",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "RequestOutput",
    "CompletionOutput",
    "PoolingRequestOutput",
    "SamplingMask",
    "ScoreOutput",
    "ScoringOutput",
    "TokenPoolingOutput",
    "WeightUpdate",
    "BeamSearchOutput",
    "BeamSearchSequence",
    "EmbeddingOutput",
    "ClassificationOutput",
    "Logprob",
    "RequestMetrics",
    "EngineStats",
    "SpeculationStats",
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
    "NoWeightsError",
    "__version__",
]
