"""An engine's named metrics: vLLM's names, and further metrics with the prefix `jpaged:`.

`get_metrics` returns them as a list, like vLLM's `LLM.get_metrics`. `serving/admin/metrics.py` writes Prometheus text.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jpaged import metrics
from jpaged.metrics import EngineMetricsSnapshot
from jpaged.version import __version__


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """A metric with its labels. Metrics of the same name have different labels.

    name: as in vLLM's `LLM.get_metrics`. A counter's name has no suffix `_total`; `/metrics` adds it.
    """

    name: str
    labels: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A value that only grows, until `reset_stats`: an integer, or a float in seconds."""

    value: int | float


@dataclasses.dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Counters of `vllm:spec_decode_num_accepted_tokens_per_pos`, one for each position of a draft."""

    values: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A current value."""

    value: float


@dataclasses.dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """Observations by size. `count` is their number, and `sum` the sum of their values.

    buckets: number of observations up to each bound. The keys are the bounds as text, the last of them '+Inf'.
    """

    count: int
    sum: float
    buckets: dict[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class MetricFamily:
    """All metrics of one name, at least one. They have the same class and label names. text: one line of help."""

    name: str
    text: str
    metrics: tuple[Counter, ...] | tuple[Gauge, ...] | tuple[Histogram, ...]


POSITION = "position"  # label: index in a row's drafts

# vLLM's histograms: field of `RequestHistograms`, name, help.
REQUEST_HISTOGRAMS = (
    ("time_to_first_token", "vllm:time_to_first_token_seconds", "Time from a request's arrival to its first token."),
    ("inter_token_latency", "vllm:inter_token_latency_seconds", "Time between two tokens of an answer."),
    (
        "time_per_output_token", "vllm:request_time_per_output_token_seconds",
        "Mean time between the tokens of a request's longest answer.",
    ),
    ("e2e_latency", "vllm:e2e_request_latency_seconds", "Time from a request's arrival to its end."),
    ("queue_time", "vllm:request_queue_time_seconds", "Time from a request's arrival to its first step."),
    ("prefill_time", "vllm:request_prefill_time_seconds", "Time from a request's first step to its first token."),
    ("decode_time", "vllm:request_decode_time_seconds", "Time from a request's first token to its last one."),
    ("inference_time", "vllm:request_inference_time_seconds", "Time from a request's first step to its last token."),
    ("prompt_tokens", "vllm:request_prompt_tokens", "Prompt tokens of a request."),
    (
        "prefill_computed_tokens", "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens of a request that the prefix cache did not have.",
    ),
    ("generation_tokens", "vllm:request_generation_tokens", "Tokens of an answer."),
    (
        "max_generation_tokens", "vllm:request_max_num_generation_tokens", "Tokens of the longest answer of a request.",
    ),
    ("params_n", "vllm:request_params_n", "The parameter n of a request."),
    ("params_max_tokens", "vllm:request_params_max_tokens", "The parameter max_tokens of a request that sets it."),
    ("num_preemptions", "vllm:request_num_preemptions", "Times that a request was preempted."),
)  # fmt: skip


class _Families:
    """Makes the families of one engine. Its metrics have the labels `model_name` and `engine`."""

    def __init__(self, model_name: str, engine: int):
        self._labels = {"model_name": model_name, "engine": str(engine)}

    def all(self, snapshot: EngineMetricsSnapshot) -> Iterator[MetricFamily]:
        """Yield all families."""
        yield from self._vllm_gauges(snapshot)
        yield from self._vllm_counters(snapshot)
        yield from self._request_histograms(snapshot)
        yield from self._speculation_families(snapshot)
        yield from self._adapter_families(snapshot)
        yield from self._cache_families(snapshot)
        yield from self._step_families(snapshot)
        yield from self._program_families(snapshot)
        yield from self._update_families(snapshot)

    def _vllm_gauges(self, snapshot: EngineMetricsSnapshot) -> Iterator[MetricFamily]:
        stats = snapshot.stats
        yield self._gauge("vllm:num_requests_running", "Requests that own a row.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for a row.", stats.num_waiting)
        deferred = stats.num_waiting_for_adapters
        by_reason = {"capacity": stats.num_waiting - deferred, "deferred": deferred}
        yield self._gauges("vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", "reason", by_reason)
        usage = stats.used_blocks / stats.num_blocks
        yield self._gauge("vllm:kv_cache_usage_perc", "Fraction of KV blocks that requests hold; 1 is all.", usage)
        info = {
            "engine": self._labels["engine"],
            "block_size": str(stats.block_size), "num_gpu_blocks": str(stats.num_blocks),
            "num_cpu_blocks": str(stats.host_slots), "enable_prefix_caching": str(snapshot.enable_prefix_caching),
            "kv_cache_size_tokens": str(snapshot.kv_tokens),
            "kv_cache_max_concurrency": str(snapshot.kv_tokens / snapshot.max_model_len),
        }  # fmt: skip
        yield _info("vllm:cache_config_info", "Sizes of the KV cache, as labels.", info)
        asleep = snapshot.asleep
        kept = snapshot.has_weights
        states = {
            "awake": not asleep and kept, "weights_offloaded": "weights" in asleep and kept, "discard_all": not kept
        }
        yield self._gauges(
            "vllm:engine_sleep_state", "1 for the state of the engine; awake 0: it sleeps, or has no weights.",
            "sleep_state", states,
        )  # fmt: skip

    def _vllm_counters(self, snapshot: EngineMetricsSnapshot) -> Iterator[MetricFamily]:
        stats = snapshot.stats
        cached, computed = stats.prefix_hit_tokens, stats.prompt_tokens - stats.prefix_hit_tokens
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of started requests.", stats.prompt_tokens)
        sources = {"local_compute": computed, "local_cache_hit": cached}
        yield self._counters("vllm:prompt_tokens_by_source", "Prompt tokens by source.", "source", sources)
        yield self._counter("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.", cached)
        yield self._counter("vllm:generation_tokens", "Tokens sampled and kept.", stats.generated_tokens)
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prompt_tokens
        )
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", cached)
        yield self._counter("vllm:num_preemptions", "Times that a running request lost its blocks.", stats.preemptions)
        yield self._counters(
            "vllm:request_success", "Answers that ended, by finish reason.", "finished_reason", snapshot.finished
        )
        yield self._counter(
            "vllm:corrupted_requests", "Requests that ended because their logits were not finite.",
            snapshot.corrupted_requests,
        )  # fmt: skip
        rejections = {"max_queued_requests": snapshot.rejected_requests, "max_queued_tokens": snapshot.rejected_tokens}
        yield self._counters(
            "vllm:admission_rejections", "Requests refused by a limit of the queue.", "reason", rejections
        )

    def _request_histograms(self, snapshot: EngineMetricsSnapshot) -> Iterator[MetricFamily]:
        for field, name, text in REQUEST_HISTOGRAMS:
            yield self._histogram(name, text, getattr(snapshot.requests, field))
        yield self._histogram("vllm:iteration_tokens_total", "Tokens that a step computes.", snapshot.step_tokens)

    def _speculation_families(self, snapshot: EngineMetricsSnapshot) -> Iterator[MetricFamily]:
        """Yield nothing for an engine that does not speculate."""
        stats = snapshot.stats.speculation
        if stats is None:
            return
        yield self._counter("vllm:spec_decode_num_drafts", "Rows with drafts, summed over steps.", stats.drafts)
        yield self._counter(
            "vllm:spec_decode_num_draft_tokens", "Drafts that steps have checked.", stats.draft_tokens
        )
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafts that became tokens.", stats.accepted_tokens
        )
        by_position = {str(position): count for position, count in enumerate(stats.accepted_per_position)}
        yield self._counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts that became tokens, by position in a row's drafts.",
            POSITION, by_position,
        )  # fmt: skip
        yield self._gauge(
            "jpaged:spec_decode_drafts_per_row", "Chosen number of drafts per decode, mean over the last steps.",
            stats.drafts_per_row,
        )  # fmt: skip

    def _adapter_families(self, snapshot: EngineMetricsSnapshot) -> Iterator[MetricFamily]:
        adapters = snapshot.adapters
        if adapters is None:
            return
        labels = {
            "max_lora": str(adapters.slots), "waiting_lora_adapters": ",".join(adapters.waiting),
            "running_lora_adapters": ",".join(adapters.running),
        }  # fmt: skip
        now = Gauge("vllm:lora_requests_info", labels, time.time())
        yield MetricFamily(now.name, "LoRA adapters of requests, as labels. The value is the time.", (now,))
        yield self._counter(
            "jpaged:lora_loads", "LoRA adapters written into slots of the device.", snapshot.stats.adapter_loads
        )

    def _cache_families(self, snapshot: EngineMetricsSnapshot) -> Iterator[MetricFamily]:
        stats, sharing = snapshot.stats, snapshot.sharing
        blocks = {"used": stats.used_blocks, "free": stats.num_blocks - stats.used_blocks}
        yield self._gauges("jpaged:kv_blocks", "Blocks of the KV pool.", "state", blocks)
        yield self._gauge("jpaged:kv_blocks_shared", "Blocks in several block tables.", sharing.shared_blocks)
        yield self._gauge("jpaged:kv_blocks_saved", "Blocks that sharing saves.", sharing.saved_blocks)
        yield self._gauge(
            "jpaged:kv_waste_ratio", "Fraction of empty slots in the running requests' blocks.", snapshot.kv_waste
        )
        yield self._counter("jpaged:kv_blocks_copied", "Shared blocks copied before a write.", stats.copied_blocks)
        slots = {"used": stats.used_host_slots, "free": stats.free_host_slots}
        yield self._gauges("jpaged:host_tier_blocks", "Blocks of the host tier.", "state", slots)
        moves = {"to_host": stats.blocks_to_host, "to_device": stats.blocks_to_device}
        yield self._counters("jpaged:host_tier_moves", "Blocks copied to and from the host tier.", "direction", moves)
        text = "Snapshots of recurrent state in the host tier."
        yield self._gauge("jpaged:host_tier_snapshots", text, stats.used_host_snapshots)
        moves = {"to_host": stats.snapshots_to_host, "to_device": stats.snapshots_to_device}
        text = "Snapshots of recurrent state copied to and from the host tier."
        yield self._counters("jpaged:host_tier_snapshot_moves", text, "direction", moves)
        yield self._counter(
            "jpaged:prefix_hit_requests", "Ended requests that found a part of their prompt in the prefix cache.",
            snapshot.prefix_hit_requests,
        )  # fmt: skip
        yield self._counter(
            "jpaged:preemption_recomputed_tokens", "Tokens computed again after a preemption.", stats.recomputed_tokens
        )

    def _step_families(self, snapshot: EngineMetricsSnapshot) -> Iterator[MetricFamily]:
        yield self._counter("jpaged:steps", "Steps dispatched.", snapshot.stats.steps)
        yield self._counter(
            "jpaged:pipeline_empty_turns", "Turns of the pipeline stages without a step.", snapshot.stats.empty_turns
        )
        pairs = {"all": snapshot.stats.expert_pairs, "busiest": snapshot.stats.busiest_expert_pairs}
        yield self._counters(
            "jpaged:expert_pairs", "Pairs of a token and an expert, on all devices and on each layer's busiest one.",
            "devices", pairs,
        )  # fmt: skip
        phases = snapshot.phases
        seconds = {
            "schedule": phases.schedule, "dispatch": phases.dispatch, "collect": phases.collect,
            "output": phases.output,
        }  # fmt: skip
        yield self._counters(
            "jpaged:step_phase_seconds", "Time of the engine's thread, by phase of its steps.", "phase", seconds
        )
        yield self._histograms(
            "jpaged:step_seconds", "Time of a step on the device, by kind.", "kind", snapshot.step_seconds
        )

    def _program_families(self, snapshot: EngineMetricsSnapshot) -> Iterator[MetricFamily]:
        programs = snapshot.programs
        yield self._counter(
            "jpaged:recompiles_after_ready", "Programs compiled after the engine was ready: not 0 is a bug.",
            snapshot.stats.compiles_after_ready,
        )  # fmt: skip
        states = {"ready": programs.ready, "missing": programs.missing}
        yield self._gauges("jpaged:programs", "Programs of the program table.", "state", states)
        yield self._gauge(
            "jpaged:program_build_seconds", "Time to compile or read all programs that exist.", programs.seconds
        )
        yield self._counter("jpaged:program_cache_hits", "Programs found in the compile cache.", programs.cache_hits)
        yield self._counter("jpaged:program_cache_misses", "Programs compiled.", programs.cache_misses)
        yield _info("jpaged:build_info", "jpaged's version, as a label.", {"version": __version__})

    def _update_families(self, snapshot: EngineMetricsSnapshot) -> Iterator[MetricFamily]:
        yield self._histograms(
            "vllm:rl_weight_update_operation_duration_seconds", "Time of an update of the weights, without steps.",
            "operation", {"update": snapshot.update_seconds},
        )  # fmt: skip
        version = {str(snapshot.weight_version): 1}
        yield self._gauges("jpaged:weight_version_info", "Version of the weights, as a label.", "version", version)

    def _gauge(self, name: str, text: str, value: float) -> MetricFamily:
        return MetricFamily(name, text, (Gauge(name, self._labels, value),))

    def _counter(self, name: str, text: str, value: float) -> MetricFamily:
        return MetricFamily(name, text, (Counter(name, self._labels, value),))

    def _gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> MetricFamily:
        made = (Gauge(name, {**self._labels, label: each}, value) for each, value in values.items())
        return MetricFamily(name, text, tuple(made))

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> MetricFamily:
        made = (Counter(name, {**self._labels, label: each}, value) for each, value in values.items())
        return MetricFamily(name, text, tuple(made))

    def _histogram(self, name: str, text: str, values: metrics.Histogram) -> MetricFamily:
        return MetricFamily(name, text, (histogram_metric(name, self._labels, values),))

    def _histograms(
        self, name: str, text: str, label: str, values: Mapping[str, metrics.Histogram]
    ) -> MetricFamily:
        made = (histogram_metric(name, {**self._labels, label: each}, value) for each, value in values.items())
        return MetricFamily(name, text, tuple(made))


