"""Statistics of one engine, collected from its parts, and totals of several engines."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.step_plan import ExpertLoad, Runner, StepPlan
from jpaged.outputs import EngineStats, SpeculationStats

FRESH = 0.1  # weight of the last step in the mean number of drafts per row


@dataclasses.dataclass(slots=True)
class SpeculationCounters:
    """Counts of drafts since the start or the last reset. `SpeculationStats` describes the fields."""

    accepted_per_position: list[int]  # its length is the most drafts of a row
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    drafts_per_row: float = 0.0

    @classmethod
    def of(cls, num_speculative_tokens: int) -> Self:
        """Counters for at most this number of drafts per row."""
        return cls([0] * num_speculative_tokens)

    def note_step(self, plan: StepPlan, num_accepted: np.ndarray | None) -> None:
        """Count a collected step. num_accepted: int32[R], accepted drafts by row of the plan; None: no row had drafts.

        A step without decodes changes nothing: it can have no drafts.
        """
        if not plan.num_decodes:
            return
        if num_accepted is None:
            self.drafts_per_row *= 1 - FRESH
            return
        num_drafts = plan.num_tokens - 1
        total = int(num_drafts.sum())
        self.drafts += int(np.count_nonzero(num_drafts))
        self.draft_tokens += total
        self.accepted_tokens += int(num_accepted.sum())
        self.drafts_per_row += FRESH * (total / plan.num_decodes - self.drafts_per_row)
        rows = np.bincount(num_accepted, minlength=len(self.accepted_per_position) + 1)
        reached = rows[::-1].cumsum()[::-1].tolist()  # rows by accepted drafts, at least
        for position, count in enumerate(reached[1:]):
            self.accepted_per_position[position] += count

    def reset(self) -> None:
        """Set all counters to 0. The number of drafts per row is of the last steps, and stays."""
        self.drafts = self.draft_tokens = self.accepted_tokens = 0
        self.accepted_per_position = [0] * len(self.accepted_per_position)

    def stats(self) -> SpeculationStats:
        """The counters now."""
        positions = tuple(self.accepted_per_position)
        return SpeculationStats(
            len(positions), self.drafts, self.draft_tokens, self.accepted_tokens, positions, self.drafts_per_row
        )


@dataclasses.dataclass(slots=True)
class EngineCounters:
    """Events since the start or the last reset that the scheduler does not count."""

    generated_tokens: int = 0
    finished_requests: int = 0   # request groups
    corrupted_requests: int = 0  # requests whose logits were not finite
    expert_pairs: int = 0        # sums of `ExpertLoad` over steps
    busiest_expert_pairs: int = 0
    speculation: SpeculationCounters | None = None  # None: the engine does not speculate

    def note_experts(self, load: ExpertLoad) -> None:
        """Count the work of the experts in one step."""
        self.expert_pairs += load.pairs
        self.busiest_expert_pairs += load.busiest

    def reset(self) -> None:
        """Set all counters to 0."""
        self.generated_tokens = self.finished_requests = self.corrupted_requests = 0
        self.expert_pairs = self.busiest_expert_pairs = 0
        if self.speculation is not None:
            self.speculation.reset()


def collect_stats(scheduler: Scheduler, runner: Runner[Any], counters: EngineCounters) -> EngineStats:
    """The statistics now."""
    manager, events = scheduler.manager, scheduler.counters
    pool = manager.pool
    return EngineStats(
        num_blocks=pool.num_blocks,
        block_size=manager.block_size,
        used_blocks=pool.num_used,
        peak_used_blocks=pool.peak_used,
        num_running=len(scheduler.running),
        num_waiting=scheduler.num_waiting,
        steps=events.steps,
        prompt_tokens=events.prompt_tokens,
        prefix_hit_tokens=events.prefix_hit_tokens,
        generated_tokens=counters.generated_tokens,
        finished_requests=counters.finished_requests,
        preemptions=events.preemptions,
        recomputed_tokens=events.recomputed_tokens,
        kv_waste=events.waste_sum / events.steps if events.steps else 0.0,
        compiles_after_ready=runner.compiles_after_ready,
        copied_blocks=events.copied_blocks,
        blocks_to_host=events.blocks_to_host,
        blocks_to_device=events.blocks_to_device,
        snapshots_to_host=events.snapshots_to_host,
        snapshots_to_device=events.snapshots_to_device,
        host_slots=runner.host_slots,
        empty_turns=events.empty_turns,
        expert_pairs=counters.expert_pairs,
        busiest_expert_pairs=counters.busiest_expert_pairs,
        used_host_slots=0 if pool.host_tier is None else pool.host_tier.num_used,
        free_host_slots=runner.host_slots if pool.host_tier is None else pool.host_tier.num_free,
        used_host_snapshots=0 if pool.host_tier is None else pool.host_tier.num_snapshots,
        num_waiting_for_adapters=scheduler.adapters.num_waiting,
        adapter_loads=events.adapter_loads,
        speculation=None if counters.speculation is None else counters.speculation.stats(),
    )


def total_stats(each: Sequence[EngineStats]) -> EngineStats:
    """Totals of several engines. The peak is the sum of their peaks, which may have been at different times."""
    if len(each) == 1:
        return each[0]
    names = [field.name for field in dataclasses.fields(EngineStats) if field.name != "speculation"]
    total: dict[str, Any] = {name: sum(getattr(stats, name) for stats in each) for name in names}
    total["block_size"] = each[0].block_size
    total["kv_waste"] = sum(stats.kv_waste * stats.steps for stats in each) / max(total["steps"], 1)
    return EngineStats(**total, speculation=_total_speculation([stats.speculation for stats in each]))


def _total_speculation(each: Sequence[SpeculationStats | None]) -> SpeculationStats | None:
    """Totals of several engines. Their options are equal. The drafts per row are a mean over engines."""
    found = [stats for stats in each if stats is not None]
    if not found:
        return None
    return SpeculationStats(
        num_speculative_tokens=found[0].num_speculative_tokens,
        drafts=sum(stats.drafts for stats in found),
        draft_tokens=sum(stats.draft_tokens for stats in found),
        accepted_tokens=sum(stats.accepted_tokens for stats in found),
        accepted_per_position=tuple(map(sum, zip(*(stats.accepted_per_position for stats in found), strict=True))),
        drafts_per_row=sum(stats.drafts_per_row for stats in found) / len(found),
    )
