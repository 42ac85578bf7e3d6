"""The engine's interface that the server uses. `jpaged.AsyncLLM` implements it, and so does the tests' fake engine."""

import os
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from jpaged.frontend.prompt_streams import Generates
from jpaged.metrics import EngineMetricsSnapshot
from jpaged.outputs import EngineStats, PoolingRequestOutput, WeightUpdate, WeightVersion
from jpaged.params.pooling import PooledModel, PoolingParams
from jpaged.params.sampling import SamplingParams
from jpaged.snapshot import EngineSnapshot

Prompt = str | dict[str, Any]  # text, {"prompt": text} or {"prompt_token_ids": [...]}; a dict may have more fields


class EngineClient(Generates, Protocol):
    """An engine with an asyncio interface.

    `generate` and `encode` raise RequestError for a bad request and CapacityError for a full queue, before any output.
    """

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Defaults of fields that a request leaves out: from generation_config.json, else vLLM's."""
        ...

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of one request, prompt and output together."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of requests that run at a time on each engine."""
        ...

    @property
    def pooling(self) -> PooledModel | None:
        """Task, size and labels of a pooling engine; None if the engine generates."""
        ...

    @property
    def is_ready(self) -> bool:
        """True when all programs are compiled."""
        ...

    @property
    def num_engines(self) -> int:
        """Engines that share the requests: `data_parallel_size`."""
        ...

    def encode(
        self, prompt: Prompt, pooling_params: PoolingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[PoolingRequestOutput[Any], None]:
        """Yield the one output of a prompt, from a pooling engine. Closing the generator aborts the request."""
        ...

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer (of transformers), or None."""
        ...

    def stats(self) -> EngineStats:
        """Return the statistics of all engines together. Raises EngineError when they are closed."""
        ...

    def metrics(self, engine: int = 0) -> EngineMetricsSnapshot | None:
        """Return an engine's metrics; None if it collects none. Thread-safe. Raises EngineError when it is closed."""
        ...

    async def check_health(self) -> None:
        """Raise EngineError when the engine has ended or makes no progress."""
        ...

    async def inspect(self, engine: int = 0) -> EngineSnapshot:
        """Return a snapshot of an engine's state. Raises EngineError when the engine has ended."""
        ...

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop running steps. New requests wait until `resume_generation`."""
        ...

    async def resume_generation(self) -> None:
        """End a pause. Raises RequestError while the engine sleeps."""
        ...

    async def is_paused(self) -> bool:
        """Return True while new requests wait."""
        ...

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause, and free device memory."""
        ...

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate again what `sleep` freed, and resume."""
        ...

    async def is_sleeping(self) -> bool:
        """Return True while memory that `sleep` freed is not allocated again."""
        ...

    @property
    def weight_version(self) -> WeightVersion:
        """Version of the weights."""
        ...

    @property
    def weights_problem(self) -> str | None:
        """Reason why requests are refused until the next update; None: there is none."""
        ...

    async def update_weights(
        self, weights: str, *, version: WeightVersion | None = None, mode: str = "keep"
    ) -> WeightUpdate:
        """Replace the weights by those of a checkpoint. Raises ModelLoadError and EngineError."""
        ...

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Evict all cached KV. While requests run, returns False and does nothing, unless they may be preempted."""
        ...

    def start_profile(self, folder: str | os.PathLike[str]) -> None:
        """Record a profile into a folder. Raises EngineError if one is running. Blocks."""
        ...

    def stop_profile(self) -> None:
        """Write the profile. Raises EngineError if none is running. Blocks."""
        ...

    def close(self) -> None:
        """Abort running requests and free the device memory."""
        ...
