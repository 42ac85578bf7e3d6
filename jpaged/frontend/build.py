"""Builds engines: loads the model, compiles the programs, allocates the KV cache. `LLM` and `AsyncLLM` call it.

With data_parallel_size=N there are N engines. The checkpoint is read once, for the first one. The others get copies of
its weights on their own devices, or share them on its devices.

Imported late: JAX and all that uses it, so that `import jpaged` is quick and starts no device.
"""

import contextlib
import dataclasses
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jpaged.config import EngineConfig
from jpaged.engine.adapters.adapter_registry import AdapterRegistry
from jpaged.engine.engine import Engine, EngineOptions, SchedulingOptions
from jpaged.engine.grammar import GrammarLimits
from jpaged.engine.strategies.pooled_outputs import Pooling, activation_of, labels_of
from jpaged.errors import LogitsError, ModelLoadError, RequestError
from jpaged.frontend.engine_config import engine_config
from jpaged.frontend.generation_defaults import generation_defaults
from jpaged.frontend.traced_calls import refuse_tracing
from jpaged.lifetime import not_using_device
from jpaged.outputs import WeightVersion
from jpaged.params.logits_processors import LogitsProcessor, logits_processors
from jpaged.params.pooling import PairFormat, PoolingParams
from jpaged.params.sampling import SamplingParams
from jpaged.phases import phase

if TYPE_CHECKING:
    import jax
    import numpy as np

    from jpaged.frontend.weight_updates import WeightUpdater
    from jpaged.loading import LoadedModel
    from jpaged.models.spec import DecoderSpec, WeightLayout
    from jpaged.runtime.drafting.drafter_model import DrafterModel
    from jpaged.runtime.parallel.process_group import ProcessGroup
    from jpaged.runtime.runner import ModelRunner


logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class BuiltEngine:
    """Engines that are ready to run, and facts about their model for users."""

    engine: Engine
    config: EngineConfig
    spec: "DecoderSpec"
    tokenizer: Any | None                    # transformers.PreTrainedTokenizerBase
    default_sampling_params: SamplingParams  # for requests without their own
    others: tuple[Engine, ...] = ()          # further engines, with data_parallel_size
    adapters: AdapterRegistry | None = None  # LoRA adapters; None without `enable_lora`
    updater: "WeightUpdater | None" = None   # prepares updates of the weights; None: the runner is not JAX's


def build_engine(
    model: Any,
    params: Any,
    options: Mapping[str, Any],
    *,
    layout: "WeightLayout | None" = None,
    mesh: Any = None,
    progress: bool,
    background: bool = False,
) -> BuiltEngine:
    """Load a model, compile its programs and build the engines that run them.

    model:    folder, hub id, .gguf file or "demo". With `params` also a Hugging Face config, its dict, or a
              DecoderSpec.
    params:   live arrays, used without a copy where they are placed like the engine's; None: read the checkpoint.
    layout:   how live arrays are stored; None: derived from their names and shapes.
    mesh:     jax.sharding.Mesh with the engine's devices; None: those of live arrays, or JAX's first ones.
    progress: show a progress bar while programs compile.
    background: on CPU, compile most programs while the engine runs.
    Raises RequestError for a bad option, ModelLoadError when the model cannot be loaded or run.
    """
    prepared = prepare(model, params, options, layout=layout, mesh=mesh, progress=progress, background=background)
    loaded, config, runner = prepared.loaded, prepared.config, prepared.runner
    defaults = SamplingParams() if prepared.pooling else _sampling_defaults(loaded, config)
    if prepared.group is not None:
        from jpaged.runtime.parallel.group_runner import LeaderRunner

        runner = LeaderRunner(runner, prepared.group)
    runners: tuple[Any, ...] = (runner, *prepared.others)
    engines: list[Engine] = []
    try:
        for each in runners:
            first = engines[0] if engines else None
            engine = _engine(each, loaded, config, prepared.pooling, prepared.mask, prepared.processors, first)
            engines.append(engine)
            with phase("check of the outputs"):
                _check_outputs(engine, loaded)
    except BaseException:
        for opened in (*engines, *runners[len(engines) :]):
            opened.close()
        raise
    from jpaged.frontend.weight_updates import WeightUpdater

    updater = WeightUpdater(loaded, config, runners, prepared.group)
    return BuiltEngine(
        engines[0], config, loaded.spec, loaded.tokenizer, defaults, tuple(engines[1:]), prepared.adapters, updater
    )


