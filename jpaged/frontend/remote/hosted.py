"""The engine that front ends share, as their messages see it: `AsyncLLM`."""

from collections.abc import Callable
from typing import Any, Protocol

from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.lora.request import LoRARequest
from jpaged.params.pooling import PooledModel, PoolingParams
from jpaged.params.sampling import SamplingParams


class Hosted(Protocol):
    """See the members of the same name of `AsyncLLM`."""

    config: EngineConfig
    default_sampling_params: SamplingParams

    @property
    def engine(self) -> Engine: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def num_engines(self) -> int: ...
    @property
    def pooling(self) -> PooledModel | None: ...

    def get_tokenizer(self) -> Any: ...
    def abort_now(self, request_id: str) -> None: ...
    def stop_answer(self, request_id: str, index: int, num_tokens: int) -> None: ...
    async def submit(
        self, stream: Any, prompt: Any, params: SamplingParams | PoolingParams, request_id: str, priority: int = 0,
        refuse_cut: bool = False, lora_request: LoRARequest | None = None, *, has_left: Callable[[], bool],
    ) -> None: ...  # fmt: skip
