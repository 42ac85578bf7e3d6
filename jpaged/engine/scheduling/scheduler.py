"""Decides which requests run in a step, and by how many tokens each of them advances.

Called by: `Engine` and the simulator once a step (`schedule`); strategies add requests, the output processor ends them.
Owns: the queues, the rows, and the status and progress of every request.
Never: reads tokens, or touches the device.

There is no prefill phase and no decode phase. Each step computes some of the tokens whose KV is missing, within a token
budget. One call of `schedule`:

1. Decodes: every running request whose last token was sampled advances by that token (`decode_scheduler`).
2. Prompts: a running request with known tokens to compute gets a chunk within the budget (`prompt_scheduler`).
3. New requests start in the order of the policy (`waiting_queue`), while there are rows, blocks and budget.
4. The selection becomes a plan (`plan_builder`). Prompt tokens count as computed from here on, decodes since
   step 1. A follower forks from the first request of its group when the plan finishes the prompt (`forks`).

If no block is free in steps 1 and 2, the last running request in the policy's order is preempted (`preemption`). The
oldest is preempted only if it is alone. A waiting request that finds no room in step 3 keeps waiting. Decodes never
wait for waiting prompts, because they come first. `target_step_ms` limits the prompt tokens of a step (`step_pace`).

If the rope of a model depends on the sequence length (longrope), a sequence that grows beyond `longrope_switch_len`
needs other KV. The request is preempted there, and recomputes all its tokens.

A plan is made before the previous step's tokens are known. A decode's token is in the device's request table, and
`num_in_flight` counts the tokens that have not reached the host. Only a beam's token must be known, because the host
chooses it. With pipeline stages several steps are in flight, but at most one samples for the same request
(`decode_scheduler`).
"""

import collections
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jpaged.engine.adapters.adapter_gate import AdapterGate
from jpaged.engine.kv_cache.kv_cache_manager import KVCacheManager
from jpaged.engine.request import NO_ROW, Request, RequestStatus
from jpaged.engine.scheduling.decode_scheduler import DecodeScheduler
from jpaged.engine.scheduling.draft_scheduler import DraftScheduler
from jpaged.engine.scheduling.forks import Forks
from jpaged.engine.scheduling.plan_builder import PlanBuilder
from jpaged.engine.scheduling.preemption import Preemption
from jpaged.engine.scheduling.prompt_scheduler import PromptScheduler
from jpaged.engine.scheduling.running_requests import RunningRequests
from jpaged.engine.scheduling.scheduler_state import ScheduledStep, SchedulerCounters, SchedulerLimits, SchedulerState
from jpaged.engine.scheduling.scheduling_options import SchedulingOptions
from jpaged.engine.scheduling.step_pace import StepPace
from jpaged.engine.scheduling.step_selection import StepSelection
from jpaged.engine.scheduling.waiting_queue import WaitingQueue
from jpaged.engine.speculation.speculation import Speculation
from jpaged.errors import EngineError


