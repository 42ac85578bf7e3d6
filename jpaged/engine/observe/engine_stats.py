"""Statistics of one engine, collected from its parts, and totals of several engines."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.step_plan import ExpertLoad, Runner
from jpaged.outputs import EngineStats


@dataclasses.dataclass(slots=True)
class EngineCounters:
    """Events since the start or the last reset that the scheduler does not count."""

    generated_tokens: int = 0
    finished_requests: int = 0   # request groups
    corrupted_requests: int = 0  # requests whose logits were not finite
    expert_pairs: int = 0        # sums of `ExpertLoad` over steps
    busiest_expert_pairs: int = 0

    def note_experts(self, load: ExpertLoad) -> None:
        """Count the work of the experts in one step."""
        self.expert_pairs += load.pairs
        self.busiest_expert_pairs += load.busiest

    def reset(self) -> None:
        """Set all counters to 0."""
        self.generated_tokens = self.finished_requests = self.corrupted_requests = 0
        self.expert_pairs = self.busiest_expert_pairs = 0


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
        num_waiting=len(scheduler.waiting),
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
        host_slots=runner.host_slots,
        empty_turns=events.empty_turns,
        expert_pairs=counters.expert_pairs,
        busiest_expert_pairs=counters.busiest_expert_pairs,
        used_host_slots=0 if pool.host_tier is None else pool.host_tier.num_used,
    )


def total_stats(each: Sequence[EngineStats]) -> EngineStats:
    """Totals of several engines. The peak is the sum of their peaks, which may have been at different times."""
    if len(each) == 1:
        return each[0]
    names = [field.name for field in dataclasses.fields(EngineStats)]
    total = {name: sum(getattr(stats, name) for stats in each) for name in names}
    total["block_size"] = each[0].block_size
    total["kv_waste"] = sum(stats.kv_waste * stats.steps for stats in each) / max(total["steps"], 1)
    return EngineStats(**total)
