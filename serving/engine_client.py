"""What the server needs of an engine. `jpaged.AsyncLLM` is the real one; tests of the server bring a small one."""

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from jpaged.outputs import PoolingRequestOutput, RequestOutput
from jpaged.params.pooling import PoolingParams
from jpaged.params.sampling import SamplingParams
from jpaged.snapshot import EngineSnapshot

Prompt = str | dict[str, Any]  # text, or {"prompt": text} or {"prompt_token_ids": [...]}, with a cache_salt or without


class EngineClient(Protocol):
    """An engine behind asyncio.

    Generating raises RequestError for a bad request and CapacityError where too many wait, before its first output.
    """

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What holds for fields that a request leaves out: generation_config.json's values over vLLM's defaults."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request, prompt and output together."""
        ...

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs so far, each with all before it. Closing the generator aborts the request."""
        ...

    def encode(
        self, prompt: Prompt, pooling_params: PoolingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[PoolingRequestOutput[Any], None]:
        """The one output of a prompt, of an engine that pools. Closing the generator aborts the request."""
        ...

    def get_tokenizer(self) -> Any:
        """The model's tokenizer (of transformers), or None."""
        ...

    async def check_health(self) -> None:
        """Raises EngineError when the engine has died or makes no progress."""
        ...

    async def inspect(self) -> EngineSnapshot:
        """What the engine holds, at one moment. Raises EngineError when it has died."""
        ...

    def close(self) -> None:
        """Abort what runs and give the device memory back."""
        ...
