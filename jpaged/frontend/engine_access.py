"""Base class of `LLM` and `AsyncLLM`: access to the options, the model and the statistics of the engines."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

from jpaged.config import EngineConfig
from jpaged.engine.adapters.adapter_registry import AdapterInfo, AdapterRegistry
from jpaged.engine.adapters.loaded_adapter import LoadedAdapter
from jpaged.engine.engine import Engine
from jpaged.engine.observe.engine_stats import total_stats
from jpaged.errors import EngineError, RequestError
from jpaged.frontend.build import BuiltEngine
from jpaged.frontend.pausing import check_version
from jpaged.lifetime import OwnProcess
from jpaged.lora.request import LoRARequest
from jpaged.metric_families import Metric, families_of, metrics_of
from jpaged.metrics import EngineMetricsSnapshot
from jpaged.outputs import EngineStats, WeightVersion
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
        self._others = built.others  # further engines, with data_parallel_size
        self._adapters = built.adapters  # LoRA adapters; None without `enable_lora`
        self._updater = built.updater
        self._made_in = OwnProcess()

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """Make one from an `EngineConfig`, which vLLM calls EngineArgs."""
        options = {field.name: getattr(engine_args, field.name) for field in dataclasses.fields(engine_args)}
        return cls(**options)

    def __repr__(self) -> str:
        name = type(self).__name__
        if self._engine is None:
            return f"{name}({self.config.model!r}, closed)"
        stats, runner = self.stats(), self._engine.runner
        return (
            f"{name}({self.config.model!r}, max_model_len={runner.max_model_len}, max_num_seqs={runner.max_num_seqs}, "
            f"KV cache {stats.num_blocks} blocks of {stats.block_size}, {stats.num_running} running, "
            f"{stats.num_waiting} waiting)"
        )

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer (of transformers), or None if the model has none."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of requests without their own."""
        return self.default_sampling_params

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of one request, prompt and output together."""
        return self.engine.runner.max_model_len

    @property
    def num_engines(self) -> int:
        """Number of engines that share the requests: `data_parallel_size`."""
        return 1 + len(self._others)

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of requests that run at a time on each engine."""
        return self.engine.runner.max_num_seqs

    @property
    def is_ready(self) -> bool:
        """True once all programs are compiled. On CPU most are compiled after the constructor has returned."""
        return all(engine.runner.is_ready for engine in self.engines)

    def wait_until_ready(self) -> None:
        """Wait until all programs are compiled, for example before a measurement. Raises EngineError if one fails."""
        for engine in self.engines:
            engine.runner.wait_until_ready()

    def stats(self, engine: int | None = None) -> EngineStats:
        """Return the statistics since the start or the last `reset_stats`. engine: index of an engine; None: totals."""
        if engine is not None:
            return self._engine_at(engine).stats()
        return total_stats([each.stats() for each in self.engines])

    def metrics(self, engine: int = 0) -> EngineMetricsSnapshot | None:
        """Return the metrics of the engine with this index, as in `/metrics`. None with `disable_log_stats`."""
        return self._engine_at(engine).metrics()

    def get_metrics(self) -> list[Metric]:
        """Return the engines' metrics: vLLM's names, and further metrics with the prefix `jpaged:`.

        Each is a `Counter`, `Gauge`, `Histogram` or `Vector` of `jpaged.metric_families`. The label `model_name` is the
        engine's `model`, and `engine` its index. Raises RequestError with `disable_log_stats`, and EngineError after
        `close`.
        """
        snapshots = [each for each in (engine.metrics() for engine in self.engines) if each is not None]
        if not snapshots:
            raise RequestError("disable_log_stats", True, "must be False for get_metrics: make the engine without it")
        return metrics_of(families_of(snapshots, self.config.model))

    @property
    def adapters(self) -> AdapterRegistry:
        """The LoRA adapters that the engine knows. Raises RequestError without `enable_lora`."""
        if self._adapters is None:
            raise RequestError("enable_lora", False, "must be True for LoRA adapters: make the engine with it")
        return self._adapters

    def known_adapters(self) -> list[AdapterInfo]:
        """The LoRA adapters that the engine knows, without their weights. Raises RequestError without `enable_lora`."""
        return [dataclasses.replace(each, loaded=None) for each in self.adapters.known()]

    def remove_adapter(self, adapter: str | int) -> bool:
        """Forget a LoRA adapter, by name or lora_int_id. Running requests keep it. False if there is none."""
        return self.adapters.remove(adapter)

    def _adapter_of(self, request: object) -> Future[LoadedAdapter] | None:
        """The adapter of a request; None: the base model alone. Raises RequestError for an unknown adapter."""
        if request is None:
            return None
        request = as_lora_request(request)
        return self.adapters.reload(request) if request.load_inplace else self.adapters.get(request)

    def _added_adapter(
        self, adapter: LoRARequest | str, arrays: Any, lora_alpha: float | None, *, use_rslora: bool
    ) -> Future[LoadedAdapter]:
        """See `LLM.add_lora`."""
        if isinstance(adapter, LoRARequest) and arrays is None:
            return self.adapters.reload(adapter) if adapter.load_inplace else self.adapters.get(adapter)
        if not isinstance(arrays, Mapping):
            raise RequestError("arrays", type(arrays).__name__, "must be a dictionary of arrays by PEFT's names")
        if not arrays:
            raise RequestError("arrays", "{}", "must have a lora_A and a lora_B of one or more matrices")
        if isinstance(adapter, LoRARequest) and adapter.lora_path:
            raise RequestError("lora_path", adapter.lora_path, "must be empty for an adapter of arrays")
        if not isinstance(lora_alpha, (int, float)) or isinstance(lora_alpha, bool):
            raise RequestError("lora_alpha", lora_alpha, "must be a number, such as that of the adapter's LoraConfig")
        return self.adapters.add_arrays(adapter, dict(arrays), {"alpha": lora_alpha, "use_rslora": use_rslora})

    @property
    def weight_version(self) -> WeightVersion:
        """Version of the weights: 0 at the start, then that of the last `update_weights`.

        With data_parallel_size, engines are updated one after another. The version is the last engine's.
        """
        return self._served()[-1].weight_version

    @property
    def weights_problem(self) -> str | None:
        """Reason why requests are refused until the next `update_weights`; None: there is none, or an update runs."""
        engines = (each for each in self._served() if not self._is_updating(each))
        return next((problem for each in engines if (problem := each.runner.weights_problem())), None)

    def _served(self) -> Sequence[Engine]:
        """The engines that have not ended; all of them if all have ended."""
        return self.engines

    def _is_updating(self, engine: Engine) -> bool:
        """True while the weights of an engine are replaced, and its requests wait."""
        return False

    def _prepared(self, weights: Any, layout: Any, version: object) -> Sequence[Callable[[], Iterable[Any]]]:
        """Check an update of the weights. Returns for each engine a function that returns its leaves.

        Raises RequestError and ModelLoadError. Changes nothing.
        """
        check_version(version)
        if self._updater is None:
            raise EngineError("update_weights: the engine's weights cannot be replaced")
        return self._updater.prepare(weights, layout)

    def reset_stats(self) -> None:
        """Set counters and peaks of the statistics to zero."""
        for engine in self.engines:
            engine.reset_stats()

    def start_profile(self, folder: str | os.PathLike[str]) -> None:
        """Record a profile of host and device until `stop_profile`, in a new folder below `folder/plugins/profile`.

        For TensorBoard or Perfetto. Raises EngineError if a profile is running: JAX has one profiler per process.
        """
        self.engine.runner.start_profile(os.fspath(folder))

    def stop_profile(self) -> None:
        """Write the profile. Raises EngineError if none is running."""
        self.engine.runner.stop_profile()

    @property
    def pooling(self) -> PooledModel | None:
        """Task, size and labels of a pooling engine; None if the engine generates."""
        pooling = self.engine.options.pooling
        return None if pooling is None else pooling.model

    @property
    def engine(self) -> Engine:
        """The first engine, for diagnosis. Do not call its methods while requests run.

        Raises EngineError in a forked process, and with `LLM` after `close`.
        """
        self._made_in.check()
        if self._engine is None:
            raise EngineError(CLOSED)
        return self._engine

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All engines, with data_parallel_size. See `engine`."""
        return (self.engine, *self._others)

    def _engine_at(self, index: int) -> Engine:
        """Return an engine by its index. Raises RequestError for an invalid index, and EngineError after `close`."""
        engines = self.engines
        if type(index) is not int or not 0 <= index < len(engines):
            raise RequestError("engine", index, f"must be the index of an engine, from 0 to {len(engines) - 1}")
        return engines[index]


def as_lora_request(request: object) -> LoRARequest:
    """Return a request's adapter. Raises RequestError for another kind of value."""
    if not isinstance(request, LoRARequest):
        raise RequestError("lora_request", request, "must be a jpaged.LoRARequest, or None for the base model")
    return request
