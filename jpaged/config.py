"""What an engine can be told. One frozen dataclass; the docstring under a field is its help text.

Names are vLLM's where vLLM has one. The command line flags are made from these fields.
"""

import dataclasses

DTYPES = ("auto", "bfloat16", "float16", "float32")
RUNNERS = ("auto", "generate", "pooling")
SCHEDULING_POLICIES = ("fcfs", "priority", "shortest_first")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine. `None` means: decided at start from the model and the device, and logged."""

    model: str
    """Folder, Hugging Face hub id, or .gguf file of a checkpoint; `demo` is the small model that ships with jpaged."""

    tokenizer: str | None = None
    """Folder, hub id or .gguf file of the tokenizer; the model's own by default."""

    revision: str | None = None
    """Branch, tag or commit of a hub id."""

    dtype: str = "auto"
    """auto, bfloat16, float16 or float32. auto takes the checkpoint's (float32 on CPU with JAX 0.10)."""

    seed: int = 0
    """Seeds the engine's own draws: the seeds of requests that bring none."""

    runner: str = "auto"
    """generate; or pooling: the model's last hidden state instead of new tokens, to embed or classify with. auto pools
    with sequence classifiers and generates with all other models."""

    max_model_len: int | None = None
    """Most tokens of one request, prompt and output together. Default: the model's own, or less if memory is short."""

    max_num_seqs: int | None = None
    """Most requests that run at once (rows of the request table). Default 32 on CPU, 256 elsewhere."""

    max_num_batched_tokens: int | None = None
    """Most tokens computed in one step; longer prompts advance in chunks. Default 512 on CPU, 2048 elsewhere."""

    block_size: int | None = None
    """Tokens in one block of the KV cache: a power of two from 8 to 128. Default 16, on TPU 64."""

    enable_prefix_caching: bool = True
    """Keep the KV of finished prompts and reuse it for requests that begin alike."""

    swap_space: float = 0.0
    """GiB of host memory for KV that the device has no room for: of preempted requests, and of prompts that may come
    again. It comes back where that takes less time than computing it."""

    scheduling_policy: str = "fcfs"
    """Who starts first. fcfs: who came first. priority: the lowest `priority`; 60 s of waiting count as one.
    shortest_first: who may generate the fewest tokens, by max_tokens; a second of waiting counts as 20 tokens."""

    max_num_partial_prefills: int = 1
    """Prompts too long for one step that are under way at once."""

    target_step_ms: float | None = None
    """Milliseconds that a step should take at most: prompts advance in smaller chunks where decodes would wait longer.
    Default: as many prompt tokens as max_num_batched_tokens allows."""

    max_queued_requests: int | None = None
    """Most requests that may wait because the engine is full; one more is refused (HTTP 503). Of the server and of
    AsyncLLM: LLM takes all prompts of a call, however many. Default: no limit."""

    max_queued_tokens: int | None = None
    """Most prompt tokens of requests that wait; one that finds nobody waiting is taken whatever its length. Otherwise
    as max_queued_requests. Default: no limit."""

    gpu_memory_utilization: float = 0.9
    """Share of the accelerator's memory that the engine may take, all in all. No meaning on CPU."""

    kv_cache_memory_bytes: int | None = None
    """Bytes for the KV cache. Default: what is free on an accelerator; at most 1 GiB on CPU."""

    attention_implementation: str | None = None
    """Attention implementation, by the kernel package's name; chosen by platform and shape by default."""

    mask_unknown_tokens: bool = True
    """Never sample ids that the tokenizer does not have."""

    trust_remote_code: bool = False
    """Accepted for models that need no code of their own; code from a checkpoint is never run."""

    max_logprobs: int = 20
    """Most log-probabilities a request may ask for, per token."""

    logprobs_mode: str = "raw_logprobs"
    """What log-probabilities are of. raw_logprobs: the model's own distribution. processed_logprobs: what was sampled
    from, after temperature, penalties and filters. raw_logits, processed_logits: the same, not normalised."""

    max_grammar_bytes: int = 65536
    """Most bytes of a JSON schema, a grammar or a list of choices that a request brings."""

    max_grammar_depth: int = 32
    """Most schemas one inside the other in a JSON schema that a request brings."""

    max_grammar_enum: int = 10_000
    """Most values of one enum, and most choices, that a request brings."""

    max_regex_bytes: int = 4096
    """Most bytes of one regular expression that a request brings."""

    grammar_compile_timeout: float = 5.0
    """Seconds after which a grammar that does not compile is refused. Others go on meanwhile."""

    jump_forward: bool = True
    """Take tokens that a grammar forces without sampling them; on CPU, where a step costs what it computes, only
    stretches longer than there are requests running. The answer is the same either way."""

    grammar_cache_size: int = 64
    """Compiled grammars that are kept in memory for requests that ask for the same."""

    compilation_cache_dir: str | None = None
    """Folder of compiled programs, kept between starts. Default: the platform's cache folder."""

    row_buckets: tuple[int, ...] | None = None
    """Row counts that decode programs are compiled for. Default: powers of two up to max_num_seqs."""

    token_buckets: tuple[int, ...] | None = None
    """Token counts that mixed programs are compiled for. Default: powers of two up to max_num_batched_tokens."""
