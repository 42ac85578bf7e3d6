"""Groups of flags in a command's help. The most used flags come first, then one group per subject."""

import dataclasses
import typing
from typing import Any

from jpaged.params.sampling import COLUMNS

# A command's help begins with the first ten of these flags that the command has.
MOST_USED = (
    "host", "port", "api_key_file", "served_model_name", "system_prompt", "temperature", "top_p", "max_tokens", "n",
    "stop", "max_model_len", "max_num_seqs", "dtype", "quantization", "kv_cache_memory_bytes", "tensor_parallel_size",
)  # fmt: skip

# Title -> flags. The help shows "TITLE options". A flag without a group follows the first ten.
GROUPS: dict[str, tuple[str, ...]] = {
    "sampling": (
        "best_of", "use_beam_search", "beam_width", "length_penalty", "early_stopping", *COLUMNS, "sampling_seed",
        "min_tokens", "ignore_eos", "bad_words", "logprobs", "max_logprobs", "logprobs_mode", "mask_unknown_tokens",
        "return_sampling_mask", "enable_return_routed_experts",
    ),
    "structured_output": (
        "json_schema", "grammar", "regex", "choice", "jump_forward", "max_grammar_bytes", "max_grammar_depth",
        "max_grammar_enum", "max_regex_bytes", "grammar_compile_timeout", "grammar_cache_size",
    ),
    "chat": (
        "chat_template", "chat_template_kwargs", "tool_call_parser", "reasoning_parser", "reasoning_tags",
        "enable_tokenizer_info_endpoint",
    ),
    "model": (
        "model", "tokenizer", "revision", "download_dir", "load_format", "runner", "hf_overrides", "generation_config",
        "override_generation_config", "seed", "skip_tokenizer_init", "trust_remote_code", "weights_dirs",
    ),
    "memory": (
        "gpu_memory_utilization", "kv_cache_dtype", "block_size", "enable_prefix_caching", "swap_space", "kv_handover",
    ),
    "scheduling": (
        "max_num_batched_tokens", "scheduling_policy", "max_num_partial_prefills", "target_step_ms",
        "max_queued_requests", "max_queued_tokens", "stream_interval",
    ),
    "speculation": ("speculative_config",),
    "lora": (
        "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "lora", "lora_modules", "lora_dirs",
    ),
    "parallel": (
        "pipeline_parallel_size", "prefill_context_parallel_size", "enable_expert_parallel", "data_parallel_size",
        "data_parallel_routing", "prefill_engines", "nnodes", "node_rank", "master_addr", "master_port",
        "join_timeout", "headless", "detect_nodes",
    ),
    "program": (
        "quantized_activations", "deterministic", "attention_implementation", "gated_dot_implementation",
        "fused_layers",
        "compilation_cache_dir", "row_buckets", "token_buckets",
    ),
    "access": (
        "api_key", "admin_key_file", "admin_key", "allowed_hosts", "allowed_origins", "allowed_methods",
        "allowed_headers", "allow_credentials", "root_path", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs",
        "ssl_cert_reqs",
    ),
    "connection": (
        "uds", "api_server_count", "shutdown_timeout", "max_connections_per_address", "batch_folder", "disable_ui",
    ),
    "log": (
        "verbose", "access_log", "log_format", "disable_log_stats", "metrics_port", "otlp_traces_endpoint",
        "profile_dir", "watchdog_seconds",
    ),
}  # fmt: skip
_FIRST = 10


def grouped(command: type) -> type:
    """Return a dataclass with the flags of a command and of its dataclass fields, in groups. Inverse: `ungrouped`."""
    leaves = _leaves(command)
    first = [name for name in MOST_USED if name in leaves][:_FIRST]
    group_of = {name: title for title, names in GROUPS.items() for name in names}
    group_of |= dict.fromkeys(MOST_USED, "model")  # most used flags after the first ten
    group_of |= dict.fromkeys(first, "")
    positional = [name for name in ("model_argument", "words") if name in leaves]
    own = [name for name in leaves if group_of.get(name, "") == "" and name not in (*positional, *first)]
    fields: list[Any] = [leaves[name] for name in (*positional, *first, *own)]
    for title in GROUPS:
        names = [name for name in (*MOST_USED, *GROUPS[title]) if name in leaves and group_of[name] == title]
        if names:
            group = dataclasses.make_dataclass(title, [leaves[name] for name in names], frozen=True, kw_only=True)
            group.__doc__ = ""
            fields.append((title, group, dataclasses.field(default=group())))
    made = dataclasses.make_dataclass(command.__name__, fields, frozen=True, kw_only=True)
    made.__doc__ = command.__doc__
    return made


def ungrouped(command: type, flags: Any) -> Any:
    """Convert an instance of `grouped(command)` into a `command`."""
    values = {field.name: getattr(flags, field.name) for field in dataclasses.fields(flags)}
    for title in GROUPS.keys() & values.keys():
        group = values.pop(title)
        values |= {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
    return _made(command, values)


def _made(cls: Any, values: dict[str, Any]) -> Any:
    nested = _nested(cls)
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    return cls(**{name: _made(nested[name], values) if name in nested else values[name] for name in names})


def _nested(cls: type) -> dict[str, type]:
    hints = typing.get_type_hints(cls)
    return {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint) and isinstance(hint, type)}


def _leaves(cls: Any) -> dict[str, Any]:
    """(name, type, default) of each field by name. The fields of nested dataclasses take the place of the dataclass."""
    hints, nested = typing.get_type_hints(cls, include_extras=True), _nested(cls)
    leaves: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name in nested:
            leaves |= _leaves(nested[field.name])
        else:
            made = dataclasses.field(default=field.default, default_factory=field.default_factory)
            leaves[field.name] = (field.name, hints[field.name], made)
    return leaves