def run_headless(model: str, options: Mapping[str, Any]) -> int:
    """Run one process of a multi-process engine until process 0 closes the engine. Returns the exit status.

    Raises RequestError for a bad option, ModelLoadError when the model cannot be loaded or the processes disagree.
    """
    prepared = prepare(model, None, options, layout=None, progress=False, background=False, headless=True)
    assert prepared.group is not None, "a rank above 0 has a group"
    from jpaged.frontend.group_updates import FollowerUpdates
    from jpaged.runtime.parallel.group_runner import follow

    runner, group = prepared.runner, prepared.group
    return follow(runner, group, FollowerUpdates(prepared.loaded, prepared.config, runner, group).commands())


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """Runners that are ready, before their engines exist. others: the further runners with data_parallel_size."""

    config: EngineConfig
    loaded: "LoadedModel"
    pooling: Pooling | None
    mask: "np.ndarray | None"
    processors: tuple[LogitsProcessor, ...]
    runner: "ModelRunner"
    others: "tuple[ModelRunner, ...]"
    group: "ProcessGroup | None"
    adapters: AdapterRegistry | None


def prepare(
    model: Any, params: Any, options: Mapping[str, Any], *, layout: "WeightLayout | None", mesh: Any = None,
    progress: bool, background: bool, headless: bool = False,
) -> Prepared:  # fmt: skip
    """Load a model and compile its programs. Arguments and errors as in `build_engine`. headless: node_rank > 0."""
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    processors = logits_processors(options.get("logits_processors"))
    config = engine_config(model, {name: value for name, value in options.items() if name != "logits_processors"})
    _check_model_arguments(model, params, layout)
    if headless != (config.node_rank > 0):
        known = "process 0 schedules: start it without --headless"
        if not headless:
            known = "only process 0 serves requests: start the other processes with jpaged serve --headless"
        raise RequestError("node_rank", config.node_rank, known)
    with contextlib.ExitStack() as stack:
        group = _join(config, params)
        if group is not None:
            stack.callback(group.abandon)
        prepared = _prepare(
            model, params, config, processors, group, layout, mesh, progress=progress, background=background
        )
        stack.pop_all()
    return prepared


def _prepare(
    model: Any, params: Any, config: EngineConfig, processors: tuple[LogitsProcessor, ...],
    group: "ProcessGroup | None", layout: "WeightLayout | None", mesh: Any, *, progress: bool, background: bool,
) -> Prepared:  # fmt: skip
    """Continue `prepare` after the options are checked and the processes have joined."""
    with phase("imports"):  # here, so that `import jpaged` imports no jax
        import jax

        from jpaged.frontend.adapters import adapter_options, adapter_registry
        from jpaged.frontend.engine_devices import copied, devices_of_engines
        from jpaged.loading import valid_token_mask
        from jpaged.loading.live_devices import devices_of_mesh
        from jpaged.runtime import nvidia_devices
        from jpaged.runtime.memory.device_memory import start_backend
        from jpaged.runtime.memory.host_memory import return_free_memory
        from jpaged.runtime.runner import ModelRunner
        from jpaged.runtime.store.cache import persistent_cache

    if problem := nvidia_devices.problem(start_backend(config)):
        logger.warning("running on CPU: %s", problem)
    refuse_tracing(*jax.tree.leaves(params))
    devices = devices_of_engines(config, live=params is not None)
    chosen = devices_of_mesh(mesh, config)
    first = devices[0] if devices is not None else chosen
    # placing quantised weights compiles small programs
    on_first = contextlib.nullcontext() if first is None else jax.default_device(first[0])
    with phase("weights and tokenizer"), persistent_cache(config.compilation_cache_dir), on_first:
        loaded = _load(model, params, layout, config, processors, chosen)
        drafter = _load_drafter(loaded, config)
    adapters = adapter_options(loaded, config)
    pooling = _pooling(loaded)
    for name in ("prefill_engines", "kv_handover"):
        if pooling is not None and getattr(config, name):
            raise RequestError(name, getattr(config, name), "is for models that generate; this one does not")
    if pooling is not None and config.speculative_config is not None:
        known = "is for models that generate; this one does not"
        raise RequestError("speculative_config", config.speculative_config.method, known)
    has_mask = config.mask_unknown_tokens and pooling is None
    mask = valid_token_mask(loaded.tokenizer, loaded.spec.vocab_size) if has_mask else None
    runners: list[ModelRunner] = []
    try:
        for index in range(config.data_parallel_size):
            if config.data_parallel_size > 1:
                where = "a shared device" if devices is None else ", ".join(map(str, devices[index]))
                logger.info("engine %d of 0 to %d, on %s", index, config.data_parallel_size - 1, where)
            shared = devices is None or not runners
            runner = ModelRunner.create(
                loaded.spec,
                loaded.params if shared else copied(loaded.params, devices[0], devices[index]),
                # all engines accept the same requests
                dataclasses.replace(config, max_model_len=runners[0].max_model_len) if runners else config,
                layout=loaded.layout,
                tokenizer_ids=mask,
                processors=processors,
                kv_scales=loaded.kv_scales,
                drafter=_copied_drafter(drafter, devices, index) if index and not shared else drafter,
                adapters=adapters,
                progress=progress,
                background=background,
                owns_params=params is None and (devices is not None or config.data_parallel_size == 1),
                before_first_run=(lambda: None) if group is None else group.wait_for_all,
            )
            runners.append(runner)
    except BaseException:
        for runner in runners:
            runner.close()
        raise
    return_free_memory()
    registry = None if adapters is None else adapter_registry(loaded, config, adapters)
    return Prepared(config, loaded, pooling, mask, processors, runners[0], tuple(runners[1:]), group, registry)


