"""Steps 2 and 3 of scheduling: prompts that are being computed get a chunk, and waiting requests start.

Called by: `Scheduler.schedule`, after the decodes.
Owns: the order in which prompts get the rest of the token budget.
Never: preempts a decode for a prompt that waits.

Short prompts do not wait for long ones. A prompt is long if one step cannot compute all of it.

- At most `max_num_partial_prefills` long prompts are computed at a time. The next one then finds a shared prefix in the
  prefix index. For the same reason, a request waits while a long prompt computes tokens that both share.
- While other prompts wait or are being computed, long prompts leave them a quarter of the token budget.
- A short prompt may pass a long one in the waiting queue, if it takes neither its row nor its blocks.
"""

from collections.abc import Callable

from jpaged.engine.kv_cache.prefix_finder import Prefix
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.scheduling.preemption import Preemption
from jpaged.engine.scheduling.scheduler_state import SchedulerState
from jpaged.engine.scheduling.step_selection import StepSelection
from jpaged.engine.scheduling.text_batches import TextBatches

# After this many steps, a request that failed to start looks up its prefix again, even if no more blocks are free: the
# prefix may have grown. Looking up 40,000 cached tokens takes 3 ms.
RETRY_STEPS = 16
SHORT_PROMPT_SHARE = 4   # long prompts leave 1 / SHORT_PROMPT_SHARE of the token budget to other requests
MAX_LOOKAHEAD = 32       # waiting requests after a long one that are searched for short prompts


