"""Metrics of an engine since its start, as plain data: distributions, counts and times.

`jpaged/engine/observe/engine_metrics.py` fills them. `jpaged/metric_families.py` names them. Histograms have the same
bounds as vLLM's, so that dashboards and alerts written for vLLM keep working.
"""

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping
from typing import Self

from jpaged.outputs import EngineStats, WeightVersion

FINISH_REASONS = ("stop", "length", "repetition", "abort", "error")

TTFT_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
STEP_TOKENS_BOUNDS = (1, 8, *(1 << power for power in range(4, 15)))
N_BOUNDS = (1, 2, 5, 10, 20)
PREEMPTION_BOUNDS = (1, 2, 3, 4, 5, 10, 20)
UPDATE_BOUNDS = (0.001, 0.01, 0.1, 1, 10, 30, 60, 120, 300, 600)
STEP_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


def token_count_bounds(largest: int) -> tuple[int, ...]:
    """Bounds 1, 2, 5, 10, 20, 50, ... up to `largest`, as vLLM has them for token counts."""
    bounds, unit = [], 1
    while unit <= largest:
        bounds += [unit * digit for digit in (1, 2, 5) if unit * digit <= largest]
        unit *= 10
    return tuple(bounds)


class Histogram:
    """Counts of observations by size, without a lock. One thread writes; any thread may call `copy`."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]):
        """bounds: inclusive upper bounds of the buckets, rising. A last bucket counts all larger values."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def copy(self) -> Self:
        """Return a copy that does not change. During a step, it may lack that step's values."""
        copy = type(self)(self.bounds)
        copy.counts, copy.sum = self.counts.copy(), self.sum
        return copy

    def reset(self) -> None:
        """Forget all observations."""
        self.counts, self.sum = [0] * len(self.counts), 0.0


@dataclasses.dataclass(slots=True)
class RequestHistograms:
    """Distributions over requests and tokens. Times are in seconds.

    A request is one prompt of an API call. Its times run from the first event of any of its answers to the last event.
    """

    time_to_first_token: Histogram    # per request: arrival to the first token
    # Per token but an answer's first: time since the token before it. Tokens of one step count once, as in vLLM.
    inter_token_latency: Histogram
    time_per_output_token: Histogram  # per request: decode_time, divided by the tokens after the first
    e2e_latency: Histogram            # per request: arrival to end
    queue_time: Histogram             # per request: arrival to the first step
    prefill_time: Histogram           # per request: first step to first token
    decode_time: Histogram            # per request: first token to last token
    inference_time: Histogram         # per request: first step to last token
    prompt_tokens: Histogram          # per request
    prefill_computed_tokens: Histogram  # per request: prompt tokens that the prefix cache did not have
    generation_tokens: Histogram      # per answer
    max_generation_tokens: Histogram  # per request: tokens of its longest answer
    params_n: Histogram               # per request: the parameter n
    params_max_tokens: Histogram      # per request: the parameter max_tokens, if it is set
    num_preemptions: Histogram        # per request

    @classmethod
    def empty(cls, max_model_len: int) -> Self:
        """Return histograms without observations. max_model_len: upper bound for numbers of tokens."""
        tokens = token_count_bounds(max_model_len)
        return cls(
            time_to_first_token=Histogram(TTFT_BOUNDS),
            inter_token_latency=Histogram(TOKEN_BOUNDS),
            time_per_output_token=Histogram(TOKEN_BOUNDS),
            **{name: Histogram(REQUEST_BOUNDS) for name in _REQUEST_TIMES},
            **{name: Histogram(tokens) for name in _TOKEN_COUNTS},
            params_n=Histogram(N_BOUNDS),
            num_preemptions=Histogram(PREEMPTION_BOUNDS),
        )

    def copy(self) -> Self:
        """Return copies that do not change."""
        return type(self)(**{field.name: getattr(self, field.name).copy() for field in dataclasses.fields(self)})

    def reset(self) -> None:
        """Forget all observations."""
        for field in dataclasses.fields(self):
            getattr(self, field.name).reset()


_REQUEST_TIMES = ("e2e_latency", "queue_time", "prefill_time", "decode_time", "inference_time")
_TOKEN_COUNTS = (
    "prompt_tokens", "prefill_computed_tokens", "generation_tokens", "max_generation_tokens", "params_max_tokens",
)  # fmt: skip


@dataclasses.dataclass(slots=True)
class PhaseSeconds:
    """Seconds that the engine's thread has spent in each phase of its steps."""

    schedule: float = 0.0  # choosing requests, allocating blocks, building the plan
    dispatch: float = 0.0  # packing the plan and starting the programs
    collect: float = 0.0   # waiting for the device
    output: float = 0.0    # appending tokens, text, checks for ends, outputs, late masks


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramMetrics:
    """Compiled programs of a runner."""

    ready: int               # programs that exist
    missing: int             # programs that are still compiled in the background
    seconds: float           # to trace and compile the programs that exist, or to read them; summed over programs
    cache_hits: int = 0      # programs that this process found in JAX's compile cache
    cache_misses: int = 0    # programs that this process compiled


@dataclasses.dataclass(frozen=True, slots=True)
class SharingMetrics:
    """Blocks of the KV pool that are in several block tables now."""

    shared_blocks: int  # blocks in more than one block table
    saved_blocks: int   # additional blocks that would be used without sharing


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterMetrics:
    """LoRA adapters now."""

    slots: int                  # adapters that are on the device at a time
    running: tuple[str, ...]    # names of the adapters of running requests
    waiting: tuple[str, ...]    # names of the adapters that wait for a slot


@dataclasses.dataclass(frozen=True, slots=True)
class EngineMetricsSnapshot:
    """All metrics of an engine at one moment."""

    stats: EngineStats
    requests: RequestHistograms
    finished: Mapping[str, int]         # answers that have ended, by finish reason
    step_tokens: Histogram              # tokens that a step computes
    step_seconds: Mapping[str, Histogram]  # time of a step on the device, by kind of step
    phases: PhaseSeconds
    programs: ProgramMetrics
    sharing: SharingMetrics
    kv_waste: float                     # fraction of empty slots in the running requests' blocks, now
    corrupted_requests: int             # requests that ended because their logits were not finite
    rejected_requests: int              # requests refused because of max_queued_requests
    rejected_tokens: int                # requests refused because of max_queued_tokens
    enable_prefix_caching: bool
    kv_tokens: int                      # capacity of the KV pool in tokens, for requests of max_model_len
    max_model_len: int
    asleep: frozenset[str]              # parts that `sleep` has freed: "weights", "kv_cache"; empty if awake
    has_weights: bool                   # False: `sleep` has discarded them, or their owner has deleted them
    weight_version: WeightVersion
    update_seconds: Histogram           # per update of the weights: time during which no step ran
    adapters: AdapterMetrics | None = None  # None without enable_lora
    prefix_hit_requests: int = 0        # ended requests that found a part of their prompt in the prefix cache
