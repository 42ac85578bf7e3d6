"""Checks engine options given by name, and makes an `EngineConfig` of them."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jpaged.config import (
    DTYPE_ALIASES,
    DTYPES,
    KV_CACHE_DTYPE_ALIASES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    QUANTIZATIONS,
    QUANTIZED_ACTIVATIONS,
    QUANTIZED_FORMATS,
    ROUTINGS,
    RUNNERS,
    SCHEDULING_POLICIES,
    EngineConfig,
)
from jpaged.errors import RequestError
from jpaged.params.pooling import TASKS
from jpaged.speculation_config import MODEL_METHODS, SpeculationConfig

LIVE_ARRAYS = "live arrays"  # EngineConfig.model when the caller gives arrays and no checkpoint

# vLLM's engine options that jpaged does not have yet, with their neutral values, which need no feature that jpaged
# lacks. A neutral value is ignored; any other value is refused.
NOT_YET: dict[str, tuple[Any, ...]] = {
    "distributed_executor_backend": (None,), "cpu_offload_gb": (0,), "enforce_eager": (False, True),
    "enable_chunked_prefill": (True, None),
    "max_seq_len_to_capture": (),
    "guided_decoding_backend": (), "limit_mm_per_prompt": (None, {}),
    "tokenizer_mode": ("auto",),
    "rope_scaling": (None, {}), "task": ("auto", "generate"),
    "use_v2_block_manager": (True,), "disable_custom_all_reduce": (False, True),
    "num_gpu_blocks_override": (None,), "tokenizer_revision": (None,),
    "async_scheduling": (True, False, None), "compilation_config": (None, {}),
    "kv_transfer_config": (None,), "kv_offloading_backend": ("native", None), "num_scheduler_steps": (1,),
}  # fmt: skip

# vLLM's names of options that jpaged has under another name.
ALIASES = {
    "max_num_queued_reqs": "max_queued_requests", "max_num_queued_tokens": "max_queued_tokens",
    "kv_offloading_size": "swap_space",
}  # fmt: skip
# vLLM's options that stand for one key of speculative_config.
SPECULATION_KEYS = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}


def engine_config(model: object, options: Mapping[str, Any]) -> EngineConfig:
    """Make an EngineConfig of options given by name.

    model: the model's name; a value that is not a string stands for live arrays.
    Raises RequestError for an unknown option, or for a value of the wrong type or out of range.
    """
    options = with_speculation(_without_aliases(_without_task(options)))
    options = {name: value for name, value in options.items() if not is_neutral(name, value)}
    _check_names(options)
    if isinstance(model, str) and not model:
        raise RequestError("model", model, "name a folder, a hub id, a .gguf file or demo")
    hints = typing.get_type_hints(EngineConfig)
    checked = {name: _checked(name, hints[name], value) for name, value in options.items()}
    if "dtype" in checked:
        checked["dtype"] = DTYPE_ALIASES.get(checked["dtype"], checked["dtype"])
    if "kv_cache_dtype" in checked:
        checked["kv_cache_dtype"] = KV_CACHE_DTYPE_ALIASES.get(checked["kv_cache_dtype"], checked["kv_cache_dtype"])
    config = EngineConfig(model=model if isinstance(model, str) else LIVE_ARRAYS, **checked)
    _check_values(config)
    return config


def _without_task(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace vLLM's old option `task` by `runner`. Raises RequestError when the two contradict each other."""
    if options.get("task") not in TASKS:
        return dict(options)
    if options.get("runner", "auto") not in ("auto", "pooling"):
        raise RequestError("task", options["task"], "goes with runner='pooling'")
    return {name: value for name, value in options.items() if name != "task"} | {"runner": "pooling"}