class PromptScheduler:
    """Selects chunks of prompts, and starts waiting requests."""

    def __init__(self, state: SchedulerState, preemption: Preemption, clock: Callable[[], float]):
        self._manager = state.manager
        self._waiting = state.waiting
        self._running = state.running
        self._counters = state.counters
        self._limits = state.limits
        self._max_long = state.options.max_num_partial_prefills
        self._preemption = preemption
        self._clock = clock
        self._texts = TextBatches(state)

    def schedule(self, selection: StepSelection) -> None:
        """Add chunks of prompts within the token budget."""
        if not selection.prompts and not self._waiting:
            return
        if self._limits.text_shapes:
            self._texts.start(self._start, selection)
            return
        prompts = [r for r in selection.prompts if r.schedule.status is RequestStatus.RUNNING and r.num_missing]
        for request in prompts:
            if self._limits.must_switch_rope(request, len(request.token_ids)):  # a beam, whose next token is known
                self._preemption.preempt(request, selection)
        prompts = [r for r in prompts if r.schedule.status is RequestStatus.RUNNING]
        long: list[Request] = []
        if prompts:
            long = [r for r in prompts if r.num_missing > selection.budget][: self._max_long]
            self._continue_prompts(prompts, long, selection)
            long = [r for r in long if r.schedule.status is RequestStatus.RUNNING]
        if self._waiting and self._running.free_rows and selection.budget:
            self._start_waiting(long, selection)
        self._use_up_budget(long, selection)

    def _continue_prompts(self, prompts: list[Request], long: list[Request], selection: StepSelection) -> None:
        share = 0
        for position, request in enumerate(prompts):
            if selection.budget == 0 or request.schedule.status is not RequestStatus.RUNNING:
                continue
            count = min(request.num_missing, selection.budget)
            if request in long:
                others = position + 1 < len(prompts) or bool(self._waiting)
                share = share or _long_share(selection.budget, others=others, count=len(long))
                count = min(share, count)
            self._add_chunk(request, count, selection)
        # Only now: no later code in this step preempts these requests, so the named blocks will be computed.
        for request in prompts:
            if request in selection.chunks:
                self._manager.names.index_computed(request, selection.end(request))

    def _use_up_budget(self, long: list[Request], selection: StepSelection) -> None:
        """Give the rest of the token budget to the long prompts."""
        for request in long:
            if request in selection.chunks:
                done = selection.end(request)
                reach = self._manager.slots_within_reach(request)
                left = min(request.num_tokens - done, selection.budget, reach - done)
                if left > 0:
                    self._add_chunk(request, left, selection)

    def _start_waiting(self, long: list[Request], selection: StepSelection) -> None:
        """Start requests from the head of the waiting queue. Long prompts among them are appended to `long`."""
        while self._waiting and self._running.free_rows and selection.budget:
            request = self._waiting.head()
            prefix = self._startable(request, selection, reserved=0)
            if prefix is None:
                break
            missing = self._missing_after(request, prefix)
            if self._awaits_prefix(request, prefix, long, selection):
                self._start_short_prompts_after(request, long, selection)
                break
            if missing <= self._limits.max_num_batched_tokens:
                self._start(request, prefix, min(missing, selection.budget), selection)
            elif len(long) < self._max_long:
                long.append(request)
                share = _long_share(selection.budget, others=len(self._waiting) > 1, count=1)
                self._start(request, prefix, min(missing, share), selection)
            else:
                self._start_short_prompts_after(request, long, selection)
                break

    def _start_short_prompts_after(self, head: Request, long: list[Request], selection: StepSelection) -> None:
        """Start short prompts after the head, which cannot start yet. A row and the head's blocks stay free."""
        reserved = self._manager.max_blocks(len(head.token_ids))
        for request in self._waiting.after_head(MAX_LOOKAHEAD):
            if len(self._running.free_rows) < 2 or selection.budget == 0:
                return
            if len(request.token_ids) > self._limits.max_num_batched_tokens:
                continue
            prefix = self._startable(request, selection, reserved)
            if prefix is not None and not self._awaits_prefix(request, prefix, long, selection):
                missing = self._missing_after(request, prefix)
                self._start(request, prefix, min(missing, selection.budget), selection)

    def _awaits_prefix(
        self, request: Request, prefix: Prefix, long: list[Request], selection: StepSelection
    ) -> bool:
        """Whether a long prompt will compute the request's next block, in a later step."""
        next_end = (prefix.num_blocks + 1) * self._manager.block_size
        return any(
            other.schedule.status is RequestStatus.RUNNING
            and selection.end(other) < next_end
            and self._manager.names.may_share(request, other, next_end)
            for other in long
        )

    def _missing_after(self, request: Request, prefix: Prefix) -> int:
        return len(request.token_ids) - prefix.num_blocks * self._manager.block_size

    def _startable(self, request: Request, selection: StepSelection, reserved: int) -> Prefix | None:
        """The prefix that a waiting request can start with; None while it cannot start.

        All its known tokens must fit into the free blocks, or it would soon be preempted and recomputed. Not counted as
        free are blocks that running prompts need, one block per kv_group and running request, and `reserved` blocks.
        """
        manager, schedule = self._manager, request.schedule
        if schedule.num_in_flight:
            return None  # preempted while tokens were in flight: it needs them to start
        if self._limits.must_switch_rope(request, len(request.token_ids)):
            manager.names.switch_to_long_rope(request)
        if not self._running.requests:
            return manager.find_prefix(request)
        promised = sum(
            max(manager.max_blocks(len(other.token_ids)) - other.kv.num_held, 0)
            for other in selection.prompts
            if other.schedule.status is RequestStatus.RUNNING
        )
        headroom = reserved + promised + len(self._running.requests) * manager.num_kv_groups
        room, step = manager.pool.num_free - headroom, manager.pool.step
        if room <= 0:
            return None  # with any prefix, at least the last token needs a block
        if room <= schedule.refused_with and step < schedule.retry_step:
            return None
        prefix = manager.find_prefix(request)
        if prefix.state_on_host and manager.states is not None and not manager.states.can_fetch:
            return None
        if manager.can_start(prefix, len(request.token_ids), headroom):
            schedule.refused_with = -1
            return prefix
        schedule.refused_with, schedule.retry_step = room, step + RETRY_STEPS
        return None

    def _start(self, request: Request, prefix: Prefix, count: int, selection: StepSelection) -> None:
        """Give a waiting request a row, and add a chunk of `count` tokens."""
        schedule, counters = request.schedule, self._counters
        self._waiting.remove(request)
        schedule.num_computed = self._manager.start(request, prefix)
        if schedule.status is RequestStatus.PREEMPTED:
            counters.recomputed_tokens += max(schedule.num_lost - schedule.num_computed, 0)
            schedule.num_lost = 0
        else:
            schedule.num_cached_tokens = schedule.num_computed
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = self._clock()
            if request.index == 0:  # all requests of a group have the same prompt
                counters.prompt_tokens += request.prompt_len
                counters.prefix_hit_tokens += schedule.num_computed
        self._running.enter(request)
        if self._manager.states is not None:
            self._manager.states.restore(request)
        selection.prompts.append(request)
        self._add_chunk(request, count, selection)
        self._manager.names.index_computed(request, selection.end(request))

    def _add_chunk(self, request: Request, count: int, selection: StepSelection) -> None:
        """Add up to `count` more known tokens of a request, limited by the blocks that it can get, and by snapshots."""
        if self._manager.states is not None:
            count = self._manager.states.chunk_size(request, selection.end(request), count)
            if not count:
                return
        count = self._preemption.grow(request, selection.end(request), count, selection)
        if count:
            selection.add_chunk(request, count)


def _long_share(budget: int, *, others: bool, count: int) -> int:
    """Tokens for each of `count` long prompts. others: other requests wait, or have prompts to compute."""
    share = budget - (budget // SHORT_PROMPT_SHARE if others else 0)
    return max(share // count, 1)
