"""Base class of `LLM` and `AsyncLLM`: access to the options, the model and the engine's statistics."""

from typing import Any

from jpaged.engine.engine import Engine
from jpaged.errors import EngineError
from jpaged.frontend.build import BuiltEngine
from jpaged.outputs import EngineStats
from jpaged.params.sampling import SamplingParams

CLOSED = "the engine is closed: make a new one"


class EngineAccess:
    """Base class of `LLM` and `AsyncLLM`.

    config:                  the `EngineConfig` that the engine was built with.
    spec:                    the model's `DecoderSpec`.
    default_sampling_params: generation_config.json's values over vLLM's defaults.
    """

    def __init__(self, built: BuiltEngine):
        self.config = built.config
        self.spec = built.spec
        self.default_sampling_params = built.default_sampling_params
        self._tokenizer = built.tokenizer
        self._engine: Engine | None = built.engine

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer (of transformers), or None if the model has none."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of requests that bring none."""
        return self.default_sampling_params

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of one request, prompt and output together."""
        return self._live_engine.runner.max_model_len

    @property
    def is_ready(self) -> bool:
        """Whether all programs exist. On CPU most of them are compiled after the constructor has returned."""
        return self._live_engine.runner.is_ready

    def wait_until_ready(self) -> None:
        """Wait until all programs exist: call it before a measurement. Raises EngineError if one cannot be compiled."""
        self._live_engine.runner.wait_until_ready()

    def stats(self) -> EngineStats:
        """Return the engine's statistics since the start or the last `reset_stats`."""
        return self._live_engine.stats()

    def reset_stats(self) -> None:
        """Set counters and peaks of the statistics to zero."""
        self._live_engine.reset_stats()

    @property
    def _live_engine(self) -> Engine:
        """The engine. Raises EngineError after `close`."""
        if self._engine is None:
            raise EngineError(CLOSED)
        return self._engine
