"""A snapshot of the engine: copied between two steps, described afterwards.

1. `capture` copies a few lists, while the engine waits.
2. `EngineCapture.snapshot` describes the copies, on any thread. It takes about 30 times as long
   (`benchmarks/host_overhead.py`).
"""

import dataclasses
import time

from jpaged.engine.kv_cache.block_pool import BlockStates
from jpaged.engine.observe.step_log import LoggedStep, StepLog
from jpaged.engine.request import NO_ROW, Request, RequestStatus
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.scheduling.scheduler_state import SchedulerLimits
from jpaged.outputs import EngineStats, WeightVersion
from jpaged.snapshot import BlockOwner, BlockSnapshot, EngineSnapshot, PoolSnapshot, RequestSnapshot


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """Blocks of one request in one kv_group."""

    owner: RequestSnapshot
    kv_group: int
    first: int        # index of the first of these blocks in the block table
    blocks: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class EngineCapture:
    """Copies of block states, block tables and request states. Nothing changes them."""

    step: int
    block_size: int
    num_kv_groups: int
    states: BlockStates
    held: list[_Held]
    running: tuple[RequestSnapshot, ...]
    waiting: tuple[RequestSnapshot, ...]
    limits: SchedulerLimits
    stats: EngineStats
    steps: tuple[LoggedStep, ...]
    now: float  # seconds of `time.monotonic()`
    weight_version: WeightVersion

    def snapshot(self) -> EngineSnapshot:
        """The description, as plain data."""
        states = self.states
        owners: list[list[BlockOwner]] = [[] for _ in states.ref_counts]
        filled = [0] * len(owners)
        for held in self.held:
            request = held.owner
            for index, block in enumerate(held.blocks, held.first):
                owners[block].append(BlockOwner(request.request_id, request.sample, held.kv_group, index))
                tokens = min(request.computed_tokens - index * self.block_size, self.block_size)
                filled[block] = max(filled[block], tokens)
        blocks = []
        for block, ref_count in enumerate(states.ref_counts):
            used, name = ref_count > 0, states.names[block]
            tokens = filled[block] if used else self.block_size if name is not None else 0
            prefix_hash = None if name is None else name.digest.hex()
            last = self.step if used else states.last_used[block]
            blocks.append(BlockSnapshot(block, ref_count, tuple(owners[block]), prefix_hash, last, tokens))
        return EngineSnapshot(
            step=self.step,
            pool=self._pool(blocks),
            blocks=tuple(blocks),
            running=self.running,
            waiting=self.waiting,
            max_num_seqs=self.limits.max_num_seqs,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            stats=self.stats,
            last_steps=tuple(step.described(self.now) for step in self.steps),
            weight_version=self.weight_version,
        )

    def _pool(self, blocks: list[BlockSnapshot]) -> PoolSnapshot:
        used = [block for block in blocks if block.ref_count > 0]
        cached = sum(block.ref_count == 0 and block.prefix_hash is not None for block in blocks)
        return PoolSnapshot(
            num_blocks=len(blocks),
            block_size=self.block_size,
            num_groups=self.num_kv_groups,
            used_blocks=len(used),
            shared_blocks=sum(block.ref_count > 1 for block in used),
            cached_blocks=cached,
            empty_blocks=len(blocks) - len(used) - cached,
            references=sum(block.ref_count for block in used),
            used_tokens=sum(block.tokens for block in used),
        )


def capture(
    scheduler: Scheduler, steps: StepLog, stats: EngineStats, weight_version: WeightVersion = 0
) -> EngineCapture:
    """Copy the state of scheduler, block tables and pool. Call it between two steps. stats: the statistics now."""
    manager, now = scheduler.manager, time.monotonic()
    running = [(request, _described(request, now)) for request in scheduler.running]
    waiting = [(request, _described(request, now)) for request in scheduler.all_waiting()]
    return EngineCapture(
        step=manager.pool.step,
        block_size=manager.block_size,
        num_kv_groups=manager.num_kv_groups,
        states=manager.pool.states(),
        held=[
            _Held(described, kv_group, table.first_held, table.held)
            for request, described in (*running, *waiting)
            for kv_group, table in enumerate(request.kv.block_tables)
        ],
        running=tuple(described for _, described in running),
        waiting=tuple(described for _, described in waiting),
        limits=scheduler.limits,
        stats=stats,
        steps=steps.last(),
        now=now,
        weight_version=weight_version,
    )


def _described(request: Request, now: float) -> RequestSnapshot:
    status = request.schedule.status.value
    if request.schedule.status is RequestStatus.RUNNING:
        status = "decode" if request.schedule.decoding else "prefill"
    return RequestSnapshot(
        request_id=request.request_id,
        sample=request.index,
        status=status,
        row=None if request.schedule.row == NO_ROW else request.schedule.row,
        priority=request.priority,
        prompt_tokens=request.prompt_len,
        output_tokens=request.num_output_tokens,
        computed_tokens=request.schedule.num_computed,
        cached_tokens=request.schedule.num_cached_tokens,
        num_blocks=request.kv.num_held,
        preemptions=request.metrics.preemptions,
        age_seconds=now - request.metrics.arrival_time,
        adapter=None if request.adapter is None else request.adapter.name,
    )
