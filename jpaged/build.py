"""From a model's name and options to an engine that runs: what `LLM` and `AsyncLLM` share."""

import dataclasses
import difflib
import logging
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine, SchedulingOptions
from jpaged.engine.grammar import GrammarLimits
from jpaged.engine.pooling import Pooling, activation_of
from jpaged.engine.waiting_queue import POLICIES
from jpaged.errors import ModelLoadError, RequestError
from jpaged.params.logits_processors import logits_processors
from jpaged.params.pooling import TASKS
from jpaged.params.sampling import SamplingParams

if TYPE_CHECKING:
    from jpaged.loading import LoadedModel
    from jpaged.models.spec import DecoderSpec, WeightLayout

logger = logging.getLogger(__name__)

RUNNERS = ("auto", "generate", "pooling")
LIVE_ARRAYS = "live arrays"  # EngineConfig.model where no checkpoint is named
# What generation_config.json may say about sampling, and what it is called here. As in vLLM, do_sample is not read.
GENERATION_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


@dataclasses.dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that is ready, and what its front door tells of it."""

    engine: Engine
    config: EngineConfig
    spec: "DecoderSpec"
    tokenizer: Any | None                    # transformers.PreTrainedTokenizerBase
    default_sampling_params: SamplingParams  # for requests that bring none


# vLLM's engine options that are not built yet, with the values that ask for nothing: a script that sets these runs.
NOT_YET: dict[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (1,), "pipeline_parallel_size": (1,), "data_parallel_size": (1,),
    "distributed_executor_backend": (None,), "quantization": (None,), "kv_cache_dtype": ("auto",),
    "cpu_offload_gb": (0,), "enforce_eager": (False, True), "enable_chunked_prefill": (True, None),
    "max_seq_len_to_capture": (), "disable_log_stats": (False, True), "enable_lora": (False, None),
    "speculative_config": (None,), "guided_decoding_backend": (), "limit_mm_per_prompt": (None, {}),
    "tokenizer_mode": ("auto",), "load_format": ("auto", "safetensors"), "skip_tokenizer_init": (False,),
    "hf_overrides": (None, {}), "rope_scaling": (None, {}), "task": ("auto", "generate"),
    "use_v2_block_manager": (True,), "disable_custom_all_reduce": (False, True),
    "num_gpu_blocks_override": (None,), "tokenizer_revision": (None,),
}  # fmt: skip


def _is_already_so(name: str, value: Any) -> bool:
    """Whether an option of vLLM asks for what is done anyway. Raises RequestError where it asks for more."""
    if name not in NOT_YET:
        return False
    if any(type(value) is type(neutral) and value == neutral for neutral in NOT_YET[name]):
        return True
    others = " or ".join(repr(neutral) for neutral in NOT_YET[name] if neutral is not None)
    raise RequestError(name, value, "not supported yet: leave it out" + (f", or {others}" if others else ""))


def engine_config(model: Any, options: Mapping[str, Any]) -> EngineConfig:
    """Options by name as an EngineConfig. Raises RequestError for a name that is no option, or a value of no use."""
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    if options.get("task") in TASKS:  # what vLLM's option was before
        if options.get("runner", "auto") not in ("auto", "pooling"):
            raise RequestError("task", options["task"], "goes with runner='pooling'")
        options = {name: value for name, value in options.items() if name != "task"} | {"runner": "pooling"}
    options = {name: value for name, value in options.items() if not _is_already_so(name, value)}
    for name, value in options.items():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names)}"
            raise RequestError(name, value, f"unknown engine option; {hint}")
    if isinstance(model, str) and not model:
        raise RequestError("model", model, "name a folder, a hub id, a .gguf file or demo")
    hints = typing.get_type_hints(EngineConfig)
    checked = {name: _checked(name, hints[name], value) for name, value in options.items()}
    config = EngineConfig(model=model if isinstance(model, str) else LIVE_ARRAYS, **checked)
    if config.runner not in RUNNERS:
        raise RequestError("runner", config.runner, f"must be {', '.join(RUNNERS)}")
    if config.scheduling_policy not in POLICIES:
        raise RequestError("scheduling_policy", config.scheduling_policy, f"must be {', '.join(POLICIES)}")
    for name in ("max_num_partial_prefills", "target_step_ms", "max_queued_requests", "max_queued_tokens"):
        value = getattr(config, name)
        if value is not None and not 0 < value < float("inf"):
            raise RequestError(name, value, "must be above 0")
    if not 0 <= config.swap_space < float("inf"):
        raise RequestError("swap_space", config.swap_space, "must be GiB of host memory, from 0")
    return config


def _checked(name: str, hint: Any, value: Any) -> Any:
    """The value of an option as its field holds it: numpy's scalars and any sequence become Python's and tuples."""
    kind, *rest = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and rest:  # the only union is the one with None
        return None
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = tuple(_python_scalar(part) for part in value)
    value = _python_scalar(value)
    accepted, right = _ACCEPTED[kind]
    if not right(value):
        raise RequestError(name, value, f"must be {accepted}" + (", or None" if rest else ""))
    return value


def _python_scalar(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


_ACCEPTED: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    str: ("a string", lambda value: isinstance(value, str)),
    bool: ("True or False", lambda value: type(value) is bool),
    int: ("a whole number", lambda value: type(value) is int),
    float: ("a number", lambda value: type(value) in (int, float)),
    tuple[int, ...]: (
        "a sequence of one or more whole numbers above 0",
        lambda value: type(value) is tuple and bool(value) and all(type(part) is int and part >= 1 for part in value),
    ),
}  # of each type a field may have: what is accepted, in words and as a check; bool is no int


def build_engine(
    model: Any,
    params: Any,
    options: Mapping[str, Any],
    *,
    layout: "WeightLayout | None" = None,
    progress: bool,
) -> BuiltEngine:
    """Load a model, compile its programs, and put an engine on them.

    model:  folder, hub id, .gguf file or "demo"; with `params` also a Hugging Face config, its dict, or a DecoderSpec.
    params: live arrays to use as they are, or None to read the checkpoint.
    layout: how live arrays are stored; None: as their names and shapes say.
    Raises RequestError for a bad option, ModelLoadError for everything that keeps the model from running.
    """
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    processors = logits_processors(options.get("logits_processors"))
    config = engine_config(model, {name: value for name, value in options.items() if name != "logits_processors"})
    if params is None and not isinstance(model, str):
        raise RequestError(
            "model", model, "must be a folder, a hub id, a .gguf file or demo; a config goes together with params"
        )
    # Here and not at the top, so that importing jpaged imports no jax.
    import jax

    from jpaged.loading import load_model, valid_token_mask
    from jpaged.models.spec import DecoderSpec, WeightLayout
    from jpaged.runtime.memory import claim_gpu_memory
    from jpaged.runtime.runner import ModelRunner
    from jpaged.runtime.sampler import check_processors

    def check(spec: DecoderSpec, dtype: Any) -> None:
        ModelRunner.check(spec, dtype, config)
        check_processors(processors, spec.vocab_size)

    claim_gpu_memory(config)
    if layout is not None and (params is None or not isinstance(layout, WeightLayout)):
        raise RequestError("layout", layout, "must be a jpaged.models.spec.WeightLayout, and goes together with params")
    refuse_tracing(*jax.tree.leaves(params))
    loaded = load_model(
        config,
        params,
        model_config=None if isinstance(model, str) else model,
        layout=layout,
        check=check,
    )
    pooling = _pooling(loaded)
    defaults = SamplingParams() if pooling else generation_defaults(loaded.generation_config)
    masks = config.mask_unknown_tokens and pooling is None
    mask = valid_token_mask(loaded.tokenizer, loaded.spec.vocab_size) if masks else None
    runner = ModelRunner.create(
        loaded.spec,
        loaded.params,
        config,
        layout=loaded.layout,
        tokenizer_ids=mask,
        processors=processors,
        progress=progress,
    )
    main_eos = getattr(loaded.tokenizer, "eos_token_id", None)
    engine = Engine(
        runner,
        known_ids=mask,
        processors=processors,
        grammar_limits=GrammarLimits.from_options(config),
        jump_forward=config.jump_forward,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        eos_token_id=next(iter(loaded.eos_token_ids), None) if main_eos is None else main_eos,
        seed=config.seed,
        enable_prefix_caching=config.enable_prefix_caching,
        pooling=pooling,
        scheduling=SchedulingOptions(**{
            field.name: getattr(config, field.name) for field in dataclasses.fields(SchedulingOptions)
        }),
    )  # fmt: skip
    return BuiltEngine(engine, config, loaded.spec, loaded.tokenizer, defaults)


def _pooling(loaded: "LoadedModel") -> Pooling | None:
    """What a model that pools gives; None of one that generates."""
    spec = loaded.spec
    if not spec.pools:
        return None
    activation = None if spec.num_labels is None else activation_of(loaded.config, spec.num_labels)
    return Pooling(spec.output_size, activation)


def generation_defaults(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters for requests that bring none: the checkpoint's defaults over vLLM's."""
    values = {name: generation_config.get(key) for key, name in GENERATION_DEFAULTS.items()}
    given = {name: value for name, value in values.items() if value is not None}
    if given:
        logger.info("requests without sampling parameters use generation_config.json's: %s", given)
    penalty = generation_config.get("repetition_penalty")
    if penalty not in (None, 1):
        logger.warning("generation_config.json has repetition_penalty=%s: not supported yet, not applied", penalty)
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise ModelLoadError(f"generation_config.json: {error}; correct the file") from error


def refuse_tracing(*values: Any) -> None:
    """Raise RequestError when JAX is tracing: what follows would run once while compiling, and never again."""
    jax = sys.modules.get("jax")
    if jax is None:
        return
    # Inside jit, scan and the like even a constant becomes a tracer; outside of them this compiles nothing.
    if any(isinstance(value, jax.core.Tracer) for value in (*values, jax.device_put(np.int32(0)))):
        raise RequestError(
            "generate",
            "a call inside a function that JAX traces",
            "call it outside of jit, vmap, grad and scan, with concrete arrays",
        )
