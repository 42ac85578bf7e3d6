"""`EngineArguments`: the engine options that `LLM`, `AsyncLLM` and `generate` take as keywords, for type checkers.

A type checker refuses a misspelt option. The docstrings of `EngineConfig` describe the options.
tools/write_engine_arguments.py writes this file.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from jpaged.speculation_config import SpeculationConfig


class EngineArguments(TypedDict, total=False):
    """Fields of `EngineConfig` without the model, `logits_processors`, and options of vLLM at their neutral values."""

    tokenizer: str | None
    skip_tokenizer_init: bool
    revision: str | None
    load_format: str
    download_dir: str | None
    hf_overrides: Mapping[str, Any] | None
    generation_config: str
    override_generation_config: Mapping[str, Any] | None
    dtype: str
    quantization: str | None
    quantized_activations: str
    kv_cache_dtype: str
    seed: int
    runner: str
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    block_size: int | None
    enable_prefix_caching: bool
    swap_space: float
    scheduling_policy: str
    max_num_partial_prefills: int
    target_step_ms: float | None
    max_queued_requests: int | None
    max_queued_tokens: int | None
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    prefill_context_parallel_size: int
    enable_expert_parallel: bool
    data_parallel_size: int
    data_parallel_routing: str
    prefill_engines: int
    kv_handover: bool
    deterministic: bool
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    join_timeout: float
    attention_implementation: str | None
    gated_dot_implementation: str | None
    fused_layers: bool | None
    mask_unknown_tokens: bool
    trust_remote_code: bool
    disable_log_stats: bool
    max_logprobs: int
    logprobs_mode: str
    return_sampling_mask: bool
    enable_return_routed_experts: bool
    max_grammar_bytes: int
    max_grammar_depth: int
    max_grammar_enum: int
    max_regex_bytes: int
    grammar_compile_timeout: float
    jump_forward: bool
    stream_interval: int
    grammar_cache_size: int
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None
    lora_dtype: str
    speculative_config: SpeculationConfig | Mapping[str, Any] | None
    compilation_cache_dir: str | None
    row_buckets: Sequence[int] | None
    token_buckets: Sequence[int] | None
    logits_processors: Sequence[Any]

    # vLLM's names of max_queued_requests, max_queued_tokens, swap_space.
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    kv_offloading_size: float | None

    # vLLM's short forms of keys of speculative_config.
    spec_method: str | None
    spec_model: str | None
    spec_tokens: int | None

    # Options of vLLM that jpaged does not have yet. Only their neutral values are accepted.
    distributed_executor_backend: Any
    cpu_offload_gb: Any
    enforce_eager: Any
    enable_chunked_prefill: Any
    max_seq_len_to_capture: Any
    guided_decoding_backend: Any
    limit_mm_per_prompt: Any
    tokenizer_mode: Any
    rope_scaling: Any
    task: Any
    use_v2_block_manager: Any
    disable_custom_all_reduce: Any
    num_gpu_blocks_override: Any
    tokenizer_revision: Any
    async_scheduling: Any
    compilation_config: Any
    kv_transfer_config: Any
    kv_offloading_backend: Any
    num_scheduler_steps: Any
