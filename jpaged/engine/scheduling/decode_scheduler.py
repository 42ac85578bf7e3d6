"""Step 1 of scheduling: every request whose last token was sampled advances by that token.

Called by: `Scheduler.schedule`, before prompts get tokens; the plan builder and `Forks`, for rows that decode next.
Owns: the rule for `next_boundary`, the length at which a decode needs more than a counter.
Never: delays a decode for a waiting prompt. A running prompt that needs a block may preempt a decode.

Nearly all decodes are plain: the token fits into the request's last block, so nothing changes but counters. A request
is handled one by one only at its next boundary, where it needs a block, frees one, switches its rope, or ends.

With pipeline stages the decoding requests are divided into micro-batches, one for each stage. They take turns: the next
step of a micro-batch comes when its last one has left the pipeline. A prompt can have a chunk in every turn.
"""

from jpaged.engine.kv_cache.block_table import NEVER
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.scheduling.preemption import Preemption
from jpaged.engine.scheduling.scheduler_state import SchedulerState
from jpaged.engine.scheduling.step_selection import StepSelection


class DecodeScheduler:
    """Selects the decodes of a step, and keeps each decoding request's `next_boundary`."""

    def __init__(self, state: SchedulerState, preemption: Preemption):
        self._manager = state.manager
        self._running = state.running
        switch_len = state.limits.longrope_switch_len
        self._switch_len = NEVER if switch_len is None else switch_len
        self._preemption = preemption
        self._num_stages = state.limits.num_stages
        self._turn = 0  # micro-batch of the step that is being planned

    def schedule(self, selection: StepSelection) -> None:
        """Add all decodes. Running requests that do not decode are collected in `selection.prompts`."""
        decodes, prompts, boundary = selection.decodes, selection.prompts, []
        requests = self._running.requests if self._num_stages == 1 else self._next_micro_batch()
        for request in requests:  # the only loop over all rows: keep it short
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
            self._schedule_boundary(boundary, selection)

    def note_sampled(self, request: Request) -> None:
        """Note that the step being planned samples a token for this request."""
        schedule = request.schedule
        schedule.num_in_flight += 1
        schedule.micro_batch = self._turn
        schedule.on_hold = request.is_beam
        if not request.is_beam:
            self._running.start_decoding(request)

    def update_boundary(self, request: Request) -> None:
        """Free blocks that left their windows, and compute `next_boundary`."""
        kv, schedule = request.kv, request.schedule
        if schedule.num_computed - schedule.num_drafts_in_flight >= kv.release_at:
            self._manager.release_before_windows(request)
        if not schedule.decoding or kv.tail_shared:
            schedule.next_boundary = 0
            return
        boundary = min(kv.num_slots, request.max_total_tokens - 1, kv.release_at - 1)
        if kv.rope_len <= self._switch_len:
            boundary = min(boundary, self._switch_len)
        schedule.next_boundary = boundary

    def _next_micro_batch(self) -> list[Request]:
        """Requests of the next turn, in the policy's order: a micro-batch, and all requests that do not decode.

        A micro-batch larger than its share passes the rest on to the next turn, so that all become equally large. A
        request is passed on once for each token: a decode waits for at most `num_stages` turns.
        """
        self._turn = turn = (self._turn + 1) % self._num_stages
        running, following = self._running.requests, (turn + 1) % self._num_stages
        share = -(-sum(self._will_decode(request) for request in running) // self._num_stages)
        due, count = [], 0
        for request in running:
            schedule = request.schedule
            if schedule.decoding:
                # One whose last token is in flight takes no place: it leaves when that token arrives.
                if schedule.micro_batch != turn or not self._will_decode(request):
                    continue
                count += 1
                if count > share and not schedule.passed_on:
                    schedule.micro_batch, schedule.passed_on = following, True
                    continue
                schedule.passed_on = False
            due.append(request)
        return due

    def _will_decode(self, request: Request) -> bool:
        # A decoding request has computed all its tokens but one: at max_total_tokens - 1 it has all of them.
        return request.schedule.decoding and request.schedule.num_computed < request.max_total_tokens - 1

    def _schedule_boundary(self, boundary: list[Request], selection: StepSelection) -> None:
        """Add decodes that reached their next boundary, in order. Most of them need a block and nothing else."""
        boundary = [r for r in boundary if self._will_decode(r)]
        selection.block_updates = self._manager.next_blocks([r for r in boundary if self._needs_only_a_block(r)])
        for request in boundary:
            if request.schedule.status is RequestStatus.RUNNING:  # not preempted for an earlier one
                self._add_at_boundary(request, selection)

    def _needs_only_a_block(self, request: Request) -> bool:
        kv, computed = request.kv, request.schedule.num_computed
        return computed == kv.num_slots and not kv.tail_shared and not computed == self._switch_len >= kv.rope_len

    def _add_at_boundary(self, request: Request, selection: StepSelection) -> None:
        kv, schedule = request.kv, request.schedule
        computed = schedule.num_computed
        if computed == self._switch_len >= kv.rope_len:  # the next token belongs to a long sequence
            if not schedule.num_drafts_in_flight:  # otherwise it waits: drafts may be rejected
                self._preemption.preempt(request, selection)
            return
        needs_block = computed == kv.num_slots or kv.tail_shared
        if needs_block and not self._preemption.grow(request, computed, 1, selection):
            return
        if self._manager.states is not None and computed % self._manager.block_size == 0:
            self._manager.states.note_decode(request)
        schedule.num_computed = computed + 1
        schedule.num_in_flight += 1
        selection.decodes.append(request)
        selection.boundary_decodes.append(request)
        selection.budget -= 1
