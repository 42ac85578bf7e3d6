"""Collects the histograms that `/metrics` shows.

The engine's thread reports each step and each request here. Rows that got their last token in the same step are
observed together (`benchmarks/host_overhead.py` has the cost).
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jpaged.engine.observe.engine_stats import EngineCounters, collect_stats
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.step_plan import Runner, StepPlan
from jpaged.metrics import (
    FINISH_REASONS,
    STEP_BOUNDS,
    STEP_TOKENS_BOUNDS,
    UPDATE_BOUNDS,
    AdapterMetrics,
    EngineMetricsSnapshot,
    Histogram,
    PhaseSeconds,
    RequestHistograms,
)
from jpaged.outputs import WeightVersion

if TYPE_CHECKING:
    from jpaged.engine.request import Request
    from jpaged.engine.request_group import RequestGroup

DECODE, PREFILL, MIXED = STEP_KINDS = ("decode", "prefill", "mixed")
VERIFY = "verify"  # a step of decodes with drafts; only an engine that speculates has this kind


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerEnd:
    """End of one answer."""

    finish_reason: str
    num_tokens: int | None  # generated tokens; None if the model pools


class EngineMetrics:
    """Histograms since the start or the last reset. The engine's thread writes; any thread may take a snapshot."""

    def __init__(self, max_model_len: int, phases: PhaseSeconds, *, speculates: bool = False):
        """max_model_len: upper bound for numbers of tokens. phases: the engine and its pipeline add to it."""
        self._phases = phases
        self._requests = RequestHistograms.empty(max_model_len)
        self._finished = dict.fromkeys(FINISH_REASONS, 0)
        self._step_tokens = Histogram(STEP_TOKENS_BOUNDS)
        self._taken: list[Request] = []  # requests of the last step that had tokens
        self._taken_time = 0.0           # when these tokens arrived
        kinds = (*STEP_KINDS, VERIFY) if speculates else STEP_KINDS
        self._step_seconds = {kind: Histogram(STEP_BOUNDS) for kind in kinds}
        self._prefix_hit_requests = 0
        self._update_seconds = Histogram(UPDATE_BOUNDS)

    def note_update(self, seconds: float) -> None:
        """Count an update of the weights. seconds: during which no step ran."""
        self._update_seconds.observe(seconds)

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Count a collected step. seconds: its time on the device."""
        num_prompt, total = len(plan.prompt_tokens), plan.total_tokens
        kind = DECODE if not num_prompt else MIXED if plan.num_decodes else PREFILL
        if total > plan.num_decodes + num_prompt:
            kind = VERIFY
        self._step_tokens.observe(total)
        self._step_seconds[kind].observe(seconds)

    def note_tokens(self, now: float, requests: list["Request"]) -> None:
        """Count a step's tokens, one for each of these requests. now: their arrival, in seconds of `time.monotonic()`.

        Sets `last_token_time` of these requests only when a later step has other requests.
        """
        latency, before_all = self._requests.inter_token_latency, self._taken_time
        self._taken_time = now
        if requests == self._taken:  # all rows decode: this costs 10 ns per row
            if requests:
                latency.observe(now - before_all, len(requests))
            return
        for request in self._taken:
            request.output.last_token_time = before_all
        self._taken = requests
        previous = [request.output.last_token_time for request in requests]
        for before, count in Counter(previous).items():
            if before:
                latency.observe(now - before, count)
        for request, before in zip(requests, previous, strict=True):
            if not before and request.index == 0:  # the first answer of a request begins first
                self._requests.time_to_first_token.observe(now - request.metrics.arrival_time)

    def note_end(self, request_group: "RequestGroup", ends: Sequence[AnswerEnd]) -> None:
        """Count a request group that has ended. ends: of its answers."""
        metrics, params, to = request_group.metrics, request_group.params, self._requests
        for end in ends:
            self._finished[end.finish_reason] += 1
        lengths = [end.num_tokens for end in ends if end.num_tokens is not None]
        num_prompt, scheduled = len(request_group.prompt_token_ids), metrics.first_scheduled_time
        to.prompt_tokens.observe(num_prompt)
        to.num_preemptions.observe(metrics.preemptions)
        if metrics.finished_time is not None:
            to.e2e_latency.observe(metrics.finished_time - metrics.arrival_time)
        if scheduled is not None:
            to.queue_time.observe(scheduled - metrics.arrival_time)
            num_cached = request_group.first.schedule.num_cached_tokens
            to.prefill_computed_tokens.observe(num_prompt - num_cached)
            self._prefix_hit_requests += num_cached > 0
        if not lengths:
            return
        for length in lengths:
            to.generation_tokens.observe(length)
        to.max_generation_tokens.observe(max(lengths))
        to.params_n.observe(params.n)
        if params.max_tokens is not None:
            to.params_max_tokens.observe(params.max_tokens)
        first, last = metrics.first_token_time, metrics.last_token_time
        if scheduled is None or first is None or last is None:
            return
        to.prefill_time.observe(first - scheduled)
        to.decode_time.observe(last - first)
        to.inference_time.observe(last - scheduled)
        if max(lengths) > 1:
            to.time_per_output_token.observe((last - first) / (max(lengths) - 1))

    def note_lost(self, count: int) -> None:
        """Count request groups that were dropped without an output, because the engine started over."""
        self._finished["abort"] += count

    def reset(self) -> None:
        """Forget everything."""
        self._requests.reset()
        self._prefix_hit_requests = 0
        self._finished.update(dict.fromkeys(FINISH_REASONS, 0))
        for histogram in (self._step_tokens, self._update_seconds, *self._step_seconds.values()):
            histogram.reset()
        for field in dataclasses.fields(self._phases):
            setattr(self._phases, field.name, 0.0)

    def snapshot(
        self, scheduler: Scheduler, runner: Runner[Any], counters: EngineCounters, *, enable_prefix_caching: bool,
        asleep: frozenset[str], weight_version: WeightVersion,
    ) -> EngineMetricsSnapshot:  # fmt: skip
        """All metrics now. asleep, weight_version: as in `EngineMetricsSnapshot`."""
        manager, events = scheduler.manager, scheduler.counters
        longest = -(-runner.max_model_len // manager.block_size) * manager.block_size
        return EngineMetricsSnapshot(
            stats=collect_stats(scheduler, runner, counters),
            requests=self._requests.copy(),
            finished=self._finished.copy(),
            step_tokens=self._step_tokens.copy(),
            step_seconds={kind: histogram.copy() for kind, histogram in self._step_seconds.items()},
            phases=dataclasses.replace(self._phases),
            programs=runner.program_metrics(),
            sharing=manager.pool.sharing(),
            kv_waste=manager.waste,
            corrupted_requests=counters.corrupted_requests,
            rejected_requests=events.rejected_requests,
            rejected_tokens=events.rejected_tokens,
            enable_prefix_caching=enable_prefix_caching,
            kv_tokens=manager.pool.num_blocks * longest // manager.max_blocks(longest) if manager.windows else 0,
            max_model_len=runner.max_model_len,
            asleep=asleep,
            has_weights=runner.weights_problem() is None,
            weight_version=weight_version,
            update_seconds=self._update_seconds.copy(),
            adapters=_adapters(scheduler),
            prefix_hit_requests=self._prefix_hit_requests,
        )


def _adapters(scheduler: Scheduler) -> AdapterMetrics | None:
    """LoRA adapters now; None if the engine has no slots."""
    gate = scheduler.adapters
    return AdapterMetrics(gate.num_slots, *map(tuple, gate.names())) if gate.num_slots else None
