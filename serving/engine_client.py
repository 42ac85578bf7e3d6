"""The engine's interface that the server uses. `jpaged.AsyncLLM` implements it, and so does the tests' fake engine."""

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from jpaged.frontend.prompt_streams import Generates
from jpaged.outputs import EngineStats, PoolingRequestOutput
from jpaged.params.pooling import PoolingParams
from jpaged.params.sampling import SamplingParams
from jpaged.snapshot import EngineSnapshot

Prompt = str | dict[str, Any]  # text, {"prompt": text} or {"prompt_token_ids": [...]}; a dict may have a cache_salt


class EngineClient(Generates, Protocol):
    """An engine with an asyncio interface.

    `generate` and `encode` raise RequestError for a bad request and CapacityError for a full queue, before any output.
    """

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Values of fields that a request leaves out: those of generation_config.json over vLLM's defaults."""
        ...

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of one request, prompt and output together."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether all programs exist."""
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
        """Return the engine's statistics. Raises EngineError when the engine is closed."""
        ...

    async def check_health(self) -> None:
        """Raise EngineError when the engine has ended or makes no progress."""
        ...

    async def inspect(self) -> EngineSnapshot:
        """Return the engine's state at one moment. Raises EngineError when the engine has ended."""
        ...

    def close(self) -> None:
        """Abort running requests and free the device memory."""
        ...