def _without_aliases(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace vLLM's names of options. None stands for the default. Raises RequestError if both names are given."""
    made = {name: value for name, value in options.items() if name not in ALIASES}
    for alias, name in ALIASES.items():
        value = options.get(alias)
        if value is None:
            continue
        if name in options:
            raise RequestError(alias, value, f"is vLLM's name for {name}, which is given as well: leave one out")
        made[name] = value
    return made


def with_speculation(options: Mapping[str, Any]) -> dict[str, Any]:
    """Put spec_method, spec_model and spec_tokens into speculative_config. None stands for a default.

    Raises RequestError if speculative_config has the same key, or is no mapping.
    """
    made = {name: value for name, value in options.items() if name not in SPECULATION_KEYS}
    given = {name: options[name] for name in SPECULATION_KEYS if options.get(name) is not None}
    if not given:
        return made
    base = made.get("speculative_config") or {}
    for name, value in given.items():
        key = SPECULATION_KEYS[name]
        if not isinstance(base, Mapping) or key in base:
            raise RequestError(name, value, f"is a short form of speculative_config.{key}: leave one of them out")
    made["speculative_config"] = {**base, **{SPECULATION_KEYS[name]: value for name, value in given.items()}}
    return made


def is_neutral(name: str, value: object, not_yet: Mapping[str, tuple[Any, ...]] = NOT_YET) -> bool:
    """Return True for an option of `not_yet` with a neutral value. Raises RequestError if it has any other value."""
    if name not in not_yet:
        return False
    if any(isinstance(value, bool) == isinstance(neutral, bool) and value == neutral for neutral in not_yet[name]):
        return True
    others = " or ".join(repr(neutral) for neutral in not_yet[name] if neutral is not None)
    raise RequestError(name, value, "not supported yet: leave it out" + (f", or {others}" if others else ""))


def _check_names(options: Mapping[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    for name, value in options.items():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names)}"
            raise RequestError(name, value, f"unknown engine option; {hint}")


def _check_values(config: EngineConfig) -> None:
    """Raise RequestError for a value that has the right type and is out of range."""
    if config.skip_tokenizer_init and config.tokenizer is not None:
        raise RequestError("skip_tokenizer_init", True, "does not go with tokenizer: leave one of them out")
    if config.runner not in RUNNERS:
        raise RequestError("runner", config.runner, f"must be {', '.join(RUNNERS)}")
    if config.scheduling_policy not in SCHEDULING_POLICIES:
        raise RequestError("scheduling_policy", config.scheduling_policy, f"must be {', '.join(SCHEDULING_POLICIES)}")
    if config.load_format not in LOAD_FORMATS:
        raise RequestError("load_format", config.load_format, f"must be {', '.join(LOAD_FORMATS)}")
    if config.quantization not in (None, *QUANTIZATIONS, *QUANTIZED_FORMATS):
        known = f"must be one of {', '.join(QUANTIZATIONS)}, the format of a quantised checkpoint "
        known += f"({', '.join(QUANTIZED_FORMATS)}), or left out"
        raise RequestError("quantization", config.quantization, known)
    if config.quantized_activations not in QUANTIZED_ACTIVATIONS:
        known = f"must be one of {', '.join(QUANTIZED_ACTIVATIONS)}"
        raise RequestError("quantized_activations", config.quantized_activations, known)
    if config.kv_cache_dtype not in KV_CACHE_DTYPES:
        known = ", ".join((*KV_CACHE_DTYPES, *KV_CACHE_DTYPE_ALIASES))
        raise RequestError("kv_cache_dtype", config.kv_cache_dtype, f"must be one of {known}")
    for name in (
        "max_num_partial_prefills", "target_step_ms", "max_queued_requests", "max_queued_tokens", "stream_interval",
    ):  # fmt: skip
        value = getattr(config, name)
        if value is not None and not 0 < value < float("inf"):
            raise RequestError(name, value, "must be above 0")
    if config.tensor_parallel_size < 1:
        raise RequestError("tensor_parallel_size", config.tensor_parallel_size, "must be a number of devices, from 1")
    if config.data_parallel_size < 1:
        raise RequestError("data_parallel_size", config.data_parallel_size, "must be a number of engines, from 1")
    if config.data_parallel_routing not in ROUTINGS:
        known = f"must be {', '.join(ROUTINGS)}"
        raise RequestError("data_parallel_routing", config.data_parallel_routing, known)
    if config.prefill_context_parallel_size < 1:
        known = "must be a number of devices, from 1"
        raise RequestError("prefill_context_parallel_size", config.prefill_context_parallel_size, known)
    _check_speculation(config)
    _check_adapters(config)
    _check_handover(config)
    _check_stages(config)
    if config.deterministic and config.tensor_parallel_size not in (1, 2, 4, 8):
        known = "must be 1, 2, 4 or 8 with deterministic=True"
        raise RequestError("tensor_parallel_size", config.tensor_parallel_size, known)
    _check_nodes(config)
    if not 0 <= config.swap_space < float("inf"):
        raise RequestError("swap_space", config.swap_space, "must be GiB of host memory, from 0")


def _check_handover(config: EngineConfig) -> None:
    """Raise RequestError if no engine can receive the KV that another engine computes."""
    count, most = config.prefill_engines, config.data_parallel_size - 1
    if not 0 <= count <= most:
        known = f"must be from 0 to data_parallel_size - 1 = {most}: at least one engine generates"
        raise RequestError("prefill_engines", count, known)
    for name in ("prefill_engines", "kv_handover"):
        if not getattr(config, name):
            continue
        known = None
        if not config.enable_prefix_caching:
            known = "hands KV over to the prefix cache, which is off"
        elif config.nnodes > 1:
            known = f"is for engines of one process, and nnodes={config.nnodes}"
        if known is not None:
            raise RequestError(name, getattr(config, name), known)


def _check_speculation(config: EngineConfig) -> None:
    """Raise RequestError for an option that is not supported with speculative decoding."""
    speculation = config.speculative_config
    if speculation is None:
        return
    name, tensor = "speculative_config", config.tensor_parallel_size
    known, method = None, speculation.method
    if config.pipeline_parallel_size > 1:
        known = f"is not supported with pipeline_parallel_size={config.pipeline_parallel_size}: the first stage would "
        known += "wait for the last one to check the drafts. Use tensor_parallel_size"
    elif config.runner == "pooling":
        known = "is for models that generate, and runner is pooling: leave it out"
    elif method in MODEL_METHODS and (config.prefill_engines or config.kv_handover):
        option = "prefill_engines" if config.prefill_engines else "kv_handover"
        known = f"is not supported with {option} and method {method}: the KV handed over is the model's alone, without "
        known += "the drafter's. Use ngram or suffix"
    elif method in MODEL_METHODS and config.nnodes > 1:
        known = f"is not supported yet with nnodes={config.nnodes} and method {method}: use ngram or suffix"
    if known is not None:
        raise RequestError(name, method, known)
    if speculation.draft_tensor_parallel_size not in (None, 1, tensor):
        known = "must be 1" + (f", or tensor_parallel_size={tensor}" if tensor > 1 else "")
        raise RequestError(f"{name}.draft_tensor_parallel_size", speculation.draft_tensor_parallel_size, known)
    if speculation.quantization not in (None, *QUANTIZATIONS, *QUANTIZED_FORMATS):
        known = f"must be one of {', '.join((*QUANTIZATIONS, *QUANTIZED_FORMATS))}, or left out"
        raise RequestError(f"{name}.quantization", speculation.quantization, known)
    if method == "mtp" and speculation.model not in (None, config.model):
        known = "method mtp uses the layer in the model's own checkpoint: leave it out"
        raise RequestError(f"{name}.model", speculation.model, known)


def _check_adapters(config: EngineConfig) -> None:
    """Raise RequestError for an option of LoRA adapters out of range, or one that is not supported with them."""
    for name in ("max_loras", "max_lora_rank"):
        if getattr(config, name) < 1:
            raise RequestError(name, getattr(config, name), "must be a whole number of at least 1")
    if config.max_cpu_loras is not None and config.max_cpu_loras < config.max_loras:
        known = f"must be at least max_loras={config.max_loras}: adapters on the device are in host memory, too"
        raise RequestError("max_cpu_loras", config.max_cpu_loras, known)
    if config.lora_dtype not in (*DTYPES, *DTYPE_ALIASES):
        raise RequestError("lora_dtype", config.lora_dtype, f"must be one of {', '.join(DTYPES)}")
    if not config.enable_lora:
        return
    for name, neutral in _WITHOUT_ADAPTERS.items():
        if (value := getattr(config, name)) != neutral:
            raise RequestError(name, value, f"is not supported yet with enable_lora: use {neutral}, or leave one out")


# Options that do not go with enable_lora, except at this value.
_WITHOUT_ADAPTERS = {"pipeline_parallel_size": 1, "nnodes": 1, "deterministic": False, "enable_expert_parallel": False}


def _check_stages(config: EngineConfig) -> None:
    """Raise RequestError for an invalid number of pipeline stages, or an option that is not supported with stages."""
    count = config.pipeline_parallel_size
    if count < 1:
        raise RequestError("pipeline_parallel_size", count, "must be a number of stages, from 1")
    if count == 1:
        return
    if config.nnodes > 1:
        known = f"all stages are in one process, and nnodes={config.nnodes}: leave one out; tensor_parallel_size can "
        raise RequestError("pipeline_parallel_size", count, known + "span processes")
    for name in ("prefill_engines", "kv_handover"):
        if getattr(config, name):
            known = f"is not supported with pipeline_parallel_size={count}, whose stages share the KV of a block"
            raise RequestError(name, getattr(config, name), known)


def _check_nodes(config: EngineConfig) -> None:
    """Raise RequestError for an invalid number of processes, rank or port."""
    if config.nnodes < 1:
        raise RequestError("nnodes", config.nnodes, "must be a number of processes, from 1")
    if not 0 <= config.node_rank < config.nnodes:
        raise RequestError("node_rank", config.node_rank, f"must be from 0 to nnodes - 1 = {config.nnodes - 1}")
    if config.nnodes > 1 and config.data_parallel_size > 1:
        known = f"all engines are in one process, and nnodes={config.nnodes}: leave one out, or start several servers"
        raise RequestError("data_parallel_size", config.data_parallel_size, known)
    if config.devices_per_engine % config.nnodes:
        context = config.prefill_context_parallel_size
        factor = f"times {context} for the context " if context > 1 else ""
        known = f"{factor}must be a multiple of nnodes={config.nnodes}, so that every process has the same number of "
        known += "devices"
        raise RequestError("tensor_parallel_size", config.tensor_parallel_size, known)
    if not 0 < config.master_port < 65535:
        known = "must be a port from 1 to 65534; the next port is used as well"
        raise RequestError("master_port", config.master_port, known)
    if not 0 < config.join_timeout < float("inf"):
        raise RequestError("join_timeout", config.join_timeout, "must be a number of seconds above 0")


def _checked(name: str, hint: Any, value: object) -> Any:
    """Return an option's value in the type of its field. numpy scalars become Python's, sequences become tuples.

    hint: the field's type. Raises RequestError for a value of another type.
    """
    kind, *rest = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and rest:  # every union in EngineConfig is `type | None`
        return None
    if kind is SpeculationConfig:
        return SpeculationConfig.from_fields(value)
    if isinstance(value, Mapping):
        value = dict(value)  # the caller may change the original
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = tuple(_python_scalar(part) for part in value)
    value = _python_scalar(value)
    accepted, is_accepted = _ACCEPTED[kind]
    if not is_accepted(value):
        raise RequestError(name, value, f"must be {accepted}" + (", or None" if rest else ""))
    return value


def _python_scalar(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value


def _are_positive_integers(value: object) -> bool:
    return type(value) is tuple and bool(value) and all(type(part) is int and part >= 1 for part in value)


def _has_names(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


# For each type of a field: the accepted values in words, and a check. `type(...) is int` refuses True and False.
_ACCEPTED: dict[Any, tuple[str, Callable[[object], bool]]] = {
    str: ("a string", lambda value: isinstance(value, str)),
    bool: ("True or False", lambda value: type(value) is bool),
    int: ("a whole number", lambda value: type(value) is int),
    float: ("a number", lambda value: type(value) in (int, float)),
    Mapping[str, Any]: ("a dictionary with names as keys", _has_names),
    tuple[int, ...]: ("a sequence of one or more whole numbers above 0", _are_positive_integers),
}
