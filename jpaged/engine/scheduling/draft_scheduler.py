"""Adds drafts to the decodes of a step, which makes it a verify step.

Called by: `Scheduler.schedule`, after decodes and prompts; `Scheduler.results`, when the accepted drafts are known.
Owns: the counts of drafts in `Request.schedule`.
Never: preempts a request, waits for tokens in flight, or adds drafts to a step with prompt tokens.

The plan is made before the previous step's tokens are known. So a request's drafts are guesses for its tokens in
flight, and for the tokens after them. The device takes those that follow its last token, if the guesses before were
right (`step_plan.DraftPlan`).

A draft counts as computed and as in flight until the host knows the accepted ones. So every count is an upper bound,
and the request has blocks for all of its drafts. When the step arrives, `settle` subtracts the rejected ones.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jpaged.engine.kv_cache.block_table import NEVER
from jpaged.engine.request import Request
from jpaged.engine.scheduling.decode_scheduler import DecodeScheduler
from jpaged.engine.scheduling.scheduler_state import SchedulerState
from jpaged.engine.scheduling.step_selection import StepSelection
from jpaged.engine.speculation.draft import Draft
from jpaged.engine.speculation.speculation import Speculation


class DraftScheduler:
    """Selects the drafts of a step. Without a drafter it does nothing."""

    def __init__(
        self, state: SchedulerState, decodes: DecodeScheduler, speculation: Speculation,
        verify_sizes: Callable[[], Sequence[int]],
    ):  # fmt: skip
        """verify_sizes: returns `Runner.verify_sizes`, which grows while programs are compiled."""
        self._manager = state.manager
        self._decodes = decodes
        self._speculation = speculation
        self._verify_sizes = verify_sizes
        self._max_drafts = state.limits.max_drafts
        switch_len = state.limits.longrope_switch_len
        self._switch_len = NEVER if switch_len is None else switch_len

    def schedule(self, selection: StepSelection) -> None:
        """Add drafts to the decodes, if they pay."""
        decodes = selection.decodes
        self._speculation.begin_step(self._verify_sizes(), len(decodes) + len(selection.chunks))
        if selection.chunks or not self._speculation.may_draft(decodes):
            return
        most = [self._most_drafts(request) for request in decodes]
        for request, draft in self._speculation.choose(decodes, most):
            self._add(request, draft, selection)
        if selection.drafts and self._speculation.has_model:
            work = selection.model_drafts = self._speculation.plan_model(decodes, selection.drafts)
            self._lower(selection, [0] * len(decodes) if work is None else work.num_drafts.tolist())

    def settle(self, request: Request, drafts: int, accepted: int) -> None:
        """Subtract rejected drafts of a request that runs, and has drafts in flight. The step has arrived."""
        schedule, rejected = request.schedule, drafts - accepted
        schedule.num_drafts_in_flight -= drafts
        schedule.num_computed -= rejected
        self._manager.note_rejected(request, rejected)
        self._decodes.update_boundary(request)

    def _most_drafts(self, request: Request) -> int:
        """Drafts that the request's length allows. It may sample one token more than it has drafts."""
        left = min(request.max_total_tokens - request.num_tokens, self._max_drafts)
        if request.kv.rope_len <= self._switch_len:  # no draft may need the rope of long sequences
            left = min(left, self._switch_len - request.schedule.num_computed)
        return left

    def _lower(self, selection: StepSelection, num_drafts: Sequence[int]) -> None:
        """Lower the drafts of the device to those that the draft model can make: it may have to catch up first."""
        for request, most in zip(selection.decodes, num_drafts, strict=True):
            draft = selection.drafts.get(request)
            if draft is None or draft.guesses is not None or draft.count == most:
                continue
            schedule, excess = request.schedule, draft.count - most
            schedule.num_computed -= excess
            schedule.num_in_flight -= excess
            schedule.num_drafts_in_flight -= excess
            self._manager.note_computed(-excess)
            if most:
                selection.drafts[request] = dataclasses.replace(draft, count=most)
            else:
                del selection.drafts[request]
                selection.boundary_decodes.append(request)  # its blocks have changed

    def _add(self, request: Request, draft: Draft, selection: StepSelection) -> None:
        """Add a request's drafts, if blocks for them are free. Its last token has a slot already."""
        manager, schedule = self._manager, request.schedule
        room = manager.slots_within_reach(request) - schedule.num_computed
        count = min(draft.count, room)
        if count <= 0:
            return
        first = request.kv.num_slots // manager.block_size
        if manager.grow(request, schedule.num_computed + count):
            selection.block_updates += [
                (schedule.row, kv_group, index, block)
                for kv_group, table in enumerate(request.kv.block_tables)
                for index, block in enumerate(table.blocks[first:], first)
            ]
        schedule.num_computed += count
        schedule.num_in_flight += count
        schedule.num_drafts_in_flight += count
        manager.note_computed(count)
        selection.drafts[request] = dataclasses.replace(draft, count=count)
