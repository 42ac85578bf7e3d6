"""SimulationResult: the statistics of a run, as a table and as JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jpaged.engine.scheduling.scheduling_options import SchedulingOptions
from jpaged.simulator.cost import COEFFICIENTS, CostModel
from jpaged.simulator.histogram import Histogram
from jpaged.simulator.records import Records
from jpaged.simulator.replica import Replica
from jpaged.simulator.step_load import EngineShape
from jpaged.simulator.timeline import TimelinePoint

PERCENTS = (50, 90, 99)
LATENCIES = {
    "first_token": "Time to first token",
    "inter_token": "Between tokens",
    "end_to_end": "End to end",
    "queued": "Waiting to start",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Latency:
    """Mean and percentiles of one latency, in seconds. Percentiles are within 0.5%; mean and maximum are exact."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    edges: list[float]   # upper edges of the CDF's buckets, for plots
    shares: list[float]  # share of values up to each edge

    @classmethod
    def of(cls, histogram: Histogram) -> "Latency":
        """Return the percentiles of a histogram."""
        edges, shares = histogram.shares_up_to()
        percentiles = (histogram.percentile(percent) for percent in PERCENTS)
        return cls(histogram.mean, *percentiles, histogram.largest, edges, shares)


@dataclasses.dataclass(frozen=True, slots=True)
class SimulationResult:
    """Result of a simulated load. Seconds are simulated time."""

    num_replicas: int
    finished_requests: int
    refused_requests: int
    duration: float                  # until the last token
    prompt_tokens: int               # of finished requests
    output_tokens: int               # of finished requests
    first_token: Latency             # from arrival
    inter_token: Latency             # between a request's tokens
    end_to_end: Latency              # from arrival to the last token
    queued: Latency                  # from arrival to the first step
    steps: int
    busy: float                      # share of time with a running step, averaged over replicas
    between_devices: float           # share of the steps' time in all-reduces between devices
    preemptions: int
    recomputed_tokens: int           # after preemptions
    useful_tokens: int               # computed tokens minus recomputed tokens
    prefix_hit_tokens: int           # prompt tokens found in the prefix index
    started_prompt_tokens: int       # prompt tokens of all requests that started
    kv_waste: float                  # share of allocated KV slots without a token, averaged over steps
    kv_use: float                    # share of blocks in use, averaged over time
    kv_peak: float                   # largest share of blocks in use, of any replica
    host_blocks: int                 # capacity of each replica's host tier; 0: none, or it would not pay
    blocks_to_host: int
    blocks_to_device: int
    steps_beyond_measured: int       # steps with a load larger than every measured one
    timeline: list[TimelinePoint]
    cost_model: CostModel
    engine: EngineShape
    scheduling: SchedulingOptions

    @property
    def recomputed_share(self) -> float:
        """Tokens recomputed after preemptions, divided by useful tokens."""
        return self.recomputed_tokens / self.useful_tokens if self.useful_tokens else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix index."""
        return self.prefix_hit_tokens / self.started_prompt_tokens if self.started_prompt_tokens else 0.0

    def per_second(self, count: float) -> float:
        """Return a count divided by the simulated time."""
        return count / self.duration if self.duration else 0.0

    def table(self) -> str:
        """Return all statistics as a readable table."""
        tokens = self.prompt_tokens + self.output_tokens
        lines = [
            f"Cost model:              {self.cost_model.origin}",
            f"Requests finished:       {self.finished_requests:,}"
            + (f" ({self.refused_requests:,} refused)" if self.refused_requests else ""),
            f"Simulated time:          {self.duration:,.2f} s, {self.steps:,} steps, busy {self.busy:.1%}",
            f"Throughput:              {self.per_second(self.finished_requests):,.2f} requests/s, "
            f"{self.per_second(tokens):,.1f} total tokens/s, "
            f"{self.per_second(self.output_tokens):,.1f} output tokens/s",
            f"Tokens:                  {self.prompt_tokens:,} prompt, {self.output_tokens:,} output",
            "",
            f"{'seconds':<25}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}",
        ]
        for title, latency in self.latencies().items():
            values = (latency.mean, latency.p50, latency.p90, latency.p99, latency.max)
            lines.append(f"{title:<25}" + "".join(f"{value:>10.4g}" for value in values))
        lines += [
            "",
            f"Preemptions:             {self.preemptions:,}, {self.recomputed_tokens:,} tokens recomputed: "
            f"{self.recomputed_share:.2%} of the useful ones",
            f"Prefix cache hits:       {self.prefix_hit_tokens:,} tokens, {self.hit_rate:.1%} of the prompts'",
            f"KV use:                  {self.kv_use:.1%} on average, {self.kv_peak:.1%} at most",
            f"KV waste:                {self.kv_waste:.2%} of the slots held",
        ]
        reduces = self.cost_model.all_reduces
        if reduces is not None:
            lines.append(
                f"Between devices:         {self.between_devices:.1%} of the steps' time: {reduces.count} all-reduces "
                f"a step over {reduces.num_devices} devices, at {reduces.link}"
            )
        if self.host_blocks:
            lines.append(
                f"Host tier:               {self.host_blocks:,} blocks, {self.blocks_to_host:,} moved there, "
                f"{self.blocks_to_device:,} back"
            )
        if self.steps_beyond_measured:
            share = self.steps_beyond_measured / self.steps
            lines.append(
                f"Extrapolated:            {self.steps_beyond_measured:,} steps ({share:.1%}) are larger than any the "
                "cost model was fitted to"
            )
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return all statistics as JSON values."""
        apart = ("timeline", "cost_model", "engine", "scheduling", *LATENCIES)
        names = [field.name for field in dataclasses.fields(self) if field.name not in apart]
        data = {name: getattr(self, name) for name in names}
        reduces = self.cost_model.all_reduces
        latencies = {name: dataclasses.asdict(getattr(self, name)) for name in LATENCIES}
        return {
            **data,
            "requests_per_second": self.per_second(self.finished_requests),
            "tokens_per_second": self.per_second(self.prompt_tokens + self.output_tokens),
            "output_tokens_per_second": self.per_second(self.output_tokens),
            "recomputed_share": self.recomputed_share,
            "hit_rate": self.hit_rate,
            "seconds": latencies,
            "timeline": [dataclasses.asdict(point) for point in self.timeline],
            "cost_model": {
                "origin": self.cost_model.origin,
                **{name: getattr(self.cost_model, name) for name in COEFFICIENTS},
                "all_reduces": None if reduces is None else dataclasses.asdict(reduces),
            },
            "engine": dataclasses.asdict(self.engine),
            "scheduling": dataclasses.asdict(self.scheduling),
        }

    def latencies(self) -> dict[str, Latency]:
        """Return the latencies by their titles in tables and plots."""
        return {title: getattr(self, name) for name, title in LATENCIES.items()}


