"""`EngineConfig`: the options of an engine. The docstring under a field is its help text.

Names are vLLM's where vLLM has one. The command line flags are made from these fields.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jpaged.speculation_config import SpeculationConfig

DTYPES = ("auto", "bfloat16", "float16", "float32")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}  # vLLM's other names
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
QUANTIZATIONS = ("int8", "int4", "fp8", "w8a8")
# Formats of quantised checkpoints: `quant_method` in their config.json, and gguf.
QUANTIZED_FORMATS = ("awq", "gptq", "compressed-tensors", "fp8", "modelopt", "mxfp4", "gguf")
QUANTIZED_ACTIVATIONS = ("auto", "int8", "fp8", "float")
KV_CACHE_DTYPES = ("auto", "int8", "fp8_e4m3")
KV_CACHE_DTYPE_ALIASES = {"fp8": "fp8_e4m3"}  # vLLM's other name
RUNNERS = ("auto", "generate", "pooling")
SCHEDULING_POLICIES = ("fcfs", "priority", "shortest_first")
ROUTINGS = ("prefix_affine", "least_loaded", "round_robin")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine. `None` means: chosen at start from the model and the device, and logged."""

    model: str
    """Folder, Hugging Face hub id, or .gguf file of a checkpoint; `demo` is the small model that ships with jpaged."""

    tokenizer: str | None = None
    """Folder, hub id or .gguf file of the tokenizer. Default: the model's own."""

    skip_tokenizer_init: bool = False
    """Load no tokenizer. Prompts are token ids then, and answers have no text."""

    revision: str | None = None
    """Branch, tag or commit of a hub id. Default: the main branch."""

    load_format: str = "auto"
    """Format of the checkpoint: safetensors, gguf, or auto for either. dummy: small random weights with config.json's
    shapes; no weights are read, and answers have no meaning."""

    download_dir: str | None = None
    """Folder that models are downloaded to. Default: the hub's cache folder."""

    hf_overrides: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    """Values that replace those of config.json, as a JSON object."""

    generation_config: str = "auto"
    """Source of the default sampling parameters. auto: the model's generation_config.json. vllm: none, only the
    defaults of SamplingParams. Or a folder with a generation_config.json."""

    override_generation_config: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    """Default sampling parameters that replace those of generation_config.json, as a JSON object with its keys."""

    dtype: str = "auto"
    """Type of weights and activations: auto, bfloat16, float16 (or half), float32 (or float). auto is the checkpoint's
    type; on CPU with JAX 0.10 it is float32, unless native kernels compute all matmuls."""

    quantization: str | None = None
    """Quantise the weights while they are loaded. int8: 8 bits, one scale per output. int4: groups of 64 inputs;
    embeddings and lm_head in 8 bits. fp8: float8_e4m3, one scale per output. w8a8: as int8, with activations rounded to
    8 bits on every device. Default: the weights keep their type. The format of an already quantised checkpoint (awq,
    gptq, compressed-tensors, fp8, modelopt, mxfp4, gguf) is accepted, and changes nothing."""

    quantized_activations: str = "auto"
    """Precision of the activations in matmuls with quantised weights. int8: rounded to 8 bits, one scale per token.
    fp8: rounded to e4m3 for weights in fp8, one scale per token and group of the weights' inputs; other weights as with
    auto; on NVIDIA it needs compute capability 8.9. float: not rounded. auto: int8 with w8a8, and on CPU for weights
    with integer codes, where it is faster; else float, also for checkpoints in fp8."""

    kv_cache_dtype: str = "auto"
    """Type of the keys and values in the KV cache: auto, int8, fp8_e4m3 (or fp8). auto is the type of the weights. int8
    has one scale per token and KV head, and runs on any device. fp8_e4m3 has the checkpoint's scales, else 1.0; on
    NVIDIA it needs compute capability 8.9. Both hold nearly twice as many tokens as bfloat16; on NVIDIA, the keys and
    values of a layer take at most 2 GiB."""

    seed: int = 0
    """Seed of the engine. Requests without a seed of their own get theirs from it."""

    runner: str = "auto"
    """generate: generate text. pooling: return vectors, for embeddings, scores and classification. auto: pooling for an
    encoder (such as BERT) and a sequence classifier, generate for any other model."""

    max_model_len: int | None = None
    """Maximum number of tokens of one request, prompt and output together. Default: the model's own limit, or less if
    memory is short."""

    max_num_seqs: int | None = None
    """Maximum number of requests that run at once (rows of the request table). Default: 32 on CPU, 256 elsewhere."""

    max_num_batched_tokens: int | None = None
    """Maximum number of tokens computed in one step. A longer prompt is computed in chunks, one per step. Default: 512
    on CPU, 2048 elsewhere."""

    block_size: int | None = None
    """Tokens per block of the KV cache: a power of two from 8 to 128. Default: 16, on TPU 64."""

    enable_prefix_caching: bool = True
    """Keep the KV cache of finished requests, and reuse it for requests with the same prefix."""

    swap_space: float = 0.0
    """GiB of host memory for KV blocks, and snapshots of recurrent layers, that the device has no room for: from
    preempted requests and from prompts that may be sent again. They are copied back when that is faster than computing
    them. 0: off."""

    scheduling_policy: str = "fcfs"
    """Order in which waiting requests start. fcfs: first come, first served. priority: the lowest `priority` first; 60
    s of waiting count as one step of priority. shortest_first: the fewest tokens left to generate, by
    max_tokens, first; a second of waiting counts as 20 tokens."""

    max_num_partial_prefills: int = 1
    """Maximum number of prompts that are computed in chunks at the same time."""

    target_step_ms: float | None = None
    """Target duration of a step, in milliseconds. While requests are generating, prompts advance in smaller chunks to
    keep it. Default: no target; chunks are as large as max_num_batched_tokens allows."""

    max_queued_requests: int | None = None
    """Maximum number of requests that may wait while the engine is full. The next request is refused (HTTP 503).
    Applies to the server and AsyncLLM; LLM accepts any number of prompts. Default: no limit."""

    max_queued_tokens: int | None = None
    """Maximum number of prompt tokens that may wait while the engine is full. With an empty queue, a prompt of any
    length is accepted. Applies to the server and AsyncLLM. Default: no limit."""

    gpu_memory_utilization: float = 0.9
    """Fraction of the accelerator's memory that the engine may use, weights included. Ignored on CPU."""

    kv_cache_memory_bytes: int | None = None
    """Bytes for the KV cache. Default: the free memory of an accelerator; at most 1 GiB on CPU."""

    tensor_parallel_size: int = 1
    """Number of devices that share each layer's heads and feed-forward networks, and the vocabulary. Sizes that it does
    not divide are padded. With 2 devices, each has half of the weights and of the KV cache."""

    pipeline_parallel_size: int = 1
    """Number of stages that the layers are divided into, each with its own tensor_parallel_size devices. One step per
    stage is in flight, each with some of the requests, so that all stages work at the same time. If the layers do not
    divide evenly, the first stages have one layer more."""

    prefill_context_parallel_size: int = 1
    """Number of devices that the tokens of a prompt are spread over (context parallelism). Weights and KV cache are
    replicated on them, so long prompts become faster, and no memory is saved. The engine has this number times
    tensor_parallel_size devices."""

    enable_expert_parallel: bool = False
    """Give each device some of the experts of a mixture of experts, instead of a part of every expert."""

    data_parallel_size: int = 1
    """Number of engines in this process, with one front end. Each has its own devices, KV cache and scheduler.
    kv_cache_memory_bytes, swap_space, max_num_seqs and the limits of the queue apply to each engine. On CPU, engines
    share a device and the weights if there are too few devices."""

    data_parallel_routing: str = "prefix_affine"
    """Rule that chooses the engine of a request. prefix_affine: an engine that has computed a prefix of the prompt,
    unless it has more than 1.25 times the mean number of requests plus one. least_loaded: the engine with the fewest
    requests. round_robin: engines in turn."""

    prefill_engines: int = 0
    """With data_parallel_size: number of engines, the first ones, that only compute prompts. They hand the KV of a
    prompt over to another engine, which generates the answer. Long prompts then delay no token of other requests. For
    the server and AsyncLLM."""

    kv_handover: bool = False
    """Compile the programs of LLM.take_kv and LLM.put_kv, which hand the KV of prompts over to another engine, even in
    another process. prefill_engines does not need this option."""

    deterministic: bool = False
    """Compute results whose bits do not depend on tensor_parallel_size (1, 2, 4 or 8). On CPU, in float32. On NVIDIA
    GPUs, in bfloat16, bits do not depend on the batch, chunks, the prefix cache or preemption either; for dense models
    with RMS norms. Each matmul with split inputs is computed as 8 matmuls that are added in a fixed order, and KV heads
    are padded to a multiple of 8."""

    nnodes: int = 1
    """Number of processes, on one or several machines, that run the engine together. Each brings its devices; start all
    with the same options, and each with its own node_rank."""

    node_rank: int = 0
    """Number of this process, from 0. Process 0 schedules and serves; the others are started with --headless."""

    master_addr: str = "127.0.0.1"
    """Address at which the other processes reach process 0."""

    master_port: int = 29501
    """Port of process 0 for JAX's distributed runtime. The port after it carries the plans of the steps."""

    join_timeout: float = 300.0
    """Seconds to wait for the other processes at the start."""

    attention_implementation: str | None = None
    """Implementation of attention. cpu: native kernel for CPUs. triton, triton_small, mosaic_prefill, mosaic_gpu:
    kernels for NVIDIA. triton_fixed: for NVIDIA, with deterministic. mosaic_tpu: kernel for TPUs. xla, xla_loop,
    reference: XLA operations, slower, on any device. Default: the fastest one that works on the device."""

    gated_dot_implementation: str | None = None
    """Implementation of the gate and up matmuls and their activation. triton: one kernel, for NVIDIA. triton_fixed: the
    same, with one tile for every number of rows. xla: a matmul, then the activation. reference: XLA operations.
    Default: the one measured as fastest on this GPU, else xla."""

    fused_layers: bool | None = None
    """Compute a layer of a decode step with few kernels, for NVIDIA: matmuls that return partial sums, and sums with
    residual and norm. For dense models in bf16 or float16 with RMS norms. Default: on GPUs, if a layer has at most 32
    MiB of weights."""

    mask_unknown_tokens: bool = True
    """Never sample token ids that the tokenizer does not have."""

    trust_remote_code: bool = False
    """Accepted for compatibility with vLLM. Code from a checkpoint is never run, so a model that needs it fails."""

    disable_log_stats: bool = False
    """Collect no distributions of times and tokens. The server then logs no metrics, and /metrics shows only metrics of
    the process and of HTTP requests."""

    max_logprobs: int = 20
    """Maximum number of log-probabilities per token that a request may ask for. A step that returns any computes this
    many, so large numbers are slow. -1: the size of the vocabulary."""

    logprobs_mode: str = "raw_logprobs"
    """Values that `logprobs` returns. raw_logprobs: log-probabilities of the model's own distribution.
    processed_logprobs: log-probabilities after temperature, penalties and filters. raw_logits, processed_logits: the
    same before normalisation."""

    return_sampling_mask: bool = False
    """Requests may have the ids from which each token was drawn, after all filters (`sampling_mask` of an answer).
    Steps of such requests then download one bit for each id of the vocabulary and row."""

    enable_return_routed_experts: bool = False
    """Answers have the experts to which each layer's router sent each token (`routed_experts`). Every step then
    downloads them. Only for models with experts, and without pipeline parallelism."""

    max_grammar_bytes: int = 65536
    """Maximum size of a request's JSON schema, grammar or list of choices, in bytes."""

    max_grammar_depth: int = 32
    """Maximum nesting depth of a request's JSON schema."""

    max_grammar_enum: int = 10_000
    """Maximum number of values of one enum in a request's JSON schema, and of a request's choices."""

    max_regex_bytes: int = 4096
    """Maximum size of one regular expression in a request, in bytes."""

    grammar_compile_timeout: float = 5.0
    """Seconds after which a grammar that is still compiling is refused. Other requests run meanwhile."""

    jump_forward: bool = True
    """Append tokens that a grammar forces without sampling them. On CPU, where a step's cost grows with its tokens,
    this applies only to runs of forced tokens longer than the number of running requests. Outputs do not change."""

    stream_interval: int = 1
    """Number of new tokens per output of a stream, for requests that do not say. The first and the last token are sent
    at once. More than 1 takes less processor time."""

    grammar_cache_size: int = 64
    """Number of compiled grammars kept in memory for later requests with the same grammar."""

    enable_lora: bool = False
    """Accept requests with LoRA adapters. Each step may have requests of any mix of adapters."""

    max_loras: int = 8
    """Number of LoRA adapters that are on the device at a time, and so in one step. Requests of further adapters wait
    until one of these has no running request. Each takes device memory for max_lora_rank."""

    max_lora_rank: int = 16
    """Largest rank of a LoRA adapter. Smaller ranks read less memory in a step."""

    max_cpu_loras: int | None = None
    """Number of LoRA adapters that are kept in host memory, at least max_loras. Others are read again from their
    folders when they are needed. Default: the larger of 16 and twice max_loras."""

    lora_dtype: str = "auto"
    """Type of LoRA adapters on the device: auto, bfloat16, float16, float32. auto is the checkpoint's type, even if the
    weights are float32, as on CPU."""

    speculative_config: SpeculationConfig | None = None
    """Speculative decoding, as a JSON object with vLLM's keys, such as {"method": "ngram", "num_speculative_tokens":
    5}. Methods: ngram, suffix, draft_model, eagle3, mtp, custom. Answers do not change; docs/speculative_decoding.md
    describes the keys. Default: off."""

    compilation_cache_dir: str | None = None
    """Folder of compiled programs, kept between starts. Default: a folder in the platform's cache folder."""

    row_buckets: tuple[int, ...] | None = None
    """Batch sizes that decode programs are compiled for. Default: powers of two up to max_num_seqs."""

    token_buckets: tuple[int, ...] | None = None
    """Token counts that programs with prompt tokens are compiled for. Default: powers of two up to
    max_num_batched_tokens."""

    @property
    def adapters_in_host_memory(self) -> int:
        """Maximum number of LoRA adapters that are kept in host memory."""
        return max(16, 2 * self.max_loras) if self.max_cpu_loras is None else self.max_cpu_loras

    @property
    def devices_per_engine(self) -> int:
        """Number of devices that one engine runs on, in all processes together."""
        return self.pipeline_parallel_size * self.tensor_parallel_size * self.prefill_context_parallel_size