def _join(config: EngineConfig, params: Any) -> "ProcessGroup | None":
    """Join the engine's other processes; None if there are none. Raises ModelLoadError, and RequestError."""
    if config.nnodes == 1:
        return None
    if params is not None:
        known = "must be 1 with live arrays: load a checkpoint, then call update_weights with them"
        raise RequestError("nnodes", config.nnodes, known)
    from jpaged.loading import checkpoint_fingerprint
    from jpaged.runtime.parallel.process_group import ProcessGroup

    with not_using_device():
        return ProcessGroup.join(config, checkpoint_fingerprint(config))


def weights_name(config: EngineConfig, *, live: bool, version: WeightVersion) -> str:
    """Name the weights' files by their fingerprint. Live arrays have no files: only their owner can compare them.

    version: after an update of the weights, it names them. The caller gives other weights another version.
    """
    name = "live arrays"
    if not live:
        from jpaged.loading import checkpoint_fingerprint

        name = f"checkpoint {checkpoint_fingerprint(config)}"
    return name if version == 0 else f"{name} with weights of version {str(version).replace(',', ';')}"


def _sampling_defaults(loaded: "LoadedModel", config: EngineConfig) -> SamplingParams:
    """Return the sampling parameters of requests without their own. Raises ModelLoadError, or RequestError."""
    from jpaged.loading.checkpoint import read_json

    source: Mapping[str, Any] = loaded.generation_config
    if config.generation_config == "vllm":
        source = {}
    elif config.generation_config != "auto":
        folder = pathlib.Path(config.generation_config).expanduser()
        source = read_json(folder / "generation_config.json", required=True)
    return generation_defaults(source, config.override_generation_config)


def _check_model_arguments(model: Any, params: Any, layout: Any) -> None:
    """Raise RequestError for a model that needs params and has none, or for a bad layout. Uses no device."""
    if params is None and not isinstance(model, str):
        raise RequestError(
            "model", model, "must be a folder, a hub id, a .gguf file or demo; a config goes together with params"
        )
    from jpaged.models.spec import WeightLayout

    if layout is not None and (params is None or not isinstance(layout, WeightLayout)):
        raise RequestError("layout", layout, "must be a jpaged.models.spec.WeightLayout, and goes together with params")


def _load(
    model: Any,
    params: Any,
    layout: "WeightLayout | None",
    config: EngineConfig,
    processors: tuple[LogitsProcessor, ...],
    devices: "Sequence[jax.Device] | None",
) -> "LoadedModel":
    from jpaged.loading import load_model
    from jpaged.runtime.runner import ModelRunner
    from jpaged.runtime.sampling.sampler import check_processors

    def check(spec: "DecoderSpec", params: Any) -> None:
        """Raise for a model that the runner cannot run. Called before any weight is on the device."""
        ModelRunner.check(spec, params, config, devices)
        check_processors(processors, spec.vocab_size)

    return load_model(
        config,
        params,
        model_config=None if isinstance(model, str) else model,
        layout=layout,
        check=check,
        devices=devices,
    )


