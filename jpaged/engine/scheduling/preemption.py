"""Allocates blocks for running requests, and preempts requests when no block is free.

A preempted request loses its row and blocks, and waits to run again. It finds its full blocks again by name, unless
they were allocated meanwhile; with a host tier, it also finds blocks that moved there. It recomputes the rest.
"""

from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.scheduling.scheduler_state import SchedulerState
from jpaged.engine.scheduling.step_selection import StepSelection


class Preemption:
    """Preempts running requests.

    There are four causes:

    - No block is free (`grow`). The `victim` is the last request in the policy's order. It is the oldest request only
      if that is alone. Alone it always fits, so the engine always makes progress.
    - The request outgrows the short rope of a longrope model. It is preempted itself, and recomputes its KV.
    - All running requests are beams on hold, and another beam of their search waits for blocks (`preempt_last`).
    - The engine sleeps or forgets its cache: `Scheduler.preempt_all` preempts all of them.
    """

    def __init__(self, state: SchedulerState):
        self._manager = state.manager
        self._running = state.running
        self._waiting = state.waiting
        self._counters = state.counters

    def grow(self, request: Request, done: int, count: int, selection: StepSelection) -> int:
        """Allocate blocks for up to `count` tokens after the first `done`. Preempts requests if necessary.

        Returns the number of tokens that have room, at least 1; or 0 if the request itself was preempted.
        """
        manager, kv = self._manager, request.kv
        while (reach := manager.slots_within_reach(request)) <= done:
            victim = self.victim()
            self.preempt(victim, selection)
            if victim is request:
                return 0
        count = min(count, reach - done)
        changes = manager.unshare_tail(request) if kv.tail_shared else []
        first = kv.num_slots // manager.block_size
        row_is_new = request.schedule.row_is_new  # then the device gets whole block tables, not changes
        if manager.grow(request, done + count) and not row_is_new:
            for kv_group, table in enumerate(kv.block_tables):
                changes += [(kv_group, index, block) for index, block in enumerate(table.blocks[first:], first)]
        if not row_is_new:
            selection.block_updates += [(request.schedule.row, *change) for change in changes]
        return count

    def victim(self) -> Request:
        """The request to preempt next: the last in the policy's order, and the oldest request only if it is alone."""
        *others, last = self._running.requests
        if others and last is min(self._running.requests, key=lambda request: request.arrival):
            return others[-1]
        return last

    def preempt(self, request: Request, selection: StepSelection) -> None:
        """Free the row and blocks of a running request, and put it back into the waiting queue."""
        schedule = request.schedule
        selection.remove(request)
        schedule.num_lost = schedule.num_computed
        self._running.leave(request)
        schedule.status = RequestStatus.PREEMPTED
        request.metrics.preemptions += 1
        self._counters.preemptions += 1
        if not schedule.on_hold:
            self._waiting.add(request)

    def preempt_last(self, selection: StepSelection) -> None:
        """Preempt the request that is last in the policy's order."""
        self.preempt(self._running.requests[-1], selection)

    def all_on_hold(self) -> bool:
        """Whether nothing can advance: all running requests are beams on hold for a beam that waits for blocks."""
        waiting, running = self._waiting, self._running.requests
        if not waiting or not running:
            return False
        return all(r.schedule.on_hold and not r.schedule.num_in_flight for r in running) and not any(
            r.schedule.num_in_flight for r in waiting
        )