def summarise(
    records: Records, replicas: Sequence[Replica], cost: CostModel, shape: EngineShape, scheduling: SchedulingOptions
) -> SimulationResult:
    """Compute the result of a finished run."""
    counters = [replica.scheduler.counters for replica in replicas]
    recomputed = sum(counter.recomputed_tokens for counter in counters)
    timeline = records.timeline.points()
    spans = [2 * (point.time - begin) for begin, point in _begins(timeline)]
    used = sum(point.kv_use * span for point, span in zip(timeline, spans, strict=True))
    return SimulationResult(
        num_replicas=len(replicas),
        finished_requests=records.finished,
        refused_requests=records.refused,
        duration=records.end,
        prompt_tokens=records.prompt_tokens,
        output_tokens=records.output_tokens,
        first_token=Latency.of(records.first_token),
        inter_token=Latency.of(records.inter_token),
        end_to_end=Latency.of(records.end_to_end),
        queued=Latency.of(records.queued),
        steps=records.steps,
        busy=records.busy / (records.end * len(replicas)) if records.end else 0.0,
        between_devices=records.between_devices / records.busy if records.busy else 0.0,
        preemptions=sum(counter.preemptions for counter in counters),
        recomputed_tokens=recomputed,
        useful_tokens=records.computed_tokens - recomputed,
        prefix_hit_tokens=sum(counter.prefix_hit_tokens for counter in counters),
        started_prompt_tokens=sum(counter.prompt_tokens for counter in counters),
        kv_waste=sum(counter.waste_sum for counter in counters) / max(records.steps, 1),
        kv_use=used / records.end if records.end else 0.0,
        kv_peak=max(replica.manager.pool.peak_used for replica in replicas) / shape.num_blocks,
        host_blocks=replicas[0].host_blocks,
        blocks_to_host=sum(counter.blocks_to_host for counter in counters),
        blocks_to_device=sum(counter.blocks_to_device for counter in counters),
        steps_beyond_measured=records.steps_beyond,
        timeline=timeline,
        cost_model=cost,
        engine=shape,
        scheduling=scheduling,
    )


def _begins(timeline: Sequence[TimelinePoint]) -> list[tuple[float, TimelinePoint]]:
    """Return (start, interval) for each interval. Intervals are adjacent and start at 0."""
    begin, pairs = 0.0, []
    for point in timeline:
        pairs.append((begin, point))
        begin = 2 * point.time - begin
    return pairs