def _load_drafter(loaded: "LoadedModel", config: EngineConfig) -> "DrafterModel | None":
    """Load the drafter of `speculative_config` that runs on the device. None: there is none."""
    speculation = config.speculative_config
    if speculation is None or not speculation.has_model:
        return None
    from jpaged.loading.drafters import load_drafter
    from jpaged.runtime.drafting.drafter_model import DrafterModel

    drafter = load_drafter(speculation, loaded, config)
    return DrafterModel(drafter.head_spec or drafter.spec, drafter.params, drafter.layout, drafter.max_model_len)


def _copied_drafter(drafter: "DrafterModel | None", devices: Any, index: int) -> "DrafterModel | None":
    """The drafter on the devices of another engine."""
    from jpaged.frontend.engine_devices import copied

    if drafter is None:
        return None
    return dataclasses.replace(drafter, params=copied(drafter.params, devices[0], devices[index]))


def _engine(
    runner: Any,  # an `engine.step_plan.Runner`
    loaded: "LoadedModel",
    config: EngineConfig,
    pooling: Pooling | None,
    mask: "np.ndarray | None",
    processors: tuple[LogitsProcessor, ...],
    first: Engine | None,
) -> Engine:
    main_eos = getattr(loaded.tokenizer, "eos_token_id", None)
    scheduling = {field.name: getattr(config, field.name) for field in dataclasses.fields(SchedulingOptions)}
    options = EngineOptions(
        eos_token_ids=tuple(loaded.eos_token_ids),
        eos_token_id=next(iter(loaded.eos_token_ids), None) if main_eos is None else main_eos,
        known_ids=mask,
        processors=processors,
        pooling=pooling,
        scheduling=SchedulingOptions(**scheduling),
        enable_prefix_caching=config.enable_prefix_caching,
        jump_forward=config.jump_forward,
        stream_interval=config.stream_interval,
        disable_log_stats=config.disable_log_stats,
        grammar_limits=GrammarLimits.from_options(config),
        seed=config.seed,
        speculation=config.speculative_config,
    )
    return Engine(runner, loaded.tokenizer, options, seeds=None if first is None else first.seeds)


def _check_outputs(engine: Engine, loaded: "LoadedModel") -> None:
    """Run one token through the model. Raises ModelLoadError if its logits, or its pooled vector, are not finite.

    The step uses existing programs, and leaves no cached KV, no statistics and no drawn seed.
    """
    import numpy as np

    known, first = engine.options.known_ids, loaded.generation_config.get("bos_token_id")
    if type(first) is not int or not 0 <= first < loaded.spec.vocab_size or (known is not None and not known[first]):
        first = 0 if known is None else int(np.argmax(known))
    params: SamplingParams | PoolingParams = SamplingParams(temperature=0, max_tokens=1, detokenize=False, seed=0)
    if engine.options.pooling is not None:
        params = PoolingParams()
    engine.add_request("check", [first], params)
    outputs: list[Any] = []
    while engine.has_work:
        outputs += engine.step()
    [answer] = outputs
    if engine.options.pooling is None:
        is_finite = answer.outputs[0].finish_reason != "error"
    else:
        is_finite = answer.outputs is not None  # None: the vector is not finite
    if not is_finite:
        raise ModelLoadError(f"{loaded.source}: {LogitsError.message}")
    engine.reset_prefix_cache()
    engine.reset_stats()


def _pooling(loaded: "LoadedModel") -> Pooling | None:
    """Return the output of a pooling model, as `Pooling`; None for a model that generates."""
    spec = loaded.spec
    if not spec.pools:
        return None
    encoder = spec.encoder
    about: dict[str, Any] = {"is_encoder": encoder is not None, "token_types": encoder.token_types if encoder else 0}
    if spec.num_labels is None:
        files = loaded.sentences
        return Pooling(spec.output_size, prompts=files.prompts, default_prompt=files.default_prompt, **about)
    labels = labels_of(loaded.config, spec.num_labels)
    pairs = PairFormat.TYPED if about["token_types"] > 1 else PairFormat.JOINED
    if loaded.config.get("is_original_qwen3_reranker"):
        pairs = PairFormat.QWEN3
    return Pooling(spec.output_size, activation_of(loaded.config, spec.num_labels), labels, pairs=pairs, **about)