class Scheduler:
    """Owns the waiting and the running requests. Only the scheduler and its parts write `Request.schedule`."""

    def __init__(
        self,
        manager: KVCacheManager,
        limits: SchedulerLimits,
        options: SchedulingOptions = SchedulingOptions(),
        *,
        counters: SchedulerCounters | None = None,
        clock: Callable[[], float] = time.monotonic,
        speculation: Speculation | None = None,
        verify_sizes: Callable[[], Sequence[int]] = tuple,
    ):
        """counters: to continue; None: new ones. clock: returns seconds; arrival times must use the same clock.

        speculation: makes drafts; None: no step has any. verify_sizes: returns `Runner.verify_sizes`.
        """
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            raise EngineError(
                f"max_num_batched_tokens={limits.max_num_batched_tokens} is less than max_num_seqs="
                f"{limits.max_num_seqs}: every row needs room for one token in a step"
            )
        self.manager = manager
        self.counters = SchedulerCounters() if counters is None else counters
        self.waiting = WaitingQueue(options.scheduling_policy)
        self._rows = RunningRequests(manager, self.waiting, limits.max_num_seqs)
        target_ms = options.target_step_ms
        self._pace = StepPace(None if target_ms is None else target_ms / 1000, min_tokens=manager.block_size)
        self.limits = limits
        self.adapters = AdapterGate(limits.num_adapter_slots)
        state = SchedulerState(manager, self.waiting, self._rows, self.counters, limits, options, self.adapters)
        self._preemption = Preemption(state)
        self._decodes = DecodeScheduler(state, self._preemption)
        self._prompts = PromptScheduler(state, self._preemption, clock)
        self._forks = Forks(state, self._decodes)
        self._builder = PlanBuilder(state, self._decodes, self._forks, speculation)
        self._speculation = speculation
        self._drafts = None
        if speculation is not None:
            self._drafts = DraftScheduler(state, self._decodes, speculation, verify_sizes)
            self._rows.on_leave = speculation.note_left
        # Steps that may be in flight when tokens arrive, newest last.
        self._newest: collections.deque[ScheduledStep] = collections.deque(maxlen=limits.num_stages)

    @property
    def running(self) -> list[Request]:
        """Requests that own a row, in the order of the policy."""
        return self._rows.requests

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a row, or for a slot of their adapter."""
        return len(self.waiting) + self.adapters.num_waiting

    def all_waiting(self) -> Iterator[Request]:
        """The requests of `num_waiting`."""
        return itertools.chain(self.waiting, self.adapters.waiting)

    # -- requests come and go -----------------------------------------------------------------------------------

    def add(self, request: Request, followers: Sequence[Request] = ()) -> None:
        """Add a new request to the waiting queue. followers: fork from it when its prompt is computed."""
        request.schedule.followers = list(followers)
        switch_len = self.limits.longrope_switch_len
        if switch_len is not None and request.prompt_len > switch_len:
            self.manager.names.switch_to_long_rope(request)
        if self.adapters.enter(request):
            self.waiting.add(request)

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End a request in any state. Its blocks are free at once: the device runs steps in order."""
        self.park(request)
        request.schedule.status = status
        if self._speculation is not None:
            self._speculation.note_end(request)

    def park(self, request: Request) -> None:
        """Free everything that a request owns. It neither runs nor waits, until it is added or becomes a fork."""
        if request.schedule.status is RequestStatus.RUNNING:
            self._rows.leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            self.adapters.withdraw(request)
        request.schedule.status = RequestStatus.WAITING
        request.schedule.on_hold = False

    def fork(self, parent: Request, fork: Request) -> None:
        """Let a parked request continue from where `parent` is; it has the parent's token ids already."""
        self._forks.fork(parent, fork)

    def resume(self, request: Request) -> None:
        """Let a beam on hold continue, now that its next token is known."""
        request.schedule.on_hold = False
        if request.schedule.status is RequestStatus.PREEMPTED and request not in self.waiting:
            self.waiting.add(request)

    def preempt_all(self) -> None:
        """Preempt all running requests. No token is in flight.

        They find their KV again by its names, unless the caller forgets these.
        """
        selection = StepSelection(0)
        while self.running:
            self._preemption.preempt_last(selection)

    # -- steps --------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """Decide the next step. Returns None if nothing can be computed until tokens in flight arrive."""
        self.manager.pool.step += 1
        for request in self.adapters.admit():
            self.waiting.add(request)
        selection = StepSelection(self.limits.max_num_batched_tokens)
        self._decodes.schedule(selection)
        selection.budget = self._pace.limit(selection.budget)
        self._prompts.schedule(selection)
        while not selection and self._preemption.all_on_hold():
            self._preemption.preempt_last(selection)
            self._prompts.schedule(selection)
        if not selection:
            return None
        if self._drafts is not None:
            self._drafts.schedule(selection)
        step = self._builder.build(selection)
        self._newest.append(step)
        return step

    def results(
        self, step: ScheduledStep, num_accepted: np.ndarray | None = None
    ) -> Iterator[tuple[int, Request]]:
        """Rows of a collected step whose result counts: (index of the row in the plan, request).

        Their tokens are no longer in flight. The iterator leaves out requests that end while the caller consumes it.
        num_accepted: of a verify step, see `StepResult`.
        """
        discarded, plan = step.discarded, step.plan
        if num_accepted is not None:
            yield from self._verified(step, num_accepted.tolist())
            return
        rows: Iterator[tuple[int, Request]] = enumerate(step.requests)
        if not plan.decodes_only:
            rows = itertools.compress(rows, plan.samples.tolist())
        for index, request in rows:
            schedule = request.schedule
            if not schedule.status.is_end and request not in discarded:
                schedule.num_in_flight -= 1
                yield index, request

    def _verified(self, step: ScheduledStep, num_accepted: Sequence[int]) -> Iterator[tuple[int, Request]]:
        """`results` of a verify step."""
        if self._drafts is None or self._speculation is None:
            raise EngineError("a verify step of an engine that does not speculate")
        self._note_snapshots(step, num_accepted)
        counts = zip(step.requests, step.plan.num_tokens.tolist(), num_accepted, strict=True)
        for index, (request, num_tokens, accepted) in enumerate(counts):
            schedule, drafts = request.schedule, num_tokens - 1
            if schedule.status.is_end or request in step.discarded:
                continue
            schedule.num_in_flight -= num_tokens
            if drafts and schedule.status is RequestStatus.RUNNING:
                self._drafts.settle(request, drafts, accepted)
            if drafts:
                self._speculation.note_result(request, step.drafts[request], accepted)
            yield index, request

    def _note_snapshots(self, step: ScheduledStep, num_accepted: Sequence[int]) -> None:
        """Note which snapshots of recurrent state a verify step has taken."""
        drafts, states = step.plan.drafts, self.manager.states
        if states is None or drafts is None or drafts.snapshots is None:
            return
        for request, slot, accepted in zip(step.requests, drafts.snapshots.tolist(), num_accepted, strict=True):
            if slot >= 0:
                runs = request.schedule.status is RequestStatus.RUNNING and request not in step.discarded
                states.note_verified(request, slot, accepted if runs else None)

    def note_arrived(self, requests: Sequence[Request]) -> None:
        """Note that the sampled token of each request has reached the host. `results` does this itself."""
        for request in requests:
            request.schedule.num_in_flight -= 1

    def may_discard(self, request: Request) -> bool:
        """Whether `discard_in_flight` is possible: the device may accept drafts, and cannot undo their state."""
        return self.manager.states is None or not request.schedule.num_drafts_in_flight

    def discard_in_flight(self, request: Request) -> None:
        """Let a request continue from known tokens. Its sample in flight is dropped when it arrives."""
        schedule = request.schedule
        if schedule.num_in_flight:
            next(step for step in reversed(self._newest) if request in step.requests).discarded.add(request)
            schedule.num_in_flight = 0
        if schedule.num_drafts_in_flight and self._drafts is not None:
            self._drafts.settle(request, schedule.num_drafts_in_flight, 0)
            schedule.row_is_new = True  # the device may accept drafts: its LENGTH is uploaded again
        if self._speculation is not None:
            self._speculation.note_left(request)
        self._rows.stop_decoding(request)

    def note_seconds(self, step: ScheduledStep, seconds: float, num_accepted: np.ndarray | None = None) -> None:
        """Use the time of a step to pace later ones. num_accepted: int[rows], accepted drafts of a verify step."""
        num_prompt = len(step.plan.prompt_tokens)
        self._pace.note(num_prompt, seconds)
        if self._speculation is not None:
            self._speculation.note_step(step.plan, seconds, num_accepted)

    def note_kv_lost(self) -> None:
        """Note that the KV pages are empty, also those of a drafter on the device, and that no adapter is there."""
        self.adapters.load_again()
        if self.manager.states is not None:
            self.manager.states.forget_reserved()
        if self._speculation is not None:
            self._speculation.note_kv_lost()

    def note_new_weights(self) -> None:
        """Drop drafts that were learnt from answers of the old weights."""
        if self._speculation is not None:
            self._speculation.forget()

    def note_group_ended(self, request_id: str) -> None:
        """Note that no request of a request group is left."""
        self.adapters.leave(request_id)

    def check_integrity(self) -> None:
        """Raise EngineError unless rows, blocks and queues agree with each other. For tests, and for an idle engine."""
        self.manager.check_integrity(self.running)
        self._rows.check()
        self.adapters.check()
        ranks = [request.schedule.rank for request in self.waiting]
        if sorted(ranks) != ranks:
            raise EngineError("waiting requests are not in the policy's order")
        for request in self.waiting:
            schedule = request.schedule
            if schedule.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED) or schedule.row != NO_ROW:
                raise EngineError(f"request {request.request_id} waits, but is {schedule.status.value}")
