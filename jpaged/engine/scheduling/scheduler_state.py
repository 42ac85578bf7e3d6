"""State that the parts of the scheduler share."""

import dataclasses
from collections.abc import Mapping

from jpaged.engine.adapters.adapter_gate import AdapterGate
from jpaged.engine.kv_cache.kv_cache_manager import KVCacheManager
from jpaged.engine.request import Request
from jpaged.engine.scheduling.running_requests import RunningRequests
from jpaged.engine.scheduling.scheduling_options import SchedulingOptions
from jpaged.engine.scheduling.waiting_queue import WaitingQueue
from jpaged.engine.speculation.draft import Draft
from jpaged.engine.step_plan import StepPlan, TextShape


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Sizes that bound a step. The runner sets them."""

    max_num_seqs: int            # rows of the request table
    max_num_batched_tokens: int  # token budget of a step
    vocab_size: int
    # A longer sequence needs KV computed with the rope of long sequences (longrope); None: the rope never switches.
    longrope_switch_len: int | None = None
    num_stages: int = 1  # pipeline stages, and micro-batches of decoding requests
    max_drafts: int = 0  # most drafts per row of a verify step; 0: the engine does not speculate
    num_adapter_slots: int = 0  # LoRA adapters that are on the device at a time; 0: requests have none
    text_shapes: tuple[TextShape, ...] = ()  # see `Runner`; (): a decoder

    def must_switch_rope(self, request: Request, num_tokens: int) -> bool:
        """Whether a request's KV has the short rope, and `num_tokens` tokens need the long one."""
        limit = self.longrope_switch_len
        return limit is not None and num_tokens > limit >= request.kv.rope_len


@dataclasses.dataclass(slots=True)
class SchedulerCounters:
    """Events since the start or the last reset."""

    steps: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    copied_blocks: int = 0
    blocks_to_host: int = 0
    blocks_to_device: int = 0
    snapshots_to_host: int = 0
    snapshots_to_device: int = 0
    adapter_loads: int = 0  # LoRA adapters written into slots of the device
    rejected_requests: int = 0  # request groups refused because of max_queued_requests
    rejected_tokens: int = 0    # request groups refused because of max_queued_tokens
    empty_turns: int = 0  # turns of the pipeline without a step, while other steps are in flight
    waste_sum: float = 0.0  # sum over steps of the share of slots that store no token

    def note_rejection(self, limit: str) -> None:
        """Count a refused request group. limit: the option of the limit that it exceeds."""
        if limit == "max_queued_requests":
            self.rejected_requests += 1
        else:
            self.rejected_tokens += 1

    def reset(self) -> None:
        """Set all counters to 0."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, field.default)


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerState:
    """Requests, blocks and limits."""

    manager: KVCacheManager
    waiting: WaitingQueue
    running: RunningRequests
    counters: SchedulerCounters
    limits: SchedulerLimits
    options: SchedulingOptions
    adapters: AdapterGate


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan, and the requests that its rows belong to."""

    plan: StepPlan
    requests: tuple[Request, ...]                 # in the order of the plan's rows
    scored: tuple[tuple[Request, int], ...] = ()  # (request, number of entries in the plan's `scored`), in their order
    # Requests whose sample of this step is dropped when it arrives, because forced tokens took its position.
    discarded: set[Request] = dataclasses.field(default_factory=set)
    drafts: Mapping[Request, Draft] = dataclasses.field(default_factory=dict)  # of a verify step