def histogram_metric(name: str, labels: dict[str, str], values: metrics.Histogram) -> Histogram:
    """The metric of a distribution, with cumulated buckets."""
    bounds = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
    buckets = dict(zip(bounds, itertools.accumulate(values.counts), strict=True))
    return Histogram(name, labels, buckets["+Inf"], values.sum, buckets)


def _info(name: str, text: str, labels: dict[str, str]) -> MetricFamily:
    """Return a family that has its information in the labels. Its value is always 1."""
    return MetricFamily(name, text, (Gauge(name, labels, 1),))


def metrics_of(families: Iterable[MetricFamily]) -> list[Metric]:
    """Return the metrics of families, as vLLM's `LLM.get_metrics`: counters by position become a `Vector`."""
    made: list[Metric] = []
    for family in families:
        if POSITION not in family.metrics[0].labels:
            made += family.metrics
            continue
        vectors: dict[tuple[tuple[str, str], ...], Vector] = {}
        for metric in family.metrics:
            assert isinstance(metric, Counter)
            labels = {name: value for name, value in metric.labels.items() if name != POSITION}
            vector = vectors.setdefault(tuple(labels.items()), Vector(family.name, labels, []))
            vector.values.append(int(metric.value))
        made += vectors.values()
    return made


def families_of(snapshots: Sequence[EngineMetricsSnapshot], model_name: str) -> Iterator[MetricFamily]:
    """Yield all metrics of engines. Their labels are `engine`, the engine's index, and `model_name`."""
    each = [_Families(model_name, engine).all(of_engine) for engine, of_engine in enumerate(snapshots)]
    if len(each) == 1:
        yield from each[0]
        return
    for families in zip(*each, strict=True):
        # A metric without the label `engine` is the same for all engines.
        metrics = {tuple(metric.labels.items()): metric for family in families for metric in family.metrics}
        yield dataclasses.replace(families[0], metrics=tuple(metrics.values()))
