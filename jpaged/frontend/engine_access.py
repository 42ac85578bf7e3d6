"""Base class of `LLM` and `AsyncLLM`: access to the options, the model and the engine's statistics."""

import dataclasses
import os
from typing import Any, Self

from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.errors import EngineError, RequestError
from jpaged.frontend.build import BuiltEngine
from jpaged.metric_families import Metric, families_of
from jpaged.metrics import EngineMetricsSnapshot
from jpaged.outputs import EngineStats
from jpaged.params.pooling import PooledModel
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

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """Make one from an `EngineConfig`, which vLLM calls EngineArgs."""
        options = {field.name: getattr(engine_args, field.name) for field in dataclasses.fields(engine_args)}
        return cls(**options)

    def __repr__(self) -> str:
        name = type(self).__name__
        if self._engine is None:
            return f"{name}({self.config.model!r}, closed)"
        stats, runner = self._engine.stats(), self._engine.runner
        return (
            f"{name}({self.config.model!r}, max_model_len={runner.max_model_len}, max_num_seqs={runner.max_num_seqs}, "
            f"KV cache {stats.num_blocks} blocks of {stats.block_size}, {stats.num_running} running, "
            f"{stats.num_waiting} waiting)"
        )

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
    def max_num_seqs(self) -> int:
        """Maximum number of requests that run at a time."""
        return self._live_engine.runner.max_num_seqs

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

    def metrics(self) -> EngineMetricsSnapshot | None:
        """Return the figures that `/metrics` shows: statistics and distributions. None with `disable_log_stats`."""
        return self._live_engine.metrics()

    def get_metrics(self) -> list[Metric]:
        """Return the engine's figures as named metrics: vLLM's names, and `jpaged:` for further figures.

        Each is a `Counter`, `Gauge` or `Histogram` of `jpaged.metric_families`. The label `model_name` is the engine's
        `model`. Raises RequestError with `disable_log_stats`, and EngineError after `close`.
        """
        figures = self.metrics()
        if figures is None:
            raise RequestError("disable_log_stats", True, "get_metrics needs the figures: make the engine without it")
        return [metric for family in families_of(figures, self.config.model) for metric in family.metrics]

    def reset_stats(self) -> None:
        """Set counters and peaks of the statistics to zero."""
        self._live_engine.reset_stats()

    def start_profile(self, folder: str | os.PathLike[str]) -> None:
        """Record what host and device do into a new folder below `folder/plugins/profile`, until `stop_profile`.

        For TensorBoard or Perfetto. Raises EngineError if a profile is running: JAX has one profiler per process.
        """
        self._live_engine.runner.start_profile(os.fspath(folder))

    def stop_profile(self) -> None:
        """Write the profile. Raises EngineError if none is running."""
        self._live_engine.runner.stop_profile()

    @property
    def pooling(self) -> PooledModel | None:
        """Task, size and labels of a pooling engine; None if the engine generates."""
        pooling = self._live_engine.options.pooling
        return None if pooling is None else pooling.model

    @property
    def _live_engine(self) -> Engine:
        """The engine. Raises EngineError after `close`."""
        if self._engine is None:
            raise EngineError(CLOSED)
        return self._engine
