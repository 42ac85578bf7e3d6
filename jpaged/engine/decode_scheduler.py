"""Step 1 of scheduling: every request whose last token was sampled advances by that token.

Nearly all decodes are plain: the token fits into the request's last block, so nothing changes but counters. A request
is handled one by one only at its next boundary, where it needs a block, frees one, switches its rope, or ends.
"""

from jpaged.engine.preemption import Preemption
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.scheduler_state import SchedulerState
from jpaged.engine.step_selection import StepSelection


class DecodeScheduler:
    """Selects the decodes of a step, and keeps each decoding request's `next_boundary`."""

    def __init__(self, state: SchedulerState, preemption: Preemption):
        self._manager = state.manager
        self._running = state.running
        self._limits = state.limits
        self._preemption = preemption

    def schedule(self, selection: StepSelection) -> None:
        """Add all decodes. Running requests that do not decode are collected in `selection.prompts`."""
        decodes, prompts, boundary = selection.decodes, selection.prompts, []
        for request in self._running.requests:  # the only loop over all rows: keep it short
            schedule = request.schedule
            computed = schedule.num_computed
            if computed < schedule.next_boundary:
                schedule.num_computed = computed + 1
                schedule.num_in_flight += 1
                decodes.append(request)
            elif schedule.decoding:
                boundary.append(request)
            else:
                prompts.append(request)
        selection.budget -= len(decodes)
        if boundary:
            needs_block = [request for request in boundary if self._needs_only_a_block(request)]
            selection.block_updates = self._manager.next_blocks(needs_block)
            for request in boundary:
                if request.schedule.status is RequestStatus.RUNNING and request.num_missing:
                    self._add_at_boundary(request, selection)

    def note_sampled(self, request: Request) -> None:
        """The step being planned samples a token for this request."""
        schedule = request.schedule
        schedule.num_in_flight += 1
        schedule.on_hold = request.is_beam
        if not request.is_beam:
            self._running.start_decoding(request)

    def update_boundary(self, request: Request) -> None:
        """Free blocks that left their windows, and compute `next_boundary`."""
        kv, schedule = request.kv, request.schedule
        if schedule.num_computed >= kv.release_at:
            self._manager.release_before_windows(request)
        if not schedule.decoding or kv.tail_shared:
            schedule.next_boundary = 0
            return
        boundary = min(kv.num_slots, request.max_total_tokens - 1, kv.release_at - 1)
        switch_len = self._limits.longrope_switch_len
        if switch_len is not None and kv.rope_len <= switch_len:
            boundary = min(boundary, switch_len)
        schedule.next_boundary = boundary

    def _needs_only_a_block(self, request: Request) -> bool:
        computed = request.schedule.num_computed
        return (
            computed == request.kv.num_slots
            and not request.kv.tail_shared
            and not self._limits.must_switch_rope(request, computed + 1)
            and request.num_missing > 0
        )

    def _add_at_boundary(self, request: Request, selection: StepSelection) -> None:
        computed, kv = request.schedule.num_computed, request.kv
        if self._limits.must_switch_rope(request, computed + 1):
            self._preemption.preempt(request, selection)
            return
        needs_block = computed == kv.num_slots or kv.tail_shared
        if needs_block and not self._preemption.grow(request, computed, 1, selection):
            return
        selection.add_boundary_decode(request)
